"""A pipeline schedule replayed with times: who computes when, who waits how long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

from minitrain.simulate.schedules import Schedule, Task, in_flight

if TYPE_CHECKING:
    from minitrain.viz import Figure

Times = float | Sequence[float]
"""Seconds of one task: one number, or one for each place in the model."""


@dataclass(frozen=True)
class PipelineRun:
    """A replayed schedule.

    Attributes:
        schedule: What was replayed.
        starts: For each rank the seconds at which its tasks begin, in their order.
        ends: Likewise, when they end.
    """

    schedule: Schedule
    starts: list[list[float]]
    ends: list[list[float]]

    @property
    def seconds(self) -> float:
        """From the first task's begin to the last one's end, over all ranks."""
        return max(ends[-1] for ends in self.ends)

    @property
    def busy_seconds(self) -> list[float]:
        """What each rank computes."""
        rows = zip(self.starts, self.ends, strict=True)
        return [sum(map(sub, ends, starts)) for starts, ends in rows]

    @property
    def bubble_seconds(self) -> list[float]:
        """What each rank does not compute, of `seconds`."""
        whole = self.seconds
        return [whole - busy for busy in self.busy_seconds]

    @property
    def span_bubble_seconds(self) -> list[float]:
        """The same, counted from each rank's own first task to its own last one.

        The measure of the zero-bubble papers: where a rank may step its optimizer as
        soon as its own last task has ended, the next step begins earlier there too.
        """
        rows = zip(self.starts, self.ends, self.busy_seconds, strict=True)
        return [ends[-1] - starts[0] - busy for starts, ends, busy in rows]

    @property
    def in_flight(self) -> list[int]:
        """Most activations that each rank holds at once, in chunks."""
        return in_flight(self.schedule)

    def timeline(self) -> Iterator[tuple[int, Task, float, float]]:
        """Each task with its rank, its begin and its end in seconds."""
        for rank, tasks in enumerate(self.schedule.tasks):
            rows = zip(tasks, self.starts[rank], self.ends[rank], strict=True)
            yield from ((rank, *row) for row in rows)

    def figure(self, seconds: float = 0.0, unit: str = "s") -> Figure:
        """A row for each stage, a box for each pass.

        Args:
            seconds: Least length of the axis, so that schedules can be compared.
            unit: What the times are counted in.
        """
        from minitrain.viz.passes import passes

        return passes(self, seconds, unit)

    def events(self) -> list[dict[str, Any]]:
        """Trace events for ui.perfetto.dev: a row for each rank."""
        names = {"F": "forward", "B": "backward to the input"}
        names |= {"W": "backward to the weights", "BW": "backward"}
        marks = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank}
            | {"args": {"name": f"stage {rank}"}}
            for rank in range(self.schedule.stages)
        ]
        return marks + [
            {"ph": "X", "pid": 0, "tid": rank, "cat": names[task.kind]}
            | {"name": str(task), "ts": start * 1e6, "dur": (end - start) * 1e6}
            | {"args": {"micro-batch": task.micro, "chunk": task.chunk}}
            for rank, task, start, end in self.timeline()
        ]


def replay_pipeline(
    schedule: Schedule,
    forward_seconds: Times,
    backward_seconds: Times,
    weight_seconds: Times = 0.0,
    send_seconds: float = 0.0,
) -> PipelineRun:
    """Begin each task when its rank is free and what it needs has come.

    Args:
        schedule: Of p ranks with v chunks each.
        forward_seconds: Of one micro-batch through one chunk, or p * v numbers in the
            order of the model.
        backward_seconds: Likewise, to the input: the task B.
        weight_seconds: Likewise, to the weights: the task W. BW takes both.
        send_seconds: Between two ranks; the sender goes on with its next task.

    Raises:
        ValueError: There are not p * v times; a time is negative; or the tasks are
            not the passes of each micro-batch through each chunk, in an order that
            can be kept.
    """
    places = schedule.stages * schedule.chunks
    given = (forward_seconds, backward_seconds, weight_seconds)
    forward, backward, weight = (_each(times, places) for times in given)
    if send_seconds < 0:
        raise ValueError(f"send_seconds {send_seconds} is negative")
    both = [b + w for b, w in zip(backward, weight, strict=True)]
    seconds = {"F": forward, "B": backward, "W": weight, "BW": both}
    run = _Replay(schedule, seconds, send_seconds)
    return PipelineRun(schedule, *run.finish())


def check(schedule: Schedule) -> None:
    """Whether each micro-batch passes each chunk forward, then backward.

    Raises:
        ValueError: In words, where a task is missing, twice there or too early, or
            where ranks would wait for each other for ever.
    """
    replay_pipeline(schedule, 1.0, 1.0, 1.0)


def _each(times: Times, places: int) -> list[float]:
    row = [times] * places if isinstance(times, int | float) else list(times)
    if len(row) != places or not all(t >= 0 for t in row):
        raise ValueError(
            f"{len(row)} times for {places} chunks, the least of them "
            f"{min(row, default=0)}: give each its seconds, none negative"
        )
    return row


class _Pass(NamedTuple):
    """What all tasks of one kind and chunk on one rank have in common.

    Indices are those of the table of ends, for micro-batch 0.
    """

    own: int
    needs: int | None
    """What another chunk must have done before."""
    delay: float
    before: int | None
    """What this chunk must have done, earlier in the rank's own order."""
    seconds: float
    both: int | None
    """The pass to the weights, where it is in the same task."""


