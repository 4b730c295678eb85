"""What a collective takes: latency and bandwidth, the alpha-beta model.

A message of s bytes takes alpha + s / B seconds: alpha to start it, then its bytes at B
bytes a second (Hockney, 1994). A rank has one port that sends and receives at the same
time; the messages of a step start together, and the step ends when the last rank is
done. What adding costs is left out.

`program_seconds` goes through a program step by step. `seconds` is the closed form: for
every algorithm alpha times a number of steps plus the payload times a number, so
that where two of them cross is one division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from minitrain.collectives.program import Program, Step

Bytes = float | np.ndarray
"""A number of bytes, or an array of them for a plot."""
Seconds = Any
"""As bytes: a number for a number, an array for an array."""


@dataclass(frozen=True)
class Link:
    """What a message costs.

    Attributes:
        latency_seconds: Alpha, of every message.
        bytes_per_second: B, in each direction.

    Raises:
        ValueError: The latency is negative, or the bandwidth is not positive.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.latency_seconds >= 0 or not self.bytes_per_second > 0:
            raise ValueError(
                f"latency {self.latency_seconds} s, {self.bytes_per_second} bytes/s: "
                "not negative, and more than 0, please"
            )

    def seconds(self, payload_bytes: Bytes) -> Seconds:
        """Of one message, or of an array of them."""
        return self.latency_seconds + payload_bytes / self.bytes_per_second


Network = Link | Callable[[int, int], Link]
"""One link for all, or the link from one rank to another."""


def program_seconds(program: Program, payload_bytes: float, link: Network) -> float:
    """Seconds of a program, step by step.

    Args:
        program: To be timed.
        payload_bytes: Of the buffer: what is reduced, broadcast or reduce-scattered;
            the whole that is gathered; what one rank hands in to an all-to-all. Its
            chunks are equal.
        link: The same between all ranks, or a function of the sending and the
            receiving rank.
    """
    cut = program.ranks if program.collective == "all_to_all" else program.chunks
    return sum(step_seconds(step, payload_bytes / cut, link) for step in program.steps)


def step_seconds(step: Step, chunk_bytes: float, link: Network) -> float:
    """The rank that is busy longest: its latency, and what it sends or receives."""
    latency: dict[int, float] = {}
    sending: dict[int, float] = {}
    receiving: dict[int, float] = {}
    for t in step:
        used = link if isinstance(link, Link) else link(t.source, t.to)
        seconds = len(t.chunks) * chunk_bytes / used.bytes_per_second
        sending[t.source] = sending.get(t.source, 0.0) + seconds
        receiving[t.to] = receiving.get(t.to, 0.0) + seconds
        for rank in (t.source, t.to):
            latency[rank] = max(latency.get(rank, 0.0), used.latency_seconds)
    return max(
        (
            alpha + max(sending.get(rank, 0.0), receiving.get(rank, 0.0))
            for rank, alpha in latency.items()
        ),
        default=0.0,
    )


class Terms(NamedTuple):
    """Seconds = steps * alpha + buffers * payload / B."""

    steps: int
    buffers: float


def seconds(
    collective: str,
    algorithm: str,
    ranks: int,
    payload_bytes: Bytes,
    link: Link,
    **shape: int,
) -> Seconds:
    """Seconds of a collective, in closed form, where all links are the same.

    Args:
        collective: As in `ALGORITHMS`.
        algorithm: As in `ALGORITHMS[collective]`.
        ranks: Size of the group.
        payload_bytes: As in `program_seconds`; a number, or an array for a plot.
        link: Between any two ranks.
        shape: `pieces`, `ranks_per_host`, as the algorithm takes them.

    Raises:
        ValueError: There is no such algorithm.
    """
    steps, buffers = terms(collective, algorithm, ranks, **shape)
    alpha, bandwidth = link.latency_seconds, link.bytes_per_second
    return steps * alpha + buffers * payload_bytes / bandwidth


def terms(collective: str, algorithm: str, ranks: int, **shape: int) -> Terms:
    """How many latencies a collective takes, and how many times its payload.

    Raises:
        ValueError: There is no such algorithm.
    """
    if (collective, algorithm) not in TERMS:
        raise ValueError(f"no closed form for {collective} by {algorithm!r}")
    check_numbers(ranks, shape)
    if ranks == 1:
        return Terms(0, 0.0)
    return TERMS[collective, algorithm](ranks, **shape)


