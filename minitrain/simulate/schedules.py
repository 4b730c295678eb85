"""Pipeline schedules as plain data: for each rank, what it computes, in order.

A schedule says nothing of time. It can be printed, checked (`check`) and replayed with
any times (`minitrain.simulate.pipeline`). A micro-batch passes the stages of the model
forward, then backward; the backward pass is one task, or two where a schedule parts the
gradient of the input, which others wait for, from that of the weights, which can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]
"""Forward; backward to the input; backward to the weights; both in one."""


class Task(NamedTuple):
    """One pass of one micro-batch through one of a rank's pieces of the model."""

    kind: Kind
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + f".{self.chunk}" * (self.chunk > 0)


@dataclass(frozen=True, repr=False)
class Schedule:
    """What each of `stages` ranks computes in one step, in order.

    Attributes:
        name: Such as `1f1b`.
        stages: How many ranks share the model, p.
        micro_batches: How many pass through it in a step, m.
        chunks: Pieces of the model on each rank, v; the model has p * v in all.
        folded: Whether each odd chunk runs from the last rank to the first, so that
            two chunks form a V (Qi et al. 2023); else each runs from first to last.
        tasks: For each rank its tasks, in order.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    folded: bool
    tasks: tuple[tuple[Task, ...], ...]

    def place(self, rank: int, chunk: int) -> int:
        """The position in the model of a rank's chunk, from 0 to p * v - 1."""
        turned = self.folded and chunk % 2
        return chunk * self.stages + (self.stages - 1 - rank if turned else rank)

    def __repr__(self) -> str:
        sizes = f"{self.stages} ranks, {self.micro_batches} micro-batches"
        return f"<{self.name}: {sizes}, {self.chunks} chunks on a rank>"

    def __str__(self) -> str:
        rows = (" ".join(map(str, tasks)) for tasks in self.tasks)
        return "\n".join(f"rank {r}: {row}" for r, row in enumerate(rows))


def in_flight(schedule: Schedule) -> list[int]:
    """Most activations that each rank holds at once, in chunks.

    One is held from a chunk's forward pass to the end of its backward pass, the
    weights' part included, as that reads the layer's input.
    """
    peaks = []
    for tasks in schedule.tasks:
        held = peak = 0
        for kind, _, _ in tasks:
            held += (kind == "F") - (kind in ("W", "BW"))
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


# ---- one forward, one backward ----


def _together(forwards: list[Task], backwards: list[Task], warm: int) -> list[Task]:
    """`warm` forward passes, then one backward and one forward, then what is left."""
    tasks = forwards[:warm]
    for position, task in enumerate(backwards):
        tasks += forwards[warm + position : warm + position + 1]
        tasks.append(task)
    return tasks


