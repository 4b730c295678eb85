"""Exercises of chapter 16: errors, intervals, orders, units, and a plan."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from minitrain.exercises.framework import Case, Exercise, RefusedError, is_stub
from minitrain.simulate.estimate import Estimate, estimate
from minitrain.simulate.plan import Plan
from minitrain.workload.presets import preset


def constant_error(rates: list[float]) -> float:
    """Mean absolute error of time, as a share, of the median rate as a constant."""
    middle = sorted(rates)[len(rates) // 2]
    return sum(abs(rate / middle - 1) for rate in rates) / len(rates)


def _rates(draw: random.Random) -> Iterator[Case]:
    yield ([100.0, 200.0, 500.0],)
    yield ([100.0, 400.0],)
    yield ([3.0],)
    for _ in range(10):
        yield ([draw.uniform(80, 300) for _ in range(draw.randint(1, 9))],)


def step_seconds(
    tflops: float,
    layers: int,
    hidden: int,
    vocab: int,
    batch: int,
    seq: int,
    gpus: int,
    recompute: bool,
) -> float:
    """Seconds of a step from reported TFLOP/s (arXiv:2104.04473, section 3.1)."""
    tokens = batch * seq
    blocks = 24 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden))
    head = 2 * tokens * hidden * vocab
    return (3 * (blocks + head) + recompute * blocks) / (tflops * 1e12 * gpus)


def _reports(draw: random.Random) -> Iterator[Case]:
    yield 163.0, 128, 25600, 51200, 3072, 2048, 3072, True
    yield 163.0, 128, 25600, 51200, 3072, 2048, 3072, False
    for _ in range(8):
        hidden = 128 * draw.randint(8, 160)
        yield (
            draw.uniform(50, 500),
            draw.randint(8, 128),
            hidden,
            draw.randint(32_000, 256_000),
            draw.randint(8, 4096),
            draw.choice([1024, 2048, 8192]),
            8 * draw.randint(1, 512),
            draw.random() < 0.5,
        )


def half_width(errors: list[float], share: float) -> float:
    """Half width, of the predicted time, that covers a share of the reported ones."""
    away = sorted(abs(1 / (1 + error) - 1) for error in errors)
    return away[math.ceil(share * len(away)) - 1]


def _errors(draw: random.Random) -> Iterator[Case]:
    yield [-0.5, 0.1, 0.2], 0.8  # a step predicted at half: the report is twice as far
    yield [0.0, 0.02, -0.04, 0.3, -0.2], 0.8
    yield [0.1], 0.5
    for _ in range(8):
        count = draw.randint(2, 30)
        yield [draw.gauss(0, 0.1) for _ in range(count)], draw.choice([0.5, 0.8, 1.0])


def kendall_tau(predicted: list[float], reported: list[float]) -> float:
    """Pairs in the same order less pairs in the opposite one, over both."""
    pairs = list(zip(predicted, reported, strict=True))
    signs = [(a - b) * (x - y) for (a, x), (b, y) in combinations(pairs, 2)]
    same, opposite = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    return (same - opposite) / (same + opposite) if same + opposite else 0.0


def _orders(draw: random.Random) -> Iterator[Case]:
    yield [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]
    yield [1.0, 2.0, 3.0], [30.0, 20.0, 10.0]
    yield [1.0, 1.0], [2.0, 3.0]
    yield [1.0], [1.0]
    yield [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 0.5]
    for _ in range(8):
        count = draw.randint(2, 9)
        numbers = [float(draw.randint(0, 5)) for _ in range(2 * count)]
        yield numbers[:count], numbers[count:]


def network_of(text: str, per_host: int) -> float:
    """Bytes a second of one GPU, one direction."""
    number, unit = text.split("/s")[0].split()[-2:]
    each = float(number) * 1e9 / (8 if unit == "Gb" else 1)
    return each if "per GPU" in text else int(text.split("x")[0]) * each / per_host


def _networks(draw: random.Random) -> Iterator[Case]:
    yield "8x HDR 200 Gb/s", 8
    yield "4x 50 GB/s", 8
    yield "400 Gb/s per GPU", 8
    yield "4x Omni-Path 100 Gb/s", 8
    for _ in range(8):
        unit = draw.choice(["Gb", "GB"])
        rate = draw.choice([25, 50, 100, 200, 400])
        cards = draw.choice([1, 2, 4, 8, 16])
        per_host = draw.choice([4, 8, 16])
        alone = draw.random() < 0.3
        words = draw.choice(["", "HDR ", "RoCE "])
        text = (
            f"{rate} {unit}/s per GPU" if alone else f"{cards}x {words}{rate} {unit}/s"
        )
        yield text, per_host


def _planned(tp: int, pp: int) -> Estimate:
    """Llama-3 70B on 512 H100s."""
    plan = Plan(
        seq=8192,
        global_batch=512,
        tp=tp,
        pp=pp,
        dp=512 // (tp * pp),
        zero=1,
        sequence_parallel=tp > 1,
    )
    return estimate(preset("llama3-70b"), plan, "h100:64x8")


def best_plan() -> tuple[int, int]:
    """The fastest (tp, pp) that fits."""
    found: dict[tuple[int, int], float] = {}
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            made = _planned(tp, pp)
            if made.fits:
                found[tp, pp] = made.step_seconds
    return min(found, key=lambda key: found[key])


def _try_plan(answer: Callable[[], Any], case: Case) -> Any:
    """The reader's plan; what is wrong with it does not give the right one away."""
    got = answer(*case)
    if is_stub(got):
        return got
    try:
        tp, pp = (int(size) for size in got)
    except (TypeError, ValueError):
        raise RefusedError(f"a pair (tp, pp), please, and not {got!r}") from None
    if (tp, pp) not in [(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16)]:
        raise RefusedError(f"({tp}, {pp}) is not among those that were asked for")
    made = _planned(tp, pp)
    if not made.fits:
        raise RefusedError(f"({tp}, {pp}) does not fit, by Estimate.fits")
    if (tp, pp) != best_plan():
        raise RefusedError(
            f"({tp}, {pp}) takes {made.step_seconds:.2f} s, and one that fits is faster"
        )
    return tp, pp


EXERCISES = (
    Exercise("constant_error", constant_error, _rates),
    Exercise("step_seconds", step_seconds, _reports),
    Exercise("half_width", half_width, _errors),
    Exercise("kendall_tau", kendall_tau, _orders),
    Exercise("network_of", network_of, _networks),
    Exercise("best_plan", best_plan, run=_try_plan),
)