def check_numbers(ranks: int, shape: Mapping[str, int]) -> None:
    """Refuses what no program can be made for.

    Raises:
        ValueError: a number is not positive, or the ranks do not fill the hosts.
    """
    sizes = {"ranks": ranks, **shape}
    root = sizes.pop("root", 0)
    if min(sizes.values()) < 1 or not 0 <= root < ranks:
        raise ValueError(
            f"ranks={ranks}, {dict(shape)}: at least 1, and the root a rank"
        )
    if ranks % sizes.get("ranks_per_host", 1):
        raise ValueError(f"{ranks} ranks do not fill hosts of {shape}")


def hierarchical_seconds(
    hosts: int, ranks_per_host: int, payload_bytes: Bytes, inside: Link, across: Link
) -> Seconds:
    """Seconds of the hierarchical all-reduce with links of two kinds.

    Args:
        hosts: Number of hosts.
        ranks_per_host: Ranks on each.
        payload_bytes: What is reduced.
        inside: Between ranks of one host.
        across: Between ranks of different hosts; each rank has its own.
    """
    n, m = ranks_per_host, hosts
    within = 2 * (n - 1) * inside.seconds(payload_bytes / n)
    between = 2 * (m - 1) * across.seconds(payload_bytes / (n * m))
    return within + between


