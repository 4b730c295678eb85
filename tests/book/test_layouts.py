"""Will it fit, on a cluster: the browser's numbers and words beside the library's."""

import json
import random
from pathlib import Path
from typing import Any

import layouts
import pytest

from minitrain.simulate.estimate import Estimate, estimate
from minitrain.simulate.hardware import ACCELERATORS, cluster
from minitrain.simulate.plan import Plan
from minitrain.workload.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
SCHEDULES += [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 1)]


def draw_choice(draw: random.Random) -> dict[str, Any]:
    """A layout; three in four can be run."""
    device = draw.choice(layouts.DEVICES)
    precisions = [p for p in layouts.PRECISIONS if p in ACCELERATORS[device].peak_flops]
    tp, pp, cp = (2 ** draw.randint(0, most) for most in (3, 4, 2))
    dp, micro = 2 ** draw.randint(0, 6), 2 ** draw.randint(0, 3)
    schedule, chunks = draw.choice(SCHEDULES) if pp > 1 else ("1f1b", 1)
    devices, batch = tp * pp * cp * dp, dp * micro * 2 ** draw.randint(0, 6)
    return {
        "model": draw.choice(layouts.MODELS),
        "device": device,
        "devices": devices if draw.random() < 0.95 else 64,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "micro_batch": micro,
        "seq": 2 ** draw.randint(9, 17),
        "global_batch": batch if draw.random() < 0.95 else 24,
        "schedule": schedule,
        "interleave": chunks,
        "sequence_parallel": draw.randint(0, 1) if tp > 1 else 0,
        "zero": draw.randint(0, 3),
        "recompute": draw.choice(["none", "selective", "full"]),
        "precision": draw.choice(precisions if draw.random() < 0.95 else ["fp8"]),
        "software": draw.choice(layouts.FRAMEWORKS),
    }


def answer(choice: dict[str, Any]) -> Estimate | str:
    """What the library says: an estimate, or the words of its refusal."""
    rest = dict(choice)
    per_host = min(ACCELERATORS[choice["device"]].per_host, choice["devices"])
    hosts = rest.pop("devices") // per_host
    machines = cluster(f"{rest.pop('device')}:{hosts}x{per_host}")
    model, software = PRESETS[rest.pop("model")], rest.pop("software")
    rest["sequence_parallel"] = bool(rest["sequence_parallel"])
    try:
        return estimate(model, Plan(**rest), machines, software)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def compared(browser) -> list[tuple[dict, Any, Estimate | str]]:
    """Random layouts: what was chosen, what the browser says, what the library does."""
    draw = random.Random(11)
    cases = [draw_choice(draw) for _ in range(2000)]
    script = layouts.javascript() + (ROOT / "book/_static/layout.js").read_text()
    tab = browser.new_page()
    got = tab.evaluate(f"(cases) => {{ {script}\n return cases.map(predict); }}", cases)
    tab.close()
    return [(c, g, answer(c)) for c, g in zip(cases, got, strict=True)]


def numbers(made: Estimate) -> dict[str, Any]:
    return {
        "parts": list(made.parts.values()),
        "kinds": list(made.memory.values()),
        "step_seconds": made.step_seconds,
        "memory_bytes": made.memory_bytes,
        "interval": list(made.interval),
        "mfu": made.mfu,
        "tokens_per_second": made.tokens_per_second,
        "micro_batches": made.plan.micro_batches,
        "capacity": made.cluster.accelerator.memory_bytes,
    }


def test_the_browser_predicts_what_the_library_does(compared):
    """Every part of the time and every kind of memory, to the last digits."""
    run = [(got, made) for _, got, made in compared if isinstance(made, Estimate)]
    assert len(run) > 1000
    for got, made in run:
        expected, tiny = numbers(made), 1e-12 * made.step_seconds
        assert set(got) == {*expected, "fits"}
        assert got["fits"] == made.fits
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=1e-11, abs=tiny), name


def test_the_browser_refuses_in_the_librarys_words(compared):
    refused = [(got, words) for _, got, words in compared if isinstance(words, str)]
    assert len(refused) > 100
    assert [got.get("refused") for got, _ in refused] == [w for _, w in refused]
    kinds = ("devices, and the cluster has", "does not divide heads", "stages of")
    kinds += ("is not a multiple of dp*micro_batch", "has no fp8", "chunks of")
    for kind in kinds:
        assert any(kind in words for _, words in refused), kind


