"""Programs of several ranks on one clock: computing, sending, waiting.

Each rank has a stream that computes, and each group of ranks a stream that carries its
messages, one after the other. A message begins when all its ranks have started it, and
those that need it wait until it has ended. What runs at once shares what it needs:
messages divide a link between them, and a collective takes a share of the computing
units and of the memory from what computes beside it.

Times follow from the programs alone, so the same programs give the same times.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Link = Literal["inside", "across"]


class Compute(NamedTuple):
    """A stretch of computing; `seconds` if nothing disturbs it."""

    seconds: float
    phase: str = ""


class Post(NamedTuple):
    """This rank is ready for a message: its number in the list of transfers."""

    transfer: int


class Need(NamedTuple):
    """What follows needs the message."""

    transfer: int


Step = Compute | Post | Need
Track = Sequence[Step]


class Transfer(NamedTuple):
    """A message between ranks.

    Attributes:
        ranks: Numbers of the tracks that take part; of a send, who sends, who receives.
        seconds: If nothing else is under way.
        stream: Messages of one stream follow each other.
        link: What it runs over.
        send: Whether it is a send and not a collective.
        name: For words and figures.
    """

    ranks: tuple[int, ...]
    seconds: float
    stream: Hashable
    link: Link = "inside"
    send: bool = False
    name: str = "message"


class Sharing(NamedTuple):
    """What a collective and the computing beside it take from each other.

    A collective's kernels occupy some of the multiprocessors and of the memory's
    bandwidth. Both shares are assumed: little beside the 18.9 per cent that computing
    loses on average in the measurements of arXiv:2507.03114.

    Attributes:
        compute: Share of speed that computing loses while a collective is under way.
        transfer: Share of speed that a collective loses while its ranks compute.
    """

    compute: float = 0.05
    transfer: float = 0.05


class Span(NamedTuple):
    """A stretch of computing as it came to pass."""

    start: float
    end: float
    phase: str


class Wait(NamedTuple):
    """A stretch in which a rank stood still for a message."""

    start: float
    end: float
    transfer: int


@dataclass
class Timeline:
    """What came to pass.

    Attributes:
        computing: Of each rank, in order.
        waits: Of each rank, in order.
        posted: When each rank started each transfer, by (rank, transfer).
        begins: When each transfer began to move.
        ends: When it was there.
        finished: When each rank was done, its messages included.
    """

    computing: list[list[Span]]
    waits: list[list[Wait]]
    posted: dict[tuple[int, int], float]
    begins: list[float]
    ends: list[float]
    finished: list[float]

    @property
    def seconds(self) -> float:
        """When the last rank was done."""
        return max(self.finished, default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """What a rank computed."""
        return sum(span.end - span.start for span in self.computing[rank])

    def transfer_seconds(self, rank: int) -> float:
        """What a rank stood still while a message moved."""
        return sum(
            w.end - max(w.start, self.begins[w.transfer])
            for w in self.waits[rank]
            if self.begins[w.transfer] < w.end
        )

    def idle_seconds(self, rank: int) -> float:
        """What a rank stood still before messages moved, and after its own end."""
        waited = sum(
            max(0.0, min(w.end, self.begins[w.transfer]) - w.start)
            for w in self.waits[rank]
        )
        return waited + self.seconds - self.finished[rank]


class DeadlockError(ValueError):
    """Ranks wait for each other, for ever."""


@dataclass(eq=False, slots=True)
class _Task:
    """Work under way at a rate that changes with what runs beside it."""

    left: float
    rate: float
    since: float
    version: int = 0


@dataclass
class _Engine:
    tracks: Sequence[Track]
    transfers: Sequence[Transfer]
    sharing: Sharing
    now: float = 0.0
    versions: int = 0
    heap: list[tuple[float, int, int, int]] = field(default_factory=list)
    tasks: dict[int, _Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks, count = range(len(self.tracks)), len(self.transfers)
        # A task below 0 is the computing of rank -task - 1, else a transfer.
        self.place = [0 for _ in ranks]
        # A send has two ends, which may be steps of one and the same track.
        self.missing = [2 if t.send else len(set(t.ranks)) for t in self.transfers]
        self.queues: dict[Hashable, list[int]] = defaultdict(list)
        for number in reversed(range(count)):
            self.queues[self.transfers[number].stream].append(number)
        self.moving: list[set[int]] = [set() for _ in ranks]
        self.load: dict[tuple[int, str, str], int] = defaultdict(int)
        self.blocked: list[tuple[int, float] | None] = [None for _ in ranks]
        self.started = [0.0 for _ in ranks]
        self.line = Timeline(
            [[] for _ in ranks],
            [[] for _ in ranks],
            {},
            [float("inf")] * count,
            [float("inf")] * count,
            [0.0 for _ in ranks],
        )

    def run(self) -> Timeline:
        for rank in range(len(self.tracks)):
            self.advance(rank)
        while self.heap:
            when, _, task, version = heapq.heappop(self.heap)
            current = self.tasks.get(task)
            if current is None or current.version != version:
                continue
            self.now = when
            del self.tasks[task]
            if task < 0:
                self.computed(-task - 1)
            else:
                self.arrived(task)
        self.check()
        return self.line

    # ---- the ranks

    def advance(self, rank: int) -> None:
        """Takes a rank's steps until it computes, waits or is done."""
        track = self.tracks[rank]
        while self.place[rank] < len(track):
            step = track[self.place[rank]]
            if isinstance(step, Compute):
                self.started[rank] = self.now
                self.begin(-rank - 1, step.seconds)
                self.change([rank])
                return
            self.place[rank] += 1
            if isinstance(step, Post):
                self.post(rank, step.transfer)
            elif self.line.ends[step.transfer] > self.now:
                self.blocked[rank] = step.transfer, self.now
                return
        self.line.finished[rank] = max(self.line.finished[rank], self.now)

    def computed(self, rank: int) -> None:
        step = self.tracks[rank][self.place[rank]]
        assert isinstance(step, Compute)
        span = Span(self.started[rank], self.now, step.phase)
        self.line.computing[rank].append(span)
        self.place[rank] += 1
        self.change([rank])
        self.advance(rank)

    def post(self, rank: int, number: int) -> None:
        self.line.posted[rank, number] = self.now
        self.missing[number] -= 1
        self.release(self.transfers[number].stream)

    # ---- the messages

    def release(self, stream: Hashable) -> None:
        """Begins the first message of a stream, if all its ranks are ready."""
        queue = self.queues[stream]
        if not queue or self.missing[queue[-1]]:
            return
        number = queue[-1]
        if self.line.begins[number] <= self.now:
            return  # it is under way
        transfer = self.transfers[number]
        self.line.begins[number] = self.now
        for rank in set(transfer.ranks):
            self.moving[rank].add(number)
        for use in self.uses(transfer):
            self.load[use] += 1
        self.begin(number, transfer.seconds)
        self.change(transfer.ranks)

    def arrived(self, number: int) -> None:
        transfer = self.transfers[number]
        self.line.ends[number] = self.now
        self.queues[transfer.stream].pop()
        for use in self.uses(transfer):
            self.load[use] -= 1
        for rank in set(transfer.ranks):
            self.moving[rank].discard(number)
            self.line.finished[rank] = max(self.line.finished[rank], self.now)
        self.change(transfer.ranks)
        self.release(transfer.stream)
        for rank in sorted(set(transfer.ranks)):
            blocked = self.blocked[rank]
            if blocked is not None and blocked[0] == number:
                self.blocked[rank] = None
                self.line.waits[rank].append(Wait(blocked[1], self.now, number))
                self.advance(rank)

    @staticmethod
    def uses(transfer: Transfer) -> list[tuple[int, str, str]]:
        """The ends of links that a message occupies: rank, link and direction."""
        if transfer.send:
            sender, receiver = transfer.ranks
            return [(sender, transfer.link, "out"), (receiver, transfer.link, "in")]
        ways = ("out", "in")
        return [(r, transfer.link, way) for r in set(transfer.ranks) for way in ways]

    # ---- rates

    def begin(self, task: int, seconds: float) -> None:
        self.tasks[task] = _Task(seconds, 0.0, self.now)

    def rate(self, task: int) -> float:
        if task < 0:
            moving = self.moving[-task - 1]
            beside = any(not self.transfers[n].send for n in moving)
            return 1 - self.sharing.compute if beside else 1.0
        transfer = self.transfers[task]
        crowd = max(self.load[use] for use in self.uses(transfer))
        beside = not transfer.send and any(-r - 1 in self.tasks for r in transfer.ranks)
        return (1 - self.sharing.transfer if beside else 1.0) / crowd

    def change(self, ranks: Sequence[int]) -> None:
        """Brings the rates of all that runs on these ranks up to date."""
        affected = {-rank - 1 for rank in ranks}.union(*(self.moving[r] for r in ranks))
        for task in sorted(affected):
            current = self.tasks.get(task)
            if current is None:
                continue
            rate = self.rate(task)
            if rate != current.rate:
                done = (self.now - current.since) * current.rate
                current.left = max(0.0, current.left - done)
                current.rate, current.since = rate, self.now
                self.versions += 1  # what is in the heap of before no longer counts
                current.version = self.versions
                end = self.now + current.left / rate
                order = (end, task if task >= 0 else len(self.transfers) - task)
                heapq.heappush(self.heap, (*order, task, current.version))

    # ---- the end

    def check(self) -> None:
        """Refuses what never ends."""
        stuck = [(r, b[0]) for r, b in enumerate(self.blocked) if b is not None]
        if not stuck:
            return
        words = []
        for rank, number in stuck:
            transfer = self.transfers[number]
            absent = [r for r in transfer.ranks if (r, number) not in self.line.posted]
            reason = (
                f"which {_ranks(absent)} never started"
                if absent
                else "which stands behind another in its stream"
            )
            words.append(f"rank {rank} waits for {transfer.name}, {reason}")
        raise DeadlockError("; ".join(words))


def _ranks(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {', '.join(map(str, ranks))}"


def replay(
    tracks: Sequence[Track],
    transfers: Sequence[Transfer],
    sharing: Sharing | None = None,
) -> Timeline:
    """Plays the programs of some ranks on one clock.

    Args:
        tracks: Of each rank, what it does in order.
        transfers: The messages that they name.
        sharing: What runs at once takes from each other.

    Raises:
        DeadlockError: Ranks wait for each other; the message says who for what.
    """
    return _Engine(tracks, transfers, sharing or Sharing()).run()
