"""The book's own Sphinx extensions: what they refuse, and what they print."""

import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import fit
import numpy as np
import pytest
import stepper
import systems
from termsearch import TermSearch
from tojs import RefusedError, to_js

from minitrain.collectives import build, contributions
from minitrain.workload import formulas, memory, moments
from minitrain.workload.presets import PRESETS

KINDS = ("parameters", "gradients", "optimizer state", "activations", "other")
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


@dataclass
class Box:
    """A record."""

    wide: int
    high: int


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


def elements(a: float, b: float, n: int) -> float:
    """As closed forms are written: one source for a number, an array and a page."""
    between = (a > 0) & (b > 0) | (np.abs(a) < 2)
    larger = np.where(between, np.maximum(a, b), np.minimum(a, b) - 1)
    waves = np.ceil(n / 132) + np.floor(a / 3) + n // 7 - n % 5
    steep = np.where(a < b, 1, 0) * np.sqrt(np.abs(b)) + (a >= 1) * 10
    return larger * waves + steep + np.ceil(np.log2(n)) - a**2 * 1.5


def axis_of_numpy(n: int) -> int:
    return np.max(n, 0)  # the second argument is an axis, not a number


def one_of_a_pair(n: int) -> int:
    return np.maximum(n)


def keyword_of_numpy(n: int) -> int:
    return np.floor(n, dtype=int)


def random_of_numpy(n: int) -> int:
    return np.random.random(n)


def bits(n: int) -> int:
    return n & 3


def condition_as_number(n: int) -> int:
    return (n > 3) == 1


@dataclass
class Crate:
    """A record in a record."""

    box: Box


def inside(crate: Crate) -> int:
    box = crate.box
    return area(crate.box) + box.wide + crate.box.high


def weighed(a: float, b: float, c: float = 5) -> float:
    return a + 10 * b + 100 * c


def unpacked(n: int) -> float:
    pair = (n, 2 * n)
    return weighed(*pair, 3) + weighed(n, *pair) + weighed(*pair)


def unpacked_by_name(n: int) -> float:
    pair = (n, 2 * n)
    return weighed(*pair, c=3)


def area(box: Box) -> int:
    return box.wide * half(box.high)


def fields_of_a_module(n: int) -> int:
    return n * math.pi


def of_another_module(n: int) -> int:
    return formulas.logits_bytes(n, 2)