def _gpipe(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    for _ in range(p):
        yield [Task(kind, i) for kind in ("F", "BW") for i in range(m)]


def _1f1b(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """At most p - rank micro-batches in flight (Narayanan et al. 2021)."""
    forwards, backwards = ([Task(k, i) for i in range(m)] for k in ("F", "BW"))
    for rank in range(p):
        yield _together(forwards, backwards, min(p - rank - 1, m))


def _interleaved(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """1F1B over v chunks on a rank; a group of micro-batches through each in turn.

    Narayanan et al. 2021 (SC), section 2.2, where groups are of p, which must divide
    m; Llama 3 (2024), section 3.3.2, lets them be larger, at the cost of memory. Here,
    if nothing else is asked, as many as there can be, as equal as they can be.
    """
    groups = max(m // p, 1)
    bounds = [*range(0, m, group), m] if group else []
    bounds = bounds or [m * i // groups for i in range(groups + 1)]
    group = max(end - first for first, end in pairwise(bounds))
    forwards, backwards = [], []
    for first, end in pairwise(bounds):
        micros = range(first, end)
        for chunk in range(v):
            forwards += [Task("F", i, chunk) for i in micros]
            backwards += [Task("BW", i, v - 1 - chunk) for i in micros]
    for rank in range(p):
        warm = 2 * (p - rank - 1) + (v - 1) * group
        yield _together(forwards, backwards, min(warm, m * v))


# ---- the backward pass in two ----


def _zero_bubble(p: int, m: int, first: list[int], lag: list[int]) -> Iterator[list]:
    """Some forward passes first; each weight pass some micro-batches late."""
    for rank in range(p):
        warm = min(first[rank], m)
        tasks = [Task("F", i) for i in range(warm)]
        for i in range(m):
            tasks.append(Task("B", i))
            if i >= lag[rank]:
                tasks.append(Task("W", i - lag[rank]))
            if warm + i < m:
                tasks.append(Task("F", warm + i))
        tasks += [Task("W", i) for i in range(max(0, m - lag[rank]), m)]
        yield tasks


def _zb_h1(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """The activations of 1F1B's first rank on each (Qi et al. 2023, figure 3 top)."""
    ranks = range(p)
    return _zero_bubble(p, m, [p - r for r in ranks], list(ranks))


def _zb_h2(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """Twice as many, and no bubble where the passes are equal (figure 3 bottom)."""
    ranks = range(p)
    return _zero_bubble(p, m, [2 * (p - r) - 1 for r in ranks], [2 * r for r in ranks])


def _zb_v(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """Two chunks in a V: no bubble with 1F1B's activations (Qi et al. 2023, 6).

    Built for at least 2p - 1 micro-batches; the tasks of those that are not there are
    left out.
    """
    for rank in range(p):
        yield [
            task for task in _zb_v_rank(p, rank, max(m, 2 * p - 1)) if task.micro < m
        ]


def _zb_v_rank(p: int, rank: int, m: int) -> Iterator[Task]:
    kinds: tuple[Kind, ...] = ("F", "B", "W")
    steps = [(kind, chunk) for kind in kinds for chunk in (0, 1)]
    f0, f1, b0, b1, w0, w1 = steps
    done = dict.fromkeys(steps, 0)

    def each(*steps: tuple[Kind, int]) -> Iterator[Task]:
        for step in steps:
            kind, chunk = step
            yield Task(kind, done[step], chunk)
            done[step] += 1

    yield from each(*[f0] * (2 * (p - rank) - 1), *[f1, f0] * rank)
    yield from each(*[f1, b1, w1] * (p - rank))
    while done[f1] < done[f0] or done[f0] < m:
        yield from each(*[f0] * (done[f0] < m), b0, w0, f1, b1, w1)
    yield from each(*[b0, b1] * rank, *[b0, w0] * (p - rank))
    yield from each(*[w1] * (done[b1] - done[w1]), *[w0] * (done[b0] - done[w0]))


def _v_half(p: int, m: int, v: int, group: int) -> Iterator[list[Task]]:
    """Two chunks in a V that live so that all ranks hold the same, half of 1F1B's.

    Qi et al. 2024 (arXiv:2405.15362), section 4: one block of passes, repeated every
    six slots. The weights' passes fill what is free.
    """
    shift = 0 if p % 2 else 3
    rows = []
    for rank in range(p):
        at: dict[tuple[Kind, int], int] = {
            ("F", 0): 2 * rank,
            ("F", 1): 3 * p - rank - 2,
            ("B", 1): 3 * p + shift + 2 * rank - 1,
            ("B", 0): 6 * p + shift - rank - 2,
        }
        slots = ((slot + 6 * i, i, task) for task, slot in at.items() for i in range(m))
        rows.append([Task(kind, i, c) for _, i, (kind, c) in sorted(slots)])
    held = [_held(row) for row in rows]
    return _fill(Schedule("v-half", p, m, 2, True, tuple(map(tuple, rows))), held)


def _held(row: list[Task]) -> int:
    """Most activations in chunks, if each weights' pass follows at once."""
    held = peak = 0
    for task in row:
        held += 1 if task.kind == "F" else -1
        peak = max(peak, held)
    return peak


def _fill(bare: Schedule, most: list[int]) -> Iterator[list[Task]]:
    """The weights' passes put where a rank would wait, all passes taking one slot.

    They are put off as far as no rank holds more than `most` activations.
    """
    last = bare.stages * bare.chunks - 1
    todo = [list(reversed(row)) for row in bare.tasks]
    late: list[list[Task]] = [[] for _ in todo]
    filled: list[list[Task]] = [[] for _ in todo]
    held = [0] * len(todo)
    done: set[tuple[str, int, int]] = set()
    while any(todo) or any(late):
        now = []
        for rank, row in enumerate(todo):
            if row:
                kind, micro, chunk = row[-1]
                at = bare.place(rank, chunk)
                before = {"F": ("F", at - 1), "B": ("B", at + 1)}[kind]
                free = at == {"F": 0, "B": last}[kind] or (*before, micro) in done
                if free and (kind == "B" or held[rank] < most[rank]):
                    filled[rank].append(row.pop())
                    now.append((kind, at, micro))
                    held[rank] += kind == "F"
                    late[rank] += [Task("W", micro, chunk)] * (kind == "B")
                    continue
            if late[rank]:
                filled[rank].append(late[rank].pop(0))
                held[rank] -= 1
        done.update(now)
    yield from filled


# ---- by name ----


class Rule(NamedTuple):
    """How schedules of one name are made.

    Attributes:
        build: Each rank's tasks from p, m, v and the size of a group.
        chunks: The least and the most pieces of the model on a rank; 0: no limit.
        folded: See `Schedule`.
    """

    build: Callable[[int, int, int, int], Iterator[list[Task]]]
    chunks: tuple[int, int] = (1, 1)
    folded: bool = False


SCHEDULES = MappingProxyType(
    {
        "gpipe": Rule(_gpipe),
        "1f1b": Rule(_1f1b),
        "interleaved": Rule(_interleaved, (1, 0)),
        "zb-h1": Rule(_zb_h1),
        "zb-h2": Rule(_zb_h2),
        "zb-v": Rule(_zb_v, (2, 2), folded=True),
        "v-half": Rule(_v_half, (2, 2), folded=True),
    }
)
ALIASES = MappingProxyType(
    {"zb-1p": "zb-h1", "zb-2p": "zb-h2", "1f1b-interleaved": "interleaved"}
)
"""Other names of the same. The published ZB-1p and ZB-2p are searched for the times
of one model; H1 and H2 are what they are where the passes take equal times."""


def schedule(
    name: str, stages: int, micro_batches: int, chunks: int = 0, group: int = 0
) -> Schedule:
    """The schedule called `name`, for any number of stages and micro-batches.

    Args:
        name: One of `SCHEDULES` or `ALIASES`.
        stages: Ranks in a row, p.
        micro_batches: m.
        chunks: Pieces of the model on each rank, v; 0: the fewest that it takes.
        group: For `interleaved`, how many micro-batches pass a chunk before the next
            chunk's turn; 0: p, or a few more where p does not divide m.

    Raises:
        ValueError: The name is unknown, or it does not take these numbers.
    """
    name = ALIASES.get(name, name)
    if name not in SCHEDULES:
        known = ", ".join((*SCHEDULES, *ALIASES))
        raise ValueError(f"no pipeline schedule is called {name!r}; there is {known}")
    rule = SCHEDULES[name]
    least, most = rule.chunks
    chunks = chunks or least
    if stages < 1 or micro_batches < 1 or group < 0:
        raise ValueError(
            f"{stages} stages, {micro_batches} micro-batches, groups of {group}: "
            "there must be one of each at least"
        )
    if not least <= chunks <= (most or chunks):
        takes = least if least == most else f"{least} or more"
        raise ValueError(f"{name} takes {takes} chunks on a rank, not {chunks}")
    if group and name != "interleaved":
        raise ValueError(f"groups of {group}: only interleaved has groups, not {name}")
    last = micro_batches % group if 0 < group < micro_batches else 0
    if group < micro_batches and (0 < group < stages or 0 < last < stages):
        raise ValueError(
            f"{micro_batches} micro-batches in groups of {group}, the last of "
            f"{last or group}: a group below {stages}, the number of stages, would "
            "wait for itself between two chunks (Megatron-LM refuses it too)"
        )
    rows = tuple(map(tuple, rule.build(stages, micro_batches, chunks, group)))
    return Schedule(name, stages, micro_batches, chunks, rule.folded, rows)
