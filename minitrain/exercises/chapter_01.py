"""Exercises of chapter 1: messages between processes."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minitrain import launch
from minitrain.exercises.framework import Case, Exercise


def ring_wire_bytes(payload_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of a payload that divides.

    Each of the `ranks` chunks travels `ranks - 1` steps to be summed, and as many to be
    handed round (Patarasuk and Yuan, 2009).
    """
    return 2 * (ranks - 1) * payload_bytes // ranks


def _payloads(draw: random.Random) -> Iterator[Case]:
    yield 4096, 1  # alone: nothing is sent
    yield 4096, 2  # two ranks cannot tell n - 1 from n / 2
    for _ in range(18):
        ranks = draw.randint(3, 64)
        yield 4 * ranks * draw.randint(1, 10**6), ranks


def summed(ranks: int, elements: int) -> list[torch.Tensor]:
    """What every rank holds after an all-reduce: the sum of all of them."""
    total = sum(_own(rank, elements) for rank in range(ranks))
    return [torch.as_tensor(total)] * ranks


def _own(rank: int, elements: int) -> torch.Tensor:
    """What `rank` starts with: different on each rank."""
    generator = torch.Generator().manual_seed(1000 * elements + rank)
    return torch.randn(elements, generator=generator, dtype=torch.float64)


def _in_ranks(answer: Callable[[torch.Tensor], Any], case: Case) -> list[Any]:
    ranks, elements = case
    return launch(_on_rank, ranks, answer, elements, timeout=5.0)


def _on_rank(answer: Callable[[torch.Tensor], Any], elements: int) -> Any:
    return answer(_own(torch.distributed.get_rank(), elements))


def _worlds(draw: random.Random) -> Iterator[Case]:
    yield 2, 8
    yield 3, 7  # three ranks, and chunks of unequal size
    yield 4, 3  # fewer elements than ranks: an empty chunk
    yield 1, 5  # alone
    yield 4, draw.randint(1000, 2000)


EXERCISES = (
    Exercise("ring_wire_bytes", ring_wire_bytes, _payloads),
    Exercise("ring_all_reduce", summed, _worlds, run=_in_ranks, tolerance=1e-12),
)
