"""Exercises of chapter 4: roofs, tiles, two streams, bytes, and how far it scales."""

import math
import random
from collections.abc import Iterator
from typing import Any

from minitrain.exercises.framework import Case, Exercise


def roofline_seconds(
    operations: float, moved_bytes: float, peak: float, bandwidth: float
) -> float:
    """Seconds of a kernel under the roof (Williams et al. 2009)."""
    return max(operations / peak, moved_bytes / bandwidth)


def _kernels(draw: random.Random) -> Iterator[Case]:
    yield 1e12, 1e9, 1e15, 3e12  # bound by computing
    yield 1e9, 1e9, 1e15, 3e12  # bound by memory
    yield 0.0, 1e9, 1e15, 3e12
    for _ in range(8):
        yield (
            10 ** draw.uniform(9, 14),
            10 ** draw.uniform(6, 10),
            10 ** draw.uniform(14, 15.5),
            10 ** draw.uniform(12, 13),
        )


def ridge_tokens(hidden: int, element_bytes: int, peak: float, bandwidth: float) -> int:
    """Tokens from which a square layer is bound by computing."""
    gain = 2 * hidden * bandwidth - 2 * element_bytes * peak
    return math.ceil(element_bytes * hidden * peak / gain)


def _layers(draw: random.Random) -> Iterator[Case]:
    yield 4096, 2, 989e12, 3.35e12
    yield 8192, 2, 312e12, 2.04e12
    yield 768, 2, 989e12, 3.35e12  # the outputs cost as much as the weights
    yield 4096, 4, 19.5e12, 2.04e12
    for _ in range(8):
        hidden = 128 * draw.randint(32, 160)
        yield hidden, draw.choice([1, 2]), draw.uniform(1e14, 2e15), 3e12


def useful_share(m: int, n: int, tile_m: int, tile_n: int, sms: int) -> float:
    """Share of the processors' time that is spent on outputs that exist."""
    tiles = -(-m // tile_m) * -(-n // tile_n)
    return m * n / (-(-tiles // sms) * sms * tile_m * tile_n)


def _outputs(draw: random.Random) -> Iterator[Case]:
    yield 2048, 4224, 128, 256, 132
    yield 2048, 4352, 128, 256, 132  # a tile column more, a round more
    yield 128, 256, 128, 256, 132
    yield 1, 1, 128, 128, 108
    for _ in range(8):
        yield (
            draw.randint(1, 9000),
            draw.randint(1, 9000),
            draw.choice([64, 128, 256]),
            draw.choice([64, 128, 256]),
            draw.choice([80, 108, 132, 148]),
        )


def replay(program: list[tuple[Any, ...]]) -> float:
    """When a rank's program is done: it computes in order, and messages go beside."""
    now, link = 0.0, 0.0
    ends: dict[str, float] = {}
    for kind, *what in program:
        if kind == "compute":
            now += what[0]
        elif kind == "send":
            link = max(link, now) + what[1]
            ends[what[0]] = link
        else:
            now = max(now, ends[what[0]])
    return max(now, link)


def _programs(draw: random.Random) -> Iterator[Case]:
    yield ([("compute", 2.0), ("send", "a", 3.0), ("compute", 1.0), ("wait", "a")],)
    yield ([("send", "a", 1.0), ("send", "b", 1.0), ("wait", "b"), ("compute", 1.0)],)
    yield ([("compute", 1.0), ("send", "a", 5.0)],)  # nobody waits, but it must end
    yield ([("send", "a", 1.0), ("compute", 4.0), ("wait", "a"), ("compute", 1.0)],)
    for _ in range(8):
        program: list[tuple[Any, ...]] = []
        sent: list[str] = []
        for number in range(draw.randint(2, 12)):
            kind = draw.choice(["compute", "send", "wait"])
            if kind == "send":
                sent.append(f"m{number}")
                program.append(("send", sent[-1], draw.uniform(0, 3)))
            elif kind == "wait" and sent:
                program.append(("wait", draw.choice(sent)))
            else:
                program.append(("compute", draw.uniform(0, 3)))
        yield (program,)


def adam_seconds(
    parameters: int, weight_bytes: int, bandwidth: float, ranks: int
) -> float:
    """Seconds of AdamW's step: gradient, two moments and master weight, weight."""
    moved = weight_bytes + 3 * 2 * 4 + weight_bytes
    return parameters / ranks * moved / bandwidth


def _states(draw: random.Random) -> Iterator[Case]:
    yield 8_030_261_248, 2, 3.35e12, 1
    yield 8_030_261_248, 2, 3.35e12, 64
    for _ in range(8):
        ranks = draw.randint(1, 512)
        yield draw.randint(1, 10**11), draw.choice([2, 4]), 2e12, ranks


def largest_scale(
    compute: float, tensors: int, payload: float, latency: float, bandwidth: float
) -> int:
    """Largest power of two of ranks that compute for half of the step or more."""
    ranks = 1
    while ranks < 65_536:
        n = 2 * ranks
        each = 2 * (n - 1) * (latency + payload / n / bandwidth)
        if tensors * each > compute:
            break
        ranks = n
    return ranks


def _clusters(draw: random.Random) -> Iterator[Case]:
    yield 0.75, 291, 55e6, 14e-6, 50e9
    yield 10.0, 1, 1e6, 1e-6, 50e9  # as far as it goes
    yield 1e-6, 291, 55e6, 14e-6, 50e9  # not even two
    yield 0.5, 100, 1e8, 1e-5, 50e9
    for _ in range(8):
        yield (
            draw.uniform(0.1, 20),
            draw.randint(1, 600),
            draw.uniform(1e5, 1e8),
            draw.uniform(1e-6, 3e-5),
            draw.uniform(5e9, 1e11),
        )


EXERCISES = (
    Exercise("roofline_seconds", roofline_seconds, _kernels),
    Exercise("ridge_tokens", ridge_tokens, _layers),
    Exercise("useful_share", useful_share, _outputs),
    Exercise("replay", replay, _programs),
    Exercise("adam_seconds", adam_seconds, _states),
    Exercise("largest_scale", largest_scale, _clusters),
)
