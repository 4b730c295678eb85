"""The closed form of a pipeline's time beside its replay, and by how much it is off."""

import random

import numpy as np
import pytest

from minitrain.simulate import bubbles, plan
from minitrain.simulate.bubbles import pipeline_span_seconds
from minitrain.simulate.pipeline import replay_pipeline
from minitrain.simulate.schedules import schedule as make

NUMBER = {"gpipe": 0, "1f1b": 1, "interleaved": 2, "zb-h1": 3, "zb-h2": 4, "zb-v": 5}
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)


def test_numbers_are_those_of_plans():
    assert list(NUMBER) == list(plan.SCHEDULES[:6])


def errors(name: str, chunks: int, cases: int, ends: tuple, send: float = 0) -> list:
    """Closed form over replay, less 1, in random cases.

    Args:
        ends: What first and last stage may take more, in stages.
        send: The most that a message takes, in forward passes.
    """
    draw, found = random.Random(name), []
    for _ in range(cases):
        stages = draw.choice(STAGES)
        micro = round(stages * draw.uniform(2 if name[:3] == "zb-" else 1, 8))
        if name == "interleaved":
            micro -= micro % stages
        times = [draw.uniform(0.7, 1.3) for _ in range(3)]
        first, last = draw.choice(ends[0]), draw.choice(ends[1])
        delay = draw.uniform(0, send)
        rows = []
        for seconds in times:
            row = [seconds / chunks] * (stages * chunks)
            row[0] += first * seconds
            row[-1] += last * seconds
            rows.append(row)
        run = replay_pipeline(make(name, stages, micro, chunks), *rows, delay)
        span = max(e[-1] - s[0] for s, e in zip(run.starts, run.ends, strict=True))
        f, b = times[0], times[1] + times[2]
        more = (first * f, first * b, last * f, last * b)
        closed = pipeline_span_seconds(
            NUMBER[name], stages, micro, chunks, *times, *more, delay
        )
        found.append(abs(closed / span - 1))
    return found


CHUNKS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
CHUNKS += [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_equal_stages(name, chunks):
    found = errors(name, chunks, 40, ((0,), (0,)))
    assert max(found) < (0.025 if name == "zb-v" else 1e-12)


@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_an_embedding_and_a_head(name, chunks):
    """A little more on the first stage, up to one and a half stages on the last."""
    found = errors(name, chunks, 40, ((0, 0.02, 0.1), (0, 0.1, 0.4, 1, 1.5)))
    exact = name in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    assert max(found) < (1e-12 if exact else 0.05)
    assert np.mean(found) < 0.004


@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_messages(name, chunks):
    """Up to a twentieth of a forward pass each."""
    found = errors(name, chunks, 40, ((0, 0.1), (0, 0.4)), send=0.05)
    assert max(found) < 0.05
    assert np.mean(found) < 0.006


@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_ends_with_fewer_layers(name, chunks):
    found = errors(name, chunks, 40, ((-0.2, 0, 0.3), (-0.2, 0, 2)))
    assert max(found) < 0.12
    assert np.mean(found) < 0.01


def test_the_published_bubbles():
    """Of p stages and m micro-batches, in times of one micro-batch of one stage."""
    p, m, f, b, w = 8, 24, 1.0, 1.2, 0.8
    bubble = {
        "gpipe": (p - 1) * (f + b + w),
        "1f1b": (p - 1) * (f + b + w),  # Narayanan et al. 2021
        "interleaved": (p - 1) * (f + b + w) / 2,
        "zb-h1": (p - 1) * (f + b - w),  # Qi et al. 2023, table 2
        "zb-h2": (p - 1) * (f + b - 2 * w),
    }
    for name, expected in bubble.items():
        chunks = 2 if name == "interleaved" else 1
        span = pipeline_span_seconds(NUMBER[name], p, m, chunks, f, b, w)
        assert span == pytest.approx(m * (f + b + w) + expected), name
    full = b + w
    span = pipeline_span_seconds(bubbles.DUALPIPE, p, m, 1, f, b, w)
    dualpipe = (p / 2 - 1) * (f + full + full - 3 * w)  # DeepSeek-V3, table 2
    assert span == pytest.approx(m * (f + b + w) + dualpipe)


def test_one_formula_for_a_number_and_an_array():
    draw = np.random.default_rng(2)
    size = 500
    codes = draw.choice([*range(6), bubbles.DUALPIPE], size)
    stages = draw.choice(STAGES, size)
    micro = stages * draw.integers(1, 9, size)
    chunks = draw.integers(1, 5, size)
    times = draw.uniform(0.1, 2, (8, size))
    numbers = (codes, stages, micro, chunks, *times)
    spans = pipeline_span_seconds(*numbers)
    alone = [
        pipeline_span_seconds(*(x[i].item() for x in numbers)) for i in range(size)
    ]
    assert spans.tolist() == alone
    assert (spans >= micro * times[:3].sum(axis=0) * (1 - 1e-12)).all()


@pytest.mark.parametrize("argument", range(2, 12))
def test_more_of_anything_never_takes_less(argument):
    """Micro-batches, times and messages; chunks may only help."""
    draw = random.Random(argument)
    for _ in range(300):
        stages = draw.choice(STAGES)
        numbers = [draw.randint(0, 4), stages, stages * draw.randint(2, 8), 2]
        numbers += [draw.uniform(0.5, 2) for _ in range(3)]
        numbers += [draw.uniform(0, 0.5) for _ in range(4)] + [draw.uniform(0, 0.05)]
        before = pipeline_span_seconds(*numbers)
        numbers[argument] += stages if argument == 2 else 1 if argument == 3 else 0.01
        after = pipeline_span_seconds(*numbers)
        if argument == 3:
            assert after <= before + 1e-9 or numbers[-1] > 0
        else:
            assert after >= before - 1e-9, numbers
