"""A collective as a program: for each step, who sends which chunk to whom.

The buffer is cut into chunks. A step is a set of messages that travel at the same
time; a program is a sequence of steps. It is plain data, for all ranks at once: it can
be printed, drawn, proven right (`minitrain.collectives.proof`), timed
(`minitrain.collectives.cost`) and run (`minitrain.collectives.execute`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: some chunks of the buffer, on their way from rank to rank.

    Attributes:
        source: The rank that sends, by its position in the group.
        to: The rank that receives, likewise.
        chunks: Which chunks the message carries, in this order.
        add: Whether the receiver adds them to its own; else they replace its own.
    """

    source: int
    to: int
    chunks: tuple[int, ...]
    add: bool

    def __str__(self) -> str:
        sign = "+" if self.add else "="
        return f"{self.source}→{self.to} {sign}{','.join(map(str, self.chunks))}"


Step = Sequence[Transfer]
"""Messages that travel at once: each carries what its sender held before the step."""


@dataclass(frozen=True, repr=False)
class Program:
    """All messages of one collective among `ranks` ranks, step by step.

    What the chunks are depends on the collective. Chunk c of a reduce-scatter ends at
    rank c, chunk c of an all-gather begins there, so both have as many chunks as
    ranks. Chunk `s * ranks + d` of an all-to-all is what rank s has for rank d. The
    others may cut the buffer as they like.

    Attributes:
        collective: One of `COLLECTIVES`.
        algorithm: Its name, such as `ring`.
        ranks: Size of the group.
        chunks: Into how many chunks the buffer is cut.
        steps: The steps, in order, as tuples; a step without a message is left out.
        root: Position of the root of a broadcast or a reduce.

    Raises:
        ValueError: The collective is unknown, or the numbers do not fit it.
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    steps: Sequence[Step]
    root: int = 0

    def __post_init__(self) -> None:
        frozen = tuple(tuple(step) for step in self.steps if step)
        object.__setattr__(self, "steps", frozen)
        if self.collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise ValueError(f"no collective {self.collective!r}: one of {known}")
        if self.ranks < 1 or self.chunks < 1 or not 0 <= self.root < self.ranks:
            raise ValueError(
                f"ranks={self.ranks}, chunks={self.chunks}, root={self.root}: at least "
                "one rank and one chunk, and the root is one of the ranks"
            )
        ruled = {"reduce_scatter": 1, "all_gather": 1, "all_to_all": 2}
        power = ruled.get(self.collective)
        if power and self.chunks != self.ranks**power:
            raise ValueError(
                f"{self.collective} among {self.ranks} ranks has {self.ranks**power} "
                f"chunks, not {self.chunks}"
            )

    def start(self, rank: int, chunk: int) -> frozenset[int]:
        """The ranks whose terms are in `rank`'s copy of `chunk` before the first step.

        Empty where it holds nothing.
        """
        first_holder = {
            "all_gather": chunk,
            "all_to_all": chunk // self.ranks,
            "broadcast": self.root,
        }.get(self.collective, rank)  # of what is reduced, each rank has its own term
        return frozenset({rank} if rank == first_holder else ())

    def promise(self, rank: int, chunk: int) -> frozenset[int] | None:
        """The terms that must be there after the last step; None: no matter what."""
        everyone = frozenset(range(self.ranks))
        match self.collective:
            case "all_reduce":
                return everyone
            case "reduce":
                return everyone if rank == self.root else None
            case "reduce_scatter":
                return everyone if rank == chunk else None
            case "all_gather":
                return frozenset({chunk})
            case "broadcast":
                return frozenset({self.root})
            case _:  # all_to_all
                source, to = divmod(chunk, self.ranks)
                return frozenset({source}) if rank == to else None

    def to_dict(self) -> dict[str, Any]:
        """The program in JSON's types, for a page without a kernel.

        `held[step][rank][chunk]` lists the terms before that step; the last entry is
        the end.
        """
        from minitrain.collectives.proof import contributions

        held = [
            [[sorted(terms) for terms in row] for row in state]
            for state in contributions(self)
        ]
        return {**asdict(self), "held": held}

    def __repr__(self) -> str:
        return (
            f"<{self.algorithm} {self.collective}: {self.ranks} ranks, "
            f"{self.chunks} chunks, {len(self.steps)} steps>"
        )

    def __str__(self) -> str:
        lines = (
            f"{number:3}:  " + "  ".join(map(str, step))
            for number, step in enumerate(self.steps)
        )
        return "\n".join([repr(self).strip("<>"), *lines])


def backwards(steps: Sequence[Step], add: bool) -> list[Step]:
    """The steps in reverse order, every message from its receiver to its sender.

    A broadcast played backwards, adding, is a reduce. A reduce-scatter played
    backwards, copying, is an all-gather.
    """
    return [
        [Transfer(t.to, t.source, t.chunks, add) for t in step]
        for step in reversed(steps)
    ]


def play(
    steps: Sequence[Step], ranks: Sequence[int], chunks: Sequence[Sequence[int]]
) -> Iterator[Step]:
    """The same steps among other ranks, with other chunks.

    Args:
        steps: To be played.
        ranks: Who plays rank 0, 1, ...
        chunks: What stands for chunk 0, 1, ...: one or several chunks each.
    """
    for step in steps:
        yield [
            Transfer(
                ranks[t.source],
                ranks[t.to],
                tuple(c for chunk in t.chunks for c in chunks[chunk]),
                t.add,
            )
            for t in step
        ]
