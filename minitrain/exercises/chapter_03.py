"""Exercises of chapter 3: collectives, as programs and on ranks."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from minitrain import launch, trace
from minitrain.collectives.program import Program, Transfer
from minitrain.collectives.proof import validate
from minitrain.exercises.framework import Case, Exercise, RefusedError
from minitrain.runtime.messages import even, sent_elements

# ---- pure functions


def tree_steps(ranks: int) -> int:
    """Steps of a binomial tree: in each one, those who know double."""
    return math.ceil(math.log2(ranks))


def _numbers_of_ranks(draw: random.Random) -> Iterator[Case]:
    for ranks in (2, 3, 1, 4, 5, 8, 9, 1000, 1024, 1025, draw.randint(2, 10**6)):
        yield (ranks,)


def ring_sent_elements(elements: int, ranks: int, rank: int) -> int:
    """Elements that one rank sends in a ring all-reduce, whatever the sizes.

    The chunks differ by at most one element, the longer ones first. In the first pass a
    rank sends all chunks but its own, in the second all but that of the next rank.
    """
    return sent_elements("all_reduce", even(elements, range(ranks)), rank)


def _payloads(draw: random.Random) -> Iterator[Case]:
    yield 12, 4, 0
    yield 7, 3, 2  # chunks of 3, 2 and 2 elements
    yield 5, 1, 0
    yield 3, 5, 1  # fewer elements than ranks
    for _ in range(16):
        ranks = draw.randint(2, 64)
        yield draw.randint(1, 10**6), ranks, draw.randrange(ranks)


def crossover_bytes(
    ranks: int, latency_seconds: float, bytes_per_second: float
) -> float:
    """The payload at which a ring becomes faster than a binomial tree, in bytes.

    The ring takes ``2 (N - 1)`` steps of ``M / N`` bytes, the tree
    ``2 ceil(log2 N)`` steps of ``M``. Zero where the ring is never slower.
    """
    ring, tree = 2 * (ranks - 1), 2 * math.ceil(math.log2(ranks))
    fewer_bytes = tree - ring / ranks
    return (ring - tree) * latency_seconds * bytes_per_second / fewer_bytes


def _links(draw: random.Random) -> Iterator[Case]:
    yield 8, 10e-6, 50e9
    yield 3, 10e-6, 50e9  # as many steps as a tree
    yield 5, 2e-6, 1e9  # no power of two
    for _ in range(12):
        latency = 10 ** draw.uniform(-7, -3)
        yield draw.randint(4, 4096), latency, 10 ** draw.uniform(7, 12)


# ---- programs


Steps = list[list[tuple[int, int, Any, bool]]]


def _program(collective: str, ranks: int, chunks: int, answer: Any) -> Program:
    """The reader's steps as a program; refused in words where they are none."""
    try:
        steps = tuple(
            tuple(
                Transfer(index(source), index(to), _chunks(chunk), _flag(add))
                for source, to, chunk, add in step
            )
            for step in answer
        )
    except (TypeError, ValueError) as error:
        raise RefusedError(
            "return a list of steps, each a list of (source, to, chunk, add), where "
            "chunk is a number or a list of numbers"
        ) from error
    return Program(collective, "your", ranks, chunks, steps)


def _chunks(chunk: Any) -> tuple[int, ...]:
    return tuple(map(index, chunk if isinstance(chunk, Iterable) else (chunk,)))


def _flag(add: Any) -> bool:
    if add not in (True, False):
        raise TypeError
    return bool(add)


def _validated(program: Program) -> None:
    try:
        validate(program)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _one_port(program: Program) -> None:
    """Refuse a step in which a rank sends, or receives, more than one message."""
    for number, step in enumerate(program.steps):
        for role, ends in (
            ("sends", [t.source for t in step]),
            ("receives", [t.to for t in step]),
        ):
            twice = {rank for rank in ends if ends.count(rank) > 1}
            if twice:
                raise RefusedError(
                    f"in step {number} rank {min(twice)} {role} more than one message"
                )


def _in_steps(program: Program, enough: int) -> None:
    if len(program.steps) > enough:
        raise RefusedError(f"it takes {len(program.steps)} steps; {enough} are enough")


def broadcast_steps(ranks: int) -> int:
    """Steps of the fastest broadcast in which a rank sends once a step."""
    return tree_steps(ranks)


def _run_broadcast(answer: Callable[..., Any], case: Case) -> Any:
    (ranks,) = case
    steps = answer(ranks)
    if steps is None or steps is ...:
        return steps
    try:
        pairs = [[(s, t, 0, False) for s, t in step] for step in steps]
    except (TypeError, ValueError) as error:
        raise RefusedError(
            "return a list of steps, each a list of (source, to)"
        ) from error
    program = _program("broadcast", ranks, 1, pairs)
    _validated(program)
    _one_port(program)
    _in_steps(program, broadcast_steps(ranks))
    return broadcast_steps(ranks)


def _small_worlds(draw: random.Random) -> Iterator[Case]:
    for ranks in (2, 4, 3, 8, 1, 5, 6, 7, 13, 64, draw.randint(65, 200)):
        yield (ranks,)


def all_reduce_steps(ranks: int) -> list[int]:
    """Steps of halving and doubling, and chunks that the busiest rank sends."""
    levels = tree_steps(ranks)
    return [2 * levels, 2 * (ranks - 1)]