def crossover_bytes(
    collective: str,
    first: str,
    second: str,
    ranks: int,
    link: Link,
    shapes: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> float | None:
    """The payload at which two algorithms take equally long.

    Below it the one with fewer latencies is faster, above it the other.

    Args:
        collective: As in `ALGORITHMS`.
        first: One algorithm.
        second: Another.
        ranks: Size of the group.
        link: Between any two ranks.
        shapes: What shapes an algorithm, by its name.

    Returns:
        Bytes, or None where one of the two is never slower than the other.
    """
    a = terms(collective, first, ranks, **shapes.get(first, {}))
    b = terms(collective, second, ranks, **shapes.get(second, {}))
    if (a.steps - b.steps) * (a.buffers - b.buffers) >= 0:
        return None
    ratio = (a.steps - b.steps) / (b.buffers - a.buffers)
    return ratio * link.latency_seconds * link.bytes_per_second


def fit(points: Iterable[tuple[float, float]]) -> Link:
    """The link that measured messages tell of.

    Least squares of the relative error, so that small messages count as much as large
    ones; neither latency nor seconds a byte become negative.

    Args:
        points: Bytes and seconds of messages of at least two sizes.

    Raises:
        ValueError: There are fewer than two sizes, or a time is not positive.
    """
    sizes, times = np.array(sorted(points), dtype=float).reshape(-1, 2).T
    if len(set(sizes)) < 2 or not (times > 0).all():
        raise ValueError("a fit needs messages of two sizes, and times above zero")
    columns = np.stack([1 / times, sizes / times], axis=1)  # of alpha, of 1 / B
    candidates = []
    for used in ([0, 1], [0], [1]):  # the best with both, or with one of them zero
        solution = np.zeros(2)
        solution[used] = np.linalg.lstsq(columns[:, used], np.ones(len(times)))[0]
        if (solution >= 0).all():
            error = float(((columns @ solution - 1) ** 2).sum())
            candidates.append((error, tuple(solution)))
    _, (alpha, per_byte) = min(candidates)
    return Link(float(alpha), 1 / float(per_byte) if per_byte else math.inf)


def best_pieces(
    collective: str,
    algorithm: str,
    ranks: int,
    payload_bytes: float,
    link: Link,
    most: int = 1024,
) -> int:
    """Into how many pieces to cut for the shortest pipeline.

    Few pieces leave ranks idle while the first one travels, many pay many latencies.

    Args:
        collective: As in `ALGORITHMS`.
        algorithm: A pipelined one: `chain` or `double_tree`.
        ranks: Size of the group.
        payload_bytes: As in `program_seconds`.
        link: Between any two ranks.
        most: The largest number to try.
    """

    def time(pieces: int) -> float:
        return seconds(collective, algorithm, ranks, payload_bytes, link, pieces=pieces)

    return min(range(1, most + 1), key=time)


def fastest(
    collective: str,
    ranks: int,
    payload_bytes: float,
    link: Link,
    shapes: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> str:
    """The algorithm that takes the shortest by the closed forms.

    Args:
        collective: As in `ALGORITHMS`.
        ranks: Size of the group.
        payload_bytes: As in `program_seconds`.
        link: Between any two ranks.
        shapes: What shapes an algorithm, by its name; the hierarchical one takes part
            only if it is here.
    """
    names = [
        name
        for kind, name in TERMS
        if kind == collective and (name != "hierarchical" or name in shapes)
    ]

    def time(name: str) -> float:
        shape = shapes.get(name, {})
        return seconds(collective, name, ranks, payload_bytes, link, **shape)

    return min(names, key=time)


# The closed forms, for at least two ranks. C is the core, the largest power of two of
# ranks; where it is not all of them, each of the others folds in first and out last.


def _log2(ranks: int) -> tuple[int, int, int]:
    """Of the ranks: log2, rounded up; log2 of the core; 1 if some are folded in."""
    core = ranks.bit_length() - 1
    return (ranks - 1).bit_length(), core, int(ranks != 2**core)


def _ring(ranks: int) -> Terms:
    return Terms(ranks - 1, (ranks - 1) / ranks)


def _ring_all_reduce(ranks: int) -> Terms:
    return Terms(2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def _recursive_doubling(ranks: int) -> Terms:
    _, log, folds = _log2(ranks)
    return Terms(log + 2 * folds, log + 2 * folds)


def _halving_doubling(ranks: int) -> Terms:
    _, log, folds = _log2(ranks)
    return Terms(2 * (log + folds), 2 * (2**log - 1) / 2**log + 2 * folds)


def _halving(ranks: int) -> Terms:
    """Of a reduce-scatter, or of the all-gather that is it backwards.

    Of the blocks of 2^j positions the fullest has a folded rank's piece at as many of
    them as there are.
    """
    _, log, folds = _log2(ranks)
    folded = ranks - 2**log
    pieces = sum(2**j + min(2**j, folded) for j in range(log))
    return Terms(log + 2 * folds, pieces / ranks + folds * (1 + 1 / ranks))


def _tree(ranks: int) -> Terms:
    log, _, _ = _log2(ranks)
    return Terms(log, log)


def _tree_all_reduce(ranks: int) -> Terms:
    log, _, _ = _log2(ranks)
    return Terms(2 * log, 2 * log)


def _double_tree(ranks: int, pieces: int = 8) -> Terms:
    """In a step the busiest rank handles two pieces: of two trees, or of two children.

    Only of two ranks it is one; and one at the root, if that has a single child.
    """
    _, levels, folds = _log2(ranks)
    steps = levels + pieces - 1
    handled = steps if ranks == 2 else 2 * steps - (1 - folds)
    return Terms(2 * steps, 2 * handled / (2 * pieces))


def _hierarchical(ranks: int, ranks_per_host: int) -> Terms:
    hosts = ranks // ranks_per_host
    inside = 2 * (ranks_per_host - 1) / ranks_per_host
    steps = 2 * (ranks_per_host - 1) + 2 * (hosts - 1)
    return Terms(steps, inside + 2 * (hosts - 1) / ranks)


def _bruck_all_gather(ranks: int) -> Terms:
    log, _, _ = _log2(ranks)
    return Terms(log, (ranks - 1) / ranks)


def _direct(ranks: int) -> Terms:
    return Terms(1, (ranks - 1) / ranks)


def _bruck_all_to_all(ranks: int) -> Terms:
    """The pieces that have bit k in their way: half of all, if N is a power of two."""
    log, _, _ = _log2(ranks)
    pieces = sum(way.bit_count() for way in range(ranks))
    return Terms(log, pieces / ranks)


def _chain(ranks: int, root: int = 0, pieces: int = 8) -> Terms:
    steps = ranks - 2 + pieces
    return Terms(steps, steps / pieces)


TERMS: Mapping[tuple[str, str], Callable[..., Terms]] = MappingProxyType(
    {
        ("all_reduce", "ring"): _ring_all_reduce,
        ("all_reduce", "recursive_doubling"): _recursive_doubling,
        ("all_reduce", "halving_doubling"): _halving_doubling,
        ("all_reduce", "tree"): _tree_all_reduce,
        ("all_reduce", "double_tree"): _double_tree,
        ("all_reduce", "hierarchical"): _hierarchical,
        ("reduce_scatter", "ring"): _ring,
        ("reduce_scatter", "halving"): _halving,
        ("all_gather", "ring"): _ring,
        ("all_gather", "recursive_doubling"): _halving,
        ("all_gather", "bruck"): _bruck_all_gather,
        ("all_to_all", "direct"): _direct,
        ("all_to_all", "pairwise"): _ring,
        ("all_to_all", "bruck"): _bruck_all_to_all,
        ("broadcast", "tree"): _tree,
        ("broadcast", "chain"): _chain,
        ("reduce", "tree"): _tree,
    }
)
"""Latencies and buffers of each algorithm in `ALGORITHMS`."""
