"""The book's own Sphinx extensions: what they refuse, and what they print."""

import math
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import fit
import pytest
import systems
from termsearch import TermSearch
from tojs import RefusedError, to_js

from minitrain.workload import memory
from minitrain.workload.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent.parent

# ---- the survey map ----

ROW = {
    "system": "Transformer",
    "section": "2.1",
    "paper": "vaswani2017attention",
    "chapter": "02_workload",
    "symbol": "minitrain.workload.model.Transformer",
    "test": "tests/book/test_ext.py::test_a_right_row_has_no_fault",
}


def test_a_right_row_has_no_fault():
    assert list(systems.faults(ROW, ROOT)) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"section": "two"}, "section"),
        ({"section": "0.1"}, "section"),
        ({"test": "tests/book/no_such_file.py::test_x"}, "no test file"),
        ({"test": "tests/book/test_ext.py::test_that_is_not_there"}, "no test"),
        ({"test": "tests/book/test_ext.py"}, "no test"),
        ({"paper": ""}, "one value"),
        ({"author": "someone"}, "one value"),
    ],
)
def test_a_wrong_row_is_seen(change, word):
    (fault,) = systems.faults(ROW | change, ROOT)
    assert word in fault


# ---- a whole build that must fail ----

PAGE = """# A page

{py:func}`minitrain.launhc` and {py:class}`minitrain.workload.model.Transfromer`.
{py:func}`minitrain.launch` and {py:class}`torch.Tensor` are right.
{term}`all-redcue`, {cite}`nobody2020nothing` and {doc}`nowhere`.

```{chapter}
:path: core
A box without module.
```

```{formula} no_such_formula
```

```{systems}
```

```{glossary}
rank
  A number.
```

{term}`ranks <Ranks>` is a plural.

```{bibliography}
```
"""
WRONG_ROW = "Nothing,9.9.9,vaswani2017attention,02_x,minitrain.nothing,tests/x.py::y"


@pytest.fixture(scope="module")
def failed_build(tmp_path_factory):
    """What the build says of a page full of slips, and how it ends."""
    root = tmp_path_factory.mktemp("book")
    (root / "book").mkdir()
    for name in ("_ext", "_static", "references.bib", "parts.yml"):
        source, target = ROOT / "book" / name, root / "book" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    shutil.copy(ROOT / "_config.yml", root)
    toc = "format: jb-book\nroot: book/page\nchapters:\n- file: book/api\n"
    (root / "_toc.yml").write_text(toc)
    (root / "book" / "page.md").write_text(PAGE)
    (root / "book" / "api.md").write_text(
        "# API\n\n```{modules} minitrain.runtime\n```"
    )
    columns = ",".join(systems.COLUMNS)
    (root / "book" / "systems.csv").write_text(f"{columns}\n{WRONG_ROW}\n")
    command = [Path(sys.executable).with_name("jupyter-book"), "build", root]
    options = ["-n", "-W", "--keep-going", "-q"]
    run = subprocess.run([*command, *options], capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize(
    "slip",
    [
        "minitrain.launhc",
        "minitrain.workload.model.Transfromer",
        "all-redcue",
        "nobody2020nothing",
        "nowhere",
        "a chapter box wants module, needs",
        "no_such_formula",
        "there is no test file 'tests/x.py'",
    ],
)
def test_a_slip_fails_the_build(failed_build, slip):
    status, said = failed_build
    assert status != 0
    assert slip in said


@pytest.mark.parametrize("right", ["minitrain.launch\n", "torch.Tensor", "Ranks"])
def test_what_is_right_is_not_blamed(failed_build, right):
    blamed = [line for line in failed_build[1].split("\n") if "page.md" in line]
    assert blamed
    assert not any(right.strip() == line.split()[-1] for line in blamed)


# ---- search ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("all-to-all", ["alltoall", "all", "to", "all"]),
        ("a zero-bubble schedule", ["a", "zerobubble", "zero", "bubble", "schedule"]),
        ("全归约 allreduce", ["全归约", "allreduce"]),
        ("1F1B, twice", ["1F1B", "twice"]),
    ],
)
def test_compound_words_are_indexed_whole_and_in_parts(text, words):
    assert TermSearch({}).split(text) == words


# ---- JavaScript ----

WIDTHS = MappingProxyType({"bf16": 2, "fp32": 4})
LIMIT = 7


def half(number: int, by: int = 2) -> int:
    """Divide downwards."""
    return number // by


def everything(a: int, b: int, kind: str) -> float:
    total, rest = a + b, (a - b) % 5
    if a > b and not (kind == "fp32" and rest):
        total += half(a) ** 2
    elif a == b or 0 < a <= LIMIT:
        total = -total
    else:
        total -= half(by=3, number=b)
    width = WIDTHS[kind] if kind in ("bf16", "fp32") else max(a, b, 1)
    return (total * width + rest) / 4 + math.ceil(a / 7) + math.sqrt(abs(b))


def loops(n: int) -> int:
    for _ in range(n):
        n += 1
    return n


def prints(n: int) -> int:
    print(n)
    return n