class _Replay:
    """Each rank is a generator that stops where it waits, and says for what."""

    def __init__(
        self, schedule: Schedule, seconds: dict[str, list[float]], send: float
    ) -> None:
        self.schedule, self.seconds, self.send = schedule, seconds, send
        self.micros, ranks = schedule.micro_batches, range(schedule.stages)
        chunks = range(schedule.chunks)
        self.rank_of = {schedule.place(r, c): r for r in ranks for c in chunks}
        self.size = len(self.rank_of) * self.micros
        # When passes end: forward, backward, to the weights; each by place and
        # micro-batch; negative: not yet.
        self.done = [-1.0] * (3 * self.size)
        self.waiting: dict[int, tuple[int, Iterator[int]]] = {}
        self.ready: list[tuple[int, Iterator[int]]] = []
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]

    def finish(self) -> tuple[list[list[float]], list[list[float]]]:
        """Lets ranks go on, one after the other, until none can."""
        self.ready = [(r, self.play(r)) for r in range(self.schedule.stages)]
        while self.ready:
            rank, tasks = self.ready.pop()
            if (needed := next(tasks, None)) is not None:
                self.waiting[needed] = rank, tasks
        if self.waiting:
            raise ValueError("; ".join(islice(self.complaints(), 3)))
        if missing := self.done.count(-1.0):
            first = self.name(self.done.index(-1.0))
            raise ValueError(f"{missing} passes are missing; the first is {first}")
        return self.starts, self.ends

    def play(self, rank: int) -> Iterator[int]:
        """Plays one rank; yields the index of a pass that it must wait for."""
        done, waiting, ready, micros = self.done, self.waiting, self.ready, self.micros
        passes = [self.passes(rank, c) for c in range(self.schedule.chunks)]
        start, end = self.starts[rank].append, self.ends[rank].append
        now = 0.0
        for kind, micro, chunk in self.schedule.tasks[rank]:
            if not (0 <= micro < micros and 0 <= chunk < len(passes)):
                raise ValueError(f"rank {rank}: there is no {Task(kind, micro, chunk)}")
            own, needs, delay, before, seconds, both = passes[chunk][kind]
            if needs is not None:
                while (came := done[needs + micro]) < 0:
                    yield needs + micro
                now = max(now, came + delay)
            if before is not None and done[before + micro] < 0:
                raise ValueError(
                    f"rank {rank}: {Task(kind, micro, chunk)} is before "
                    f"{self.name(before + micro)}"
                )
            if done[own + micro] >= 0:
                raise ValueError(f"rank {rank}: {Task(kind, micro, chunk)} twice")
            start(now)
            now += seconds
            end(now)
            done[own + micro] = now
            if both is not None:
                done[both + micro] = now
            if own + micro in waiting:
                ready.append(waiting.pop(own + micro))

    def passes(self, rank: int, chunk: int) -> dict[str, _Pass]:
        """What the tasks of each kind need, for one chunk of a rank."""
        at = self.schedule.place(rank, chunk)
        micros, size, last = self.micros, self.size, len(self.rank_of) - 1
        forward = at * micros
        backward, weight = forward + size, forward + 2 * size

        def delay(other: int) -> float:
            return 0.0 if self.rank_of[other] == rank else self.send

        def seconds(kind: str) -> float:
            return self.seconds[kind][at]

        below = forward - micros if at else None
        above = backward + micros if at < last else None
        down, up = delay(at - 1) if at else 0.0, delay(at + 1) if at < last else 0.0
        return {
            "F": _Pass(forward, below, down, None, seconds("F"), None),
            "B": _Pass(backward, above, up, forward, seconds("B"), None),
            "W": _Pass(weight, None, 0.0, backward, seconds("W"), None),
            "BW": _Pass(backward, above, up, forward, seconds("BW"), weight),
        }

    def name(self, index: int) -> str:
        """The pass that an index of `done` stands for, in words."""
        kind, rest = divmod(index, self.size)
        at, micro = divmod(rest, self.micros)
        direction = ("forward", "backward", "weight")[kind]
        where = f"piece {at} (rank {self.rank_of[at]})"
        return f"the {direction} pass of micro-batch {micro} through {where}"

    def complaints(self) -> Iterator[str]:
        """What ranks that stand still wait for."""
        for needed, (rank, _) in sorted(self.waiting.items(), key=lambda w: w[1][0]):
            task = self.schedule.tasks[rank][len(self.ends[rank])]
            yield f"rank {rank} waits before {task} for {self.name(needed)}"