@pytest.mark.parametrize(
    "function",
    [
        fields_of_a_module,
        of_another_module,
        loops,
        prints,
        formats,
        slices,
        shifts,
        unpacks,
        one_maximum,
        reserved,
        calls_another,
        axis_of_numpy,
        one_of_a_pair,
        keyword_of_numpy,
        random_of_numpy,
        bits,
        condition_as_number,
        unpacked_by_name,
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


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(RefusedError, match="half"):
        to_js(half, type(double)(double.__code__, {}, "half"))


def test_a_function_of_another_module_is_called_by_its_name():
    printed = to_js(of_another_module, formulas.logits_bytes)
    assert "return logits_bytes(n, 2);" in printed


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


def test_a_record_is_an_object(browser):
    boxes = [{"wide": a, "high": b} for a, b in ((3, 5), (0, 2), (7, 8))]
    script = to_js(half, area)
    areas = run_in(browser, script, "area", [[box] for box in boxes])
    assert areas == [area(Box(**box)) for box in boxes] == [6, 0, 28]


def test_numpy_and_javascript_agree(browser):
    """An array in Python, each element alone, and each element in the browser."""
    draw = np.random.default_rng(4)
    a, b = draw.normal(scale=4, size=(2, 2000)).round(3)
    n = draw.integers(1, 2**40, size=2000)
    n[:53] = 2 ** np.arange(53)  # where the logarithm is whole
    rows = list(zip(a.tolist(), b.tolist(), n.tolist(), strict=True))
    expected = elements(a, b, n).tolist()
    assert [float(elements(*row)) for row in rows] == expected
    got = run_in(browser, to_js(elements), "elements", rows)
    assert got == [pytest.approx(value, rel=1e-12) for value in expected]


def test_a_tuple_is_unpacked_into_arguments(browser):
    script = to_js(weighed, unpacked)
    assert run_in(browser, script, "unpacked", [[7]]) == [unpacked(7)]


def test_a_record_in_a_record(browser):
    crate = {"box": {"wide": 3, "high": 5}}
    script = to_js(half, area, inside)
    assert run_in(browser, script, "inside", [[crate]]) == [3 * 2 + 3 + 5]


# ---- Will it fit? ----


def draw_case(draw: random.Random) -> dict:
    config = draw.choice(list(PRESETS.values()))
    precision = draw.choice(["float32", "autocast", "bfloat16"])
    return {
        **memory.model_numbers(config),
        **memory.precision_numbers(precision),
        "moment_bytes": draw.choice(list(fit.OPTIMIZERS.values())),
        "seq": draw.randint(1, 2**17),
        "batch": draw.randint(1, 128),
        "recompute": draw.randint(0, 1),
        "fused": draw.randint(0, 1),
        "accumulating": draw.randint(0, 1),
        "scratch_bytes": draw.randint(0, 2**40),
    }


@pytest.mark.parametrize(
    "name", ["moments", "weights_bytes", "optimizer_bytes", "targets_bytes"]
)
def test_the_calculator_is_the_library(browser, name):
    """The page's own functions against Python's, to the byte."""
    draw = random.Random(name)
    cases = [draw_case(draw) for _ in range(2000)]
    function = getattr(moments, name)
    expected = [function(moments.StepSizes(**case)) for case in cases]
    got = run_in(browser, fit.javascript(), name, [[case] for case in cases])
    assert got == json.loads(json.dumps(expected))


def test_the_page_calculates_what_step_memory_does(browser, site):
    """The page as a reader uses it: what it shows for what is chosen."""
    tab = browser.new_page()
    tab.goto(f"{site}book/will_it_fit.html")
    draw = random.Random(5)
    highest = set()
    for name in [*PRESETS, *draw.choices(list(PRESETS), k=100)]:
        precision, label = draw.choice(list(fit.NAMES.items()))
        seq, batch = draw.randint(7, 17), draw.randint(0, 7)
        recompute, several = draw.random() < 0.5, draw.random() < 0.5
        shown = tab.evaluate(
            """([model, precision, seq, batch, recompute, several]) => {
              const form = document.querySelector("form.device");
              const values = {
                model, precision, seq, batch, recompute: recompute ? "yes" : "no",
                accumulating: several ? "yes" : "no",
              };
              for (const [name, value] of Object.entries(values))
                form[name].value = value;
              form.dispatchEvent(new Event("input"));
              const { total, kinds, at } = memoryOf(read(form));
              const words = document.querySelector(".device-words").textContent;
              return [total, kinds, at, words];
            }""",
            [name, label, seq, batch, recompute, several],
        )
        step = memory.step_memory(
            *(PRESETS[name], 2**batch, 2**seq, precision, recompute),
            fused=True,
            accumulating=several,
        )
        total, kinds, at, words = shown
        assert (total, at) == (step.peak_bytes, step.highest)
        assert kinds == [step.at_peak[kind] for kind in KINDS]
        assert ("does not fit" in words) == (total > 80 * 2**30)
        assert "undefined" not in words
        highest.add(at)
    assert len(highest) > 2
    tab.close()


# ---- the collective stepper ----


def test_the_stepper_shows_what_the_proof_finds(browser):
    """Every program of the page: what each rank holds, before and after each step."""
    table = stepper.programs()
    chosen = [(c, a, n) for c in table for a in table[c] for n in table[c][a]]
    script = stepper.javascript() + (ROOT / "book/_static/stepper.js").read_text()
    script += "const held = (c, a, n) => holdings(PROGRAMS[c][a][n]);"
    got = run_in(browser, script, "held", [list(case) for case in chosen])
    assert len(chosen) > 100
    for (collective, algorithm, ranks), states in zip(chosen, got, strict=True):
        shape = stepper.shape_of(collective, algorithm, ranks)
        program = build(collective, algorithm, ranks, **shape)
        expected = [
            [[stepper.bits(terms) for terms in row] for row in state]
            for state in contributions(program)
        ]
        assert states == expected, program


def test_the_stepper_steps(browser, site):
    """The page as a reader uses it, to the end of what its last section says."""
    tab = browser.new_page()
    tab.goto(f"{site}book/collective_stepper.html")
    for algorithm, steps in (("ring", 14), ("halving_doubling", 6)):
        tab.select_option("[name=algorithm]", algorithm)
        tab.select_option("[name=ranks]", "8")
        while tab.is_enabled("[name=forward]"):
            assert tab.locator(".stepper-picture svg .done").count() < 64
            tab.click("[name=forward]")
        words = tab.inner_text(".stepper-words")
        assert words.startswith(f"Done, after {steps} steps.")
        assert "sent 14 chunks, 1.75 times its tensor" in words
        assert tab.locator(".stepper-picture svg .done").count() == 64
    tab.click("[name=back]")
    assert tab.locator(".stepper-list li").count() == 8
    tab.select_option("[name=collective]", "all_to_all")
    assert "Step 0 (there are" in tab.inner_text(".stepper-words")
    tab.close()