def _run_all_reduce(answer: Callable[..., Any], case: Case) -> Any:
    (ranks,) = case
    steps = answer(ranks)
    if steps is None or steps is ...:
        return steps
    program = _program("all_reduce", ranks, ranks, steps)
    _validated(program)
    _one_port(program)
    steps_needed, _ = all_reduce_steps(ranks)
    _in_steps(program, steps_needed)
    sent = [0] * ranks
    for step in program.steps:
        for t in step:
            sent[t.source] += len(t.chunks)
    if max(sent) > 2 * (ranks - 1):
        raise RefusedError(
            f"rank {sent.index(max(sent))} sends {max(sent)} chunks; {2 * (ranks - 1)} "
            "are enough"
        )
    return all_reduce_steps(ranks)


def _powers_of_two(draw: random.Random) -> Iterator[Case]:
    for ranks in (2, 4, 8, 1, 16, 32):
        yield (ranks,)


# ---- on ranks


def _own(rank: int, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * elements + rank)
    return torch.randn(elements, generator=generator, dtype=torch.float64)


def gathered(sizes: list[int]) -> list[torch.Tensor]:
    """What every rank holds after an all-gather of shards of these sizes."""
    whole = torch.cat([_own(rank, size) for rank, size in enumerate(sizes)])
    return [whole] * len(sizes)


def _run_gather(answer: Callable[..., Any], case: Case) -> list[Any]:
    (sizes,) = case
    return launch(_gather_on_rank, len(sizes), answer, sizes, timeout=5.0)


def _gather_on_rank(answer: Callable[..., Any], sizes: list[int]) -> Any:
    """Run the answer, and refuse what sends more than a ring would."""
    rank = dist.get_rank()
    with trace() as t:
        result = answer(_own(rank, sizes[rank]), list(sizes))
    for m in t.messages:
        if m.op not in ("send", "recv"):
            raise RefusedError(f"it calls {m.op}; make it of send and recv")
    ways = sizes[(rank + 1) % len(sizes)], sizes[rank - 1]  # around the ring
    most = 8 * (sum(sizes) - min(ways)) if len(sizes) > 1 else 0
    if t.wire_bytes > most:
        raise RefusedError(
            f"rank {rank} sends {t.wire_bytes} bytes; in a ring it sends {most}"
        )
    return result


def _shards(draw: random.Random) -> Iterator[Case]:
    yield ([4, 4],)
    yield ([2, 5, 1],)  # uneven
    yield ([3, 0, 2, 1],)  # a rank without anything
    yield ([5],)
    yield ([draw.randint(0, 50) for _ in range(4)],)


LAYOUTS = ("whole", "transposed", "a column", "every second row", "expanded")


def _laid_out(rank: int, layout: str) -> torch.Tensor:
    """A tensor that this rank's numbers fill, in one of several memory layouts."""
    whole = _own(rank, 24).reshape(4, 6)
    match layout:
        case "transposed":
            return whole.t()
        case "a column":
            return whole[:, 1]
        case "every second row":
            return whole[::2]
        case "expanded":
            return _own(rank, 6)[:, None].expand(6, 3)
    return whole


def summed_views(ranks: int, layout: str) -> list[torch.Tensor]:
    """The sum of all ranks' tensors, whatever their layout in memory."""
    total = torch.stack([_laid_out(rank, layout) for rank in range(ranks)]).sum(0)
    return [total] * ranks


def _run_views(answer: Callable[..., Any], case: Case) -> list[Any]:
    ranks, layout = case
    return launch(_views_on_rank, ranks, answer, layout, timeout=5.0)


def _views_on_rank(answer: Callable[..., Any], layout: str) -> Any:
    result = answer(_laid_out(dist.get_rank(), layout))
    return result.clone() if isinstance(result, torch.Tensor) else result


def _views(draw: random.Random) -> Iterator[Case]:
    for layout in LAYOUTS:
        yield 2 + LAYOUTS.index(layout) % 2, layout


def shard_gradients(sizes: list[int]) -> list[torch.Tensor]:
    """Each rank's piece of the sum of all ranks' gradients of the gathered tensor."""
    ranks, total = len(sizes), sum(sizes)
    whole = torch.stack([_own(rank, total) for rank in range(ranks)]).sum(0)
    return list(whole.split(sizes))


def _run_gradient(answer: Callable[..., Any], case: Case) -> list[Any]:
    (sizes,) = case
    return launch(_gradient_on_rank, len(sizes), answer, sizes, timeout=5.0)


def _gradient_on_rank(answer: Callable[..., Any], sizes: list[int]) -> Any:
    result = answer(_own(dist.get_rank(), sum(sizes)), list(sizes))
    return result.clone() if isinstance(result, torch.Tensor) else result


EXERCISES = (
    Exercise("tree_steps", tree_steps, _numbers_of_ranks),
    Exercise("ring_sent_elements", ring_sent_elements, _payloads),
    Exercise("crossover_bytes", crossover_bytes, _links, tolerance=1e-6),
    Exercise("broadcast_program", broadcast_steps, _small_worlds, _run_broadcast),
    Exercise("halving_program", all_reduce_steps, _powers_of_two, _run_all_reduce),
    Exercise("all_gather", gathered, _shards, _run_gather, 1e-12, part="rank"),
    Exercise("sum_any", summed_views, _views, _run_views, 1e-12, part="rank"),
    Exercise(
        "gather_gradient", shard_gradients, _shards, _run_gradient, 1e-12, part="rank"
    ),
)