def formats(n: int) -> str:
    return f"{n}"


def slices(n: str) -> str:
    return n[0]


def shifts(n: int) -> int:
    return n << 1


def unpacks(*n: int) -> int:
    return max(n)


def one_maximum(n: int) -> int:
    return max(n)  # of a sequence, which Math.max does not take


def reserved(new: int) -> int:
    return new


def calls_another(n: int) -> int:
    return double(n)


def double(n: int) -> int:
    return 2 * n


@pytest.mark.parametrize(
    "function",
    [
        loops,
        prints,
        formats,
        slices,
        shifts,
        unpacks,
        one_maximum,
        reserved,
        calls_another,
        lambda n: n,
    ],
    ids=lambda f: f.__name__,
)
def test_what_cannot_be_printed_is_refused(function):
    with pytest.raises(RefusedError):
        to_js(function)


def test_a_refusal_names_the_line():
    with pytest.raises(RefusedError, match=r"shifts, line 2: .* n << 1"):
        to_js(shifts)


def test_a_call_of_another_function_of_that_name_is_refused():
    with pytest.raises(RefusedError):
        to_js(calls_another, type(double)(half.__code__, {}, "double"))


def run_in(browser, script: str, name: str, cases: list) -> list:
    tab = browser.new_page()
    call = f"(cases) => {{ {script}\n return cases.map((c) => {name}(...c)); }}"
    results = tab.evaluate(call, cases)
    tab.close()
    return results


def test_javascript_and_python_agree(browser):
    draw = random.Random(3)
    kinds = ("bf16", "fp32", "int8")
    cases = [
        [draw.randint(-30, 30), draw.randint(-30, 30), draw.choice(kinds)]
        for _ in range(2000)
    ]
    script = to_js(half, everything)
    assert run_in(browser, script, "everything", cases) == [
        pytest.approx(everything(*case), rel=1e-12) for case in cases
    ]


# ---- Will it fit? ----


def draw_case(draw: random.Random) -> list:
    config = draw.choice(list(PRESETS.values()))
    precision = draw.choice(["float32", "autocast", "bfloat16"])
    return [
        *fit.model_arguments(config).values(),
        draw.randint(1, 2**17),
        draw.randint(1, 128),
        *fit.precision_arguments(precision).values(),
        draw.choice(list(fit.OPTIMIZERS.values())),
        draw.randint(0, 1),
    ]


def test_the_calculator_is_the_library(browser):
    """The page's own functions against Python's, to the byte."""
    draw = random.Random(4)
    cases = [draw_case(draw) for _ in range(2000)]
    expected = [list(fit.fit(*case)) for case in cases]
    assert run_in(browser, fit.javascript(), "fit", cases) == expected
    assert len({tuple(e) for e in expected}) > 1900


def test_the_page_calculates_what_python_does(browser, site):
    """The page as a reader uses it: what it shows for what is chosen."""
    tab = browser.new_page()
    tab.goto(f"{site}book/will_it_fit.html")
    draw = random.Random(5)
    for _ in range(20):
        name = draw.choice(list(PRESETS))
        precision, label = draw.choice(list(fit.NAMES.items()))
        seq, batch, recompute = (
            draw.randint(7, 17),
            draw.randint(0, 7),
            draw.random() < 0.5,
        )
        shown = tab.evaluate(
            """([model, precision, seq, batch, recompute]) => {
              const form = document.querySelector("form.calc");
              Object.assign(form.model, {value: model});
              Object.assign(form.precision, {value: precision});
              Object.assign(form.seq, {value: seq});
              Object.assign(form.batch, {value: batch});
              form.recompute.value = recompute ? "yes" : "no";
              form.dispatchEvent(new Event("input"));
              return [memoryOf(read(form)).total,
                      document.querySelector(".fit-words").textContent];
            }""",
            [name, label, seq, batch, recompute],
        )
        step = memory.step_memory(
            PRESETS[name], 2**batch, 2**seq, precision, recompute, fused=True
        )
        sums = [sum(step.moments[at].values()) for at in ("loss", "update")]
        assert shown[0] == max(sums)
        assert ("does not fit" in shown[1]) == (max(sums) > 80 * 2**30)
    tab.close()


@pytest.mark.parametrize("name", PRESETS)
def test_fit_puts_the_formulas_together_as_step_memory_does(name):
    draw = random.Random(name)
    config = PRESETS[name]
    for precision in ("float32", "autocast", "bfloat16"):
        seq, batch, recompute = draw.randint(2, 4096), draw.randint(2, 9), draw.random()
        recompute = int(recompute < 0.5)
        widths = fit.precision_arguments(precision).values()
        got = fit.fit(
            *fit.model_arguments(config).values(), seq, batch, *widths, 8, recompute
        )
        step = memory.step_memory(
            config, batch, seq, precision, bool(recompute), fused=True
        )
        loss, update = step.moments["loss"], step.moments["update"]
        assert got == (
            loss["parameters"],
            update["gradients"],
            loss["optimizer state"],
            loss["activations"],
            loss["other"],
            update["other"],
        )
