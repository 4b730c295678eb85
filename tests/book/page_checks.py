"""What a page of the book must hold, each as a function from a page to its faults."""

import io
from dataclasses import dataclass, field
from urllib.parse import unquote, urldefrag

from PIL import Image

WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}

# Runs in the page: everything that the checks below ask of one page, in one go.
SURVEY = r"""
() => {
  const texts = (list, say) => [...list].map(say);
  const shown = (e) => e.offsetParent !== null;
  return {
    formulas: texts(document.querySelectorAll(".math"), (e) => ({
      drawn: e.querySelector("mjx-container svg, mjx-container mjx-math") !== null,
      wrong: e.querySelector("mjx-merror, [data-mjx-error]") !== null,
      text: e.textContent.slice(0, 60),
    })),
    images: texts(document.querySelectorAll("img"), (e) => ({
      loaded: e.complete && e.naturalWidth > 0,
      alt: (e.getAttribute("alt") ?? "").trim(),
      source: e.getAttribute("src"),
    })),
    links: texts(document.querySelectorAll("a[href]"), (e) => e.href),
    ids: texts(document.querySelectorAll("[id], a[name]"), (e) => e.id || e.name),
    searches: [...document.querySelectorAll("input[type=search], .search-button-field")]
      .filter((e) => shown(e) && !e.closest("dialog") && !e.matches(".table-filter"))
      .length,
    code: texts([...document.querySelectorAll("pre")].filter(shown), (e) => ({
      scrolls: e.scrollWidth > e.clientWidth + 1,
      columns: Math.max(...e.textContent.split("\n").map((line) => line.length)),
      text: e.textContent.slice(0, 60),
    })),
  };
}
"""

CONTRAST = r"""
() => {
  const channels = (colour) => (colour.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => v / 255).map(
      (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = channels(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const captions = document.querySelectorAll(
    "figcaption, figcaption *, .caption-text, caption, p.caption");
  const read = [...captions].filter((e) => e.offsetParent && e.textContent.trim());
  return read.map((e) => {
    const [a, b] = [light(channels(getComputedStyle(e).color)), light(ground(e))];
    return { text: e.textContent.trim().slice(0, 40),
             ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) };
  });
}
"""


@dataclass
class Visit:
    """What was seen of one page in a wide window."""

    url: str
    site: str
    survey: dict = field(default_factory=dict)
    console: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    external: list[str] = field(default_factory=list)
    contrasts: dict[str, list] = field(default_factory=dict)
    phone_overflow: int = 0


def visit(context, site: str, page: str) -> Visit:
    """Open a page in a wide window, look at it, then make the window a phone's."""
    seen = Visit(site + page, site)
    tab = context.new_page()
    tab.set_viewport_size(WIDE)
    tab.on("console", lambda m: m.type == "error" and seen.console.append(m.text))
    tab.on("pageerror", lambda error: seen.console.append(str(error)))
    tab.on("requestfailed", lambda request: seen.failed.append(request.url))
    tab.on("response", lambda r: r.status >= 400 and seen.failed.append(r.url))
    tab.on("request", lambda r: note_external(seen, r.url))
    tab.goto(seen.url, wait_until="load")
    settle(tab)
    seen.survey = tab.evaluate(SURVEY)
    for system in ("light", "dark"):
        tab.emulate_media(color_scheme=system)
        tab.wait_for_timeout(50)
        seen.contrasts[system] = tab.evaluate(CONTRAST)
    tab.set_viewport_size(PHONE)
    tab.wait_for_timeout(100)
    wide = "() => document.documentElement.scrollWidth - window.innerWidth"
    seen.phone_overflow = tab.evaluate(wide)
    tab.close()
    return seen


def settle(tab) -> None:
    """Wait until formulas are drawn and images are in."""
    ready = """() => [...document.querySelectorAll(".math")].every(
        (e) => e.querySelector("mjx-container")) &&
      [...document.images].every((image) => image.complete)"""
    try:
        tab.wait_for_function(ready, timeout=5000)
    except Exception:  # what is missing is named by the checks
        return


def note_external(seen: Visit, url: str) -> None:
    if not url.startswith((seen.site, "data:", "blob:")):
        seen.external.append(url)


