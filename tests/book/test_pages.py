"""The built book in a real browser, and proof that each check can fail."""

import json
import re
from pathlib import Path

import page_checks as checks
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HTML = ROOT / "_build" / "html"


def pages() -> list[str]:
    """The pages of the book, from its search index."""
    text = (HTML / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    names = [f"{name}.html" for name in index["docnames"]]
    return [*names, "search.html", "genindex.html", "py-modindex.html"]


@pytest.fixture(scope="module")
def visits(browser, site):
    context = browser.new_context(color_scheme="light")
    yield [checks.visit(context, site, page) for page in pages()]
    context.close()


def of_all(visits, check) -> dict[str, list[str]]:
    found = {seen.url.removeprefix(seen.site): check(seen) for seen in visits}
    return {page: faults for page, faults in found.items() if faults}


def exists(url: str) -> bool:
    path = HTML / re.sub(r"^http://[^/]*/", "", url)
    return path.is_file() or (path / "index.html").is_file()


def anchors(visits) -> dict[str, set[str]]:
    return {seen.url: set(seen.survey["ids"]) for seen in visits}


@pytest.mark.parametrize(
    "check",
    [
        checks.console,
        checks.requests,
        checks.external,
        checks.formulas,
        checks.images,
        checks.code,
        checks.captions,
        checks.phone,
        checks.one_search,
    ],
    ids=lambda check: check.__name__,
)
def test_every_page(visits, check):
    assert of_all(visits, check) == {}


def test_every_link_resolves(visits):
    ids = anchors(visits)
    assert of_all(visits, lambda seen: checks.links(seen, ids, exists)) == {}


def test_pages_and_figures_follow_the_toggle(browser, visits):
    drawn = [
        v.url
        for v in visits
        if v.url.endswith("/intro.html")
        or any((i["source"] or "").endswith(".svg") for i in v.survey["images"])
    ]
    found = {url: checks.themes(browser, url) for url in drawn}
    assert {url: faults for url, faults in found.items() if faults} == {}


# ---- search ----

FIRST_HITS = {
    "all-to-all": "glossary.html#term-all-to-all",
    "alltoall": "glossary.html#term-",
    "zero-bubble": "glossary.html#term-zero-bubble",
    "allreduce": "glossary.html#term-allreduce",
    "reduce-scatter": "glossary.html#term-reduce-scatter",
    "1F1B": "glossary.html#term-1F1B",
    "MFU": "glossary.html#term-MFU",
    "全归约": "glossary.html#term-",
    "what training costs": "02_workload.html",
    "notation": "notation.html",
    "will it fit": "will_it_fit.html",
}


def first_hit(browser, site: str, query: str) -> str:
    tab = browser.new_page()
    tab.goto(f"{site}search.html?q={query}")
    hit = tab.locator("#search-results ul.search li a").first
    hit.wait_for(timeout=5000)
    address = hit.get_attribute("href")
    tab.close()
    return address


@pytest.mark.parametrize("query", FIRST_HITS)
def test_the_first_hit_of_a_search_is_right(browser, site, query):
    assert FIRST_HITS[query] in first_hit(browser, site, query)


# ---- the survey map ----


def test_the_survey_map_filters_and_sorts(browser, site):
    tab = browser.new_page()
    tab.goto(f"{site}book/survey_map.html")
    rows = tab.locator("table.searchable tbody tr")
    systems = [text.split("\n")[0] for text in rows.all_inner_texts()]
    header = tab.locator("table.searchable th").first
    header.click()
    names = tab.locator("table.searchable tbody tr td:first-child").all_inner_texts()
    header.click()
    back = tab.locator("table.searchable tbody tr td:first-child").all_inner_texts()
    assert names == back[::-1]
    assert header.get_attribute("aria-sort") == "descending"
    tab.locator(".table-filter").fill(names[0])
    assert tab.locator("table.searchable tbody tr:visible").count() >= 1
    tab.locator(".table-filter").fill("no such system")
    assert tab.locator("table.searchable tbody tr:visible").count() == 0
    assert systems
    tab.close()


# ---- each check rejects a page that it should ----

PAGE = """<!doctype html><html lang="en" data-theme="light"><head>
<meta charset="utf-8"><title>t</title><link rel="icon" href="data:,">{head}</head>
<body style="background: #fff; color: #111; margin: 0">
<input type="search"><article>{body}</article></body></html>"""
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="

BROKEN = {
    "console": "<script>console.error('careful')</script>",
    "requests": "<script src='missing.js'></script>",
    "external": "<script>fetch('http://127.0.0.1:9/x').catch(() => 0)</script>",
    "formulas": "<span class='math'>\\(x^2\\)</span>",
    "images": f"<img src='{PIXEL}'>",
    "captions": "<figure><figcaption style='color: #999'>pale</figcaption></figure>",
    "code": "<pre style='width: 9em; overflow: auto'>" + "x" * 80 + "</pre>",
    "phone": "<div style='width: 500px'>wide</div>",
    "one_search": "<input type='search'>",
}


@pytest.fixture(scope="module")
def mutants(serve, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    bodies = {
        **BROKEN,
        "good": f"<p id='here'>fine <a href='#here'>here</a></p>"
        f"<img src='{PIXEL}' alt='a pixel'>",
        "gone": "<img src='gone.png' alt='gone'>",
        "link": "<a href='nowhere.html'>x</a>",
        "anchor": "<a href='good.html#nowhere'>x</a>",
        "stuck": "<button class='theme-switch-button'>theme</button>",
        "bright": TOGGLE + "<img src='plain.svg' alt='a figure'>",
        "follows": TOGGLE + "<img src='both.svg' alt='a figure'>",
    }
    for name, body in bodies.items():
        text = PAGE.format(head="", body=body)
        (folder / f"{name}.html").write_text(text)
    for name, style in (("plain", ""), ("both", BOTH)):
        (folder / f"{name}.svg").write_text(SVG.format(style))
    return serve(folder)


TOGGLE = """<button class='theme-switch-button'>theme</button><script>
const root = document.documentElement;
const paint = (theme) => { root.dataset.theme = theme; root.style.colorScheme = theme;
  document.body.style.background = theme === 'dark' ? '#111' : '#fff'; };
paint(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
document.querySelector('button').addEventListener('click', () =>
  paint(root.dataset.theme === 'dark' ? 'light' : 'dark'));
</script>"""
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"><style>
svg {{ color-scheme: light dark }} rect {{ fill: #fff }} {}</style>
<rect width="90" height="90"/></svg>"""
BOTH = "@media (prefers-color-scheme: dark) { rect { fill: #111 } }"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_page_is_seen(browser, mutants, name):
    check = getattr(checks, name)
    assert check(checks.visit(browser, mutants, f"{name}.html")) != []


def test_a_good_page_has_no_fault(browser, mutants):
    seen = checks.visit(browser, mutants, "good.html")
    assert [name for name in BROKEN if getattr(checks, name)(seen)] == []


def test_a_missing_image_is_seen(browser, mutants):
    (fault,) = checks.images(checks.visit(browser, mutants, "gone.html"))
    assert "not shown" in fault


@pytest.mark.parametrize(("name", "count"), [("link", 1), ("anchor", 1), ("good", 0)])
def test_a_broken_link_is_seen(browser, mutants, name, count):
    names = ("good.html", "link.html", "anchor.html")
    seen = {n: checks.visit(browser, mutants, n) for n in names}
    broken = checks.links(
        seen[f"{name}.html"], anchors(seen.values()), lambda url: False
    )
    assert len(broken) == count


@pytest.mark.parametrize(
    ("name", "word"), [("stuck", "button"), ("bright", "plain.svg")]
)
def test_a_page_that_does_not_follow_is_seen(browser, mutants, name, word):
    assert word in " ".join(checks.themes(browser, f"{mutants}{name}.html"))


def test_a_figure_with_both_palettes_follows(browser, mutants):
    assert checks.themes(browser, f"{mutants}follows.html") == []
