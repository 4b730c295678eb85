"""Exercises of chapter 1: messages between processes."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from minitrain import launch, trace
from minitrain.exercises.framework import Case, Exercise, RefusedError


def star_wire_bytes(payload_bytes: int, ranks: int) -> int:
    """Bytes that rank 0 sends when it sums for all and hands the sum to each."""
    return (ranks - 1) * payload_bytes


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
    return answer(_own(dist.get_rank(), elements))


def _in_ring(answer: Callable[[torch.Tensor], Any], case: Case) -> list[Any]:
    ranks, elements = case
    return launch(_on_ring, ranks, answer, elements, timeout=5.0)


def _on_ring(answer: Callable[[torch.Tensor], Any], elements: int) -> Any:
    """Run the answer, and refuse what sends anything but chunks to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with trace() as t:
        result = answer(_own(rank, elements))
    chunk = 8 * -(-elements // size)
    for m in t.messages:
        if m.op not in ("send", "recv"):
            raise RefusedError(f"it calls {m.op}; a ring is made of send and recv")
        if m.op == "send" and m.peer != (rank + 1) % size:
            raise RefusedError(
                f"rank {rank} sends to rank {m.peer}; in a ring it sends to the next"
            )
        if m.payload_bytes > chunk:
            raise RefusedError(
                f"rank {rank} sends or receives {m.payload_bytes} bytes at once; a "
                f"chunk has at most {chunk}"
            )
    return result


def _worlds(draw: random.Random) -> Iterator[Case]:
    yield 2, 8
    yield 3, 7  # three ranks, and chunks of unequal size
    yield 4, 3  # fewer elements than ranks: an empty chunk
    yield 1, 5  # alone
    yield 4, draw.randint(1000, 2000)


def coordinates(rank: int, sizes: list[int]) -> list[int]:
    """The place of a rank in a mesh whose last axis is the fastest."""
    place = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.append(index)
    return place[::-1]


def _meshes(draw: random.Random) -> Iterator[Case]:
    yield 5, [2, 4]
    yield 0, [1]
    yield 7, [8, 1, 1]  # axes of size 1
    for _ in range(17):
        sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        yield draw.randrange(math.prod(sizes)), sizes


def shifted(ranks: int, elements: int) -> list[torch.Tensor]:
    """What every rank gets when each sends its tensor to the next, in a ring."""
    return [_own((rank - 1) % ranks, elements) for rank in range(ranks)]


Program = list[tuple[str, int]]


def finishes(programs: list[Program]) -> bool:
    """Whether ranks that block in each send until it is received all come to an end.

    `programs[rank]` lists the operations of a rank, `("send", to)` and
    `("recv", source)`, in the order in which it makes them.
    """
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program) or program[at[rank]][0] != "send":
                continue
            peer = program[at[rank]][1]
            if programs[peer][at[peer] :][:1] == [("recv", rank)]:
                at[rank], at[peer], moved = at[rank] + 1, at[peer] + 1, True
    return all(i == len(program) for i, program in zip(at, programs, strict=True))


def _programs(draw: random.Random) -> Iterator[Case]:
    yield ([[("send", 1), ("recv", 1)], [("send", 0), ("recv", 0)]],)
    yield ([[("send", 1), ("recv", 1)], [("recv", 0), ("send", 0)]],)
    yield ([[("send", 1)], []],)  # nobody receives
    yield ([[], []],)
    ring = [[("send", (r + 1) % 3), ("recv", (r - 1) % 3)] for r in range(3)]
    yield (ring,)
    yield ([ring[0], ring[1], ring[2][::-1]],)  # one rank receives first
    for _ in range(24):
        ranks = draw.randint(2, 4)
        programs: list[Program] = [[] for _ in range(ranks)]
        for _ in range(draw.randint(1, 6)):
            source, to = draw.sample(range(ranks), 2)
            programs[source].append(("send", to))
            programs[to].append(("recv", source))
        if draw.random() < 0.6:
            draw.shuffle(programs[draw.randrange(ranks)])
        yield (programs,)


EXERCISES = (
    Exercise("star_wire_bytes", star_wire_bytes, _payloads),
    Exercise("ring_wire_bytes", ring_wire_bytes, _payloads),
    Exercise("coordinates", coordinates, _meshes),
    Exercise("finishes", finishes, _programs),
    Exercise("shift", shifted, _worlds, _in_ranks, 1e-12, part="rank"),
    Exercise("ring_all_reduce", summed, _worlds, _in_ring, 1e-12, part="rank"),
)