# ---- from a visit to its faults ----


def console(seen: Visit) -> list[str]:
    return seen.console


def requests(seen: Visit) -> list[str]:
    return seen.failed


def external(seen: Visit) -> list[str]:
    return seen.external


def formulas(seen: Visit) -> list[str]:
    return [f["text"] for f in seen.survey["formulas"] if f["wrong"] or not f["drawn"]]


def images(seen: Visit) -> list[str]:
    found = seen.survey["images"]
    missing = [f"{i['source']}: not shown" for i in found if not i["loaded"]]
    return missing + [f"{i['source']}: no alt text" for i in found if not i["alt"]]


def code(seen: Visit) -> list[str]:
    """Blocks of at most 88 columns that scroll sideways all the same."""
    blocks = seen.survey["code"]
    return [b["text"] for b in blocks if b["scrolls"] and b["columns"] <= 88]


def phone(seen: Visit) -> list[str]:
    over = seen.phone_overflow
    return [f"{over} pixels too wide for a phone"] if over > 0 else []


def one_search(seen: Visit) -> list[str]:
    count = seen.survey["searches"]
    if seen.url.endswith("/search.html"):  # it shows the query in a box of its own
        count -= 1
    return [] if count == 1 else [f"{count} search boxes"]


def links(seen: Visit, ids: dict[str, set[str]], exists) -> list[str]:
    """Links inside the site that lead nowhere.

    Args:
        seen: The page.
        ids: The anchors of each page that was visited, by its address.
        exists: Says whether there is a file at an address.
    """
    broken = []
    for link in seen.survey["links"]:
        url, anchor = urldefrag(link)
        if not url.startswith(seen.site):
            continue
        url = url.split("?")[0]
        known = ids.get(url)
        found = exists(url) if known is None else not anchor or unquote(anchor) in known
        if not found:
            broken.append(link)
    return broken


def captions(seen: Visit) -> list[str]:
    """Captions whose contrast is below 4.5 in either theme."""
    return [
        f"{theme}: {c['text']}: {c['ratio']:.2f}"
        for theme, found in seen.contrasts.items()
        for c in found
        if c["ratio"] < 4.5
    ]


# ---- what needs both themes ----


def open_in(browser, url: str, system: str):
    """A tab of a system with that colour scheme."""
    tab = browser.new_context(viewport=WIDE, color_scheme=system).new_page()
    tab.goto(url, wait_until="load")
    settle(tab)
    return tab


def toggle_to(tab, theme: str) -> bool:
    """Press the theme button until the page has the theme."""
    for _ in range(4):
        if tab.evaluate("document.documentElement.dataset.theme") == theme:
            return True
        tab.locator(".theme-switch-button").first.click()
        tab.wait_for_timeout(100)
    return False


def themes(browser, url: str) -> list[str]:
    """The page and its figures, toggled against the system's setting."""
    faults = []
    for system, theme in (("light", "dark"), ("dark", "light")):
        tab = open_in(browser, url, system)
        if not toggle_to(tab, theme):
            faults.append(f"the button does not lead to {theme}")
        else:
            faults += [f"{theme}: {f}" for f in unlike(tab, theme)]
        tab.context.close()
    return faults


def unlike(tab, theme: str) -> list[str]:
    """The page, or figures in it, whose ground is not of the theme."""
    found = []
    if not is_of(tab.screenshot(), theme):
        found.append("the page does not follow")
    figures = tab.locator("article img[src$='.svg']")
    for number in range(figures.count()):
        figure = figures.nth(number)
        if figure.is_visible() and not is_of(figure.screenshot(), theme):
            found.append(f"{figure.get_attribute('src')} does not follow")
    return found


def is_of(picture: bytes, theme: str) -> bool:
    """Whether the corners of a picture are as light or dark as the theme's ground."""
    grey = Image.open(io.BytesIO(picture)).convert("L")
    right, bottom = grey.width - 3, grey.height - 3
    corners = [(x, y) for x in (2, right) for y in (2, bottom)]
    lights = [grey.getpixel(corner) for corner in corners]
    return min(lights) > 200 if theme == "light" else max(lights) < 60