@pytest.mark.parametrize("slip", ["tp, pp", "s.micro_batches", "1.6", "Math.ceil"])
def test_a_slip_in_the_page_would_be_seen(slip, browser):
    """Mutants of the page's code that the comparison above must tell apart."""
    mutants = {
        "tp, pp": ("[choice.pp, choice.tp]", "[choice.tp, choice.pp]"),
        "s.micro_batches": ("(choice.dp * choice.micro_batch)", "choice.dp"),
        "1.6": ("hosts: choice.devices /", "hosts: 2 * choice.devices /"),
        "Math.ceil": ("Math.ceil(model.layers / pp)", "(model.layers / pp)"),
    }
    source = (ROOT / "book/_static/layout.js").read_text()
    assert mutants[slip][0] in source
    draw = random.Random(11)
    cases = [draw_choice(draw) for _ in range(100)]
    script = layouts.javascript() + source.replace(*mutants[slip])
    tab = browser.new_page()
    got = tab.evaluate(f"(cases) => {{ {script}\n return cases.map(predict); }}", cases)
    tab.close()
    right = [
        made == g.get("refused")
        if isinstance(made, str)
        else g.get("step_seconds") == pytest.approx(made.step_seconds, rel=1e-11)
        for made, g in zip(map(answer, cases), got, strict=True)
    ]
    assert not all(right)


# ---- as a reader uses it ----

SET = """(values) => {
  const form = document.querySelector("form.layout");
  for (const [name, value] of Object.entries(values)) form[name].value = value;
  form.dispatchEvent(new Event("input"));
  const text = (where) => document.querySelector(where).textContent;
  const choice = readLayout(form);
  return {
    choice, words: text(".layout-words"), made: predict(choice),
    hidden: document.querySelector(".layout-said").hidden,
    kinds: text(".layout-kinds"), parts: text(".layout-parts"),
    dp: form.dp.nextElementSibling.value,
    label: document.querySelector(".layout-memory").getAttribute("aria-label"),
  };
}"""


@pytest.fixture
def page(browser, site):
    tab = browser.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"{site}book/will_it_fit.html")
    yield lambda **values: tab.evaluate(SET, values)
    tab.close()
    assert errors == []


def test_the_page_shows_what_it_predicts(page):
    shown = page(model="llama3-70b", devices=9, tp=3, pp=2, dp=-1, zero="1")
    assert shown["choice"]["dp"] == 16 and shown["dp"] == "16 (rest)"
    made = answer(shown["choice"])
    assert isinstance(made, Estimate)
    assert shown["made"]["step_seconds"] == pytest.approx(made.step_seconds, rel=1e-11)
    assert shown["words"].startswith("It fits: " if made.fits else "It does not fit")
    assert f"{made.memory_bytes / 2**30:,.1f} GiB of" in shown["words"]
    assert f"MFU {made.mfu:.1%}" in shown["words"]
    assert f"{made.plan.micro_batches} micro-batches" in shown["words"]
    assert not shown["hidden"]
    for part in made.parts:
        assert part in shown["parts"]
    for kind in made.memory:
        assert kind in shown["kinds"] and kind in shown["label"]
    assert "NaN" not in json.dumps(shown) and "undefined" not in json.dumps(shown)


def test_what_cannot_be_run_says_why(page):
    shown = page(model="llama3-8b", devices=3, tp=3, pp=1, dp=-1)
    words = "tp*pp*cp*dp = 8*2*1*1 = 16 devices, and the cluster has 8"
    assert shown["words"] == f"This cannot be run: {words}."
    assert shown["hidden"]
    shown = page(model="llama3-8b", devices=3, tp=3, pp=0)
    assert not shown["hidden"]


def test_every_position_of_the_sliders_says_something(page):
    draw = random.Random(2)
    ran = 0
    for _ in range(150):
        values = {
            "model": draw.choice(layouts.MODELS),
            "device": draw.choice(layouts.DEVICES),
            "software": draw.choice(layouts.FRAMEWORKS),
            "schedule": draw.choice(["gpipe", "1f1b", "interleaved x4", "zb-v"]),
            "recompute": draw.choice(["none", "selective", "full"]),
            "zero": str(draw.randint(0, 3)),
            **{n: draw.randint(0, 4) for n in ("tp", "pp", "cp", "micro_batch")},
            "devices": draw.randint(4, 14),
            "dp": draw.choice([-1, -1, -1, draw.randint(0, 12)]),
            "seq": draw.randint(9, 20),
            "global_batch": draw.randint(8, 14),
        }
        shown = page(**values)
        made = answer(shown["choice"])
        if isinstance(made, str):
            assert shown["words"] == f"This cannot be run: {made}."
        else:
            ran += 1
            assert shown["words"].startswith("It fits" if made.fits else "It does not")
        assert "NaN" not in shown["words"] and "undefined" not in shown["words"]
    assert ran > 30
