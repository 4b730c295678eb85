"""The program of each kind of rank, recorded on a world that is not there.

Ranks of a layout run the same program, up to their place on some axes: a pipeline's
stages do not. One rank of each such place, a *role*, is run for all the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from minitrain.display import bytes_text
from minitrain.runtime import Layout, launch, trace
from minitrain.runtime.layout import AXES
from minitrain.runtime.messages import Message
from minitrain.runtime.operators import ATTENTION, Free, Operator
from minitrain.runtime.tracing import Trace


@dataclass(frozen=True, eq=False)
class Role:
    """A rank that stands for all that run the same program.

    Attributes:
        place: Its place on the axes that make programs differ.
        rank: Its global rank.
        ranks: How many it stands for.
        trace: What it recorded.
    """

    place: dict[str, int]
    rank: int
    ranks: int
    trace: Trace

    @property
    def name(self) -> str:
        """In words, such as `pp 3`; where there is one role only, `every rank`."""
        return ", ".join(f"{a} {i}" for a, i in self.place.items()) or "every rank"


def record_roles(
    step: Callable[..., Any],
    layout: Layout,
    args: Sequence[Any],
    axes: Sequence[str] = ("pp",),
    check: bool = True,
) -> list[Role]:
    """Run one rank of each role, on a fake group of the layout's size.

    Args:
        step: What every rank runs. If it returns a `Trace` (or several, or one among
            other values), that is the program, the last one; else all it does is.
        layout: Of the ranks.
        args: Of `step`.
        axes: Axes on which ranks differ in what they do.
        check: Whether to run another rank of the first role too, and compare.

    Raises:
        ValueError: An axis is unknown, or two ranks of a role differ.
        RankError: `step` raised an exception.
    """
    if unknown := set(axes) - set(AXES):
        raise ValueError(f"no axis {sorted(unknown)}: there are {', '.join(AXES)}")
    used = [a for a in AXES if a in axes and getattr(layout, a) > 1]
    degrees = [getattr(layout, axis) for axis in used]
    places = [dict(zip(used, p, strict=True)) for p in product(*map(range, degrees))]
    ranks = [layout.rank(**place) for place in places]
    share = layout.world_size // len(ranks)
    others = {a: getattr(layout, a) - 1 for a in AXES if a not in used}
    far = layout.rank(**places[0], **others)
    more = [far] if check and far != ranks[0] else []
    traces = _record(step, layout.world_size, args, [*ranks, *more])
    if more:
        _compare(ranks[0], traces[0], far, traces[-1])
    rows = zip(places, ranks, traces[: len(ranks)], strict=True)
    return [Role(place, rank, share, t) for place, rank, t in rows]


def _record(
    step: Callable[..., Any], world_size: int, args: Sequence[Any], ranks: list[int]
) -> list[Trace]:
    """The traces of some ranks, a few of them at a time."""
    at_once, traces = 2 * (os.cpu_count() or 1), []
    for first in range(0, len(ranks), at_once):
        only = ranks[first : first + at_once]
        traces += launch(_Traced(step), world_size, *args, backend="fake", only=only)
    return traces


@dataclass(frozen=True)
class _Traced:
    """What a rank runs. It is sent as the caller's own function: see `pickling`."""

    func: Callable[..., Any]

    def __call__(self, *args: Any) -> Trace:
        """The trace that the step made, or one of all it does."""
        if found := list(_traces(self.func(*args))):
            return found[-1]
        try:
            with trace() as whole:
                self.func(*args)
        except RuntimeError as error:
            if "already running" not in str(error):
                raise
            raise ValueError(
                "the step makes a trace but does not return it; do, for it says what "
                "is to be simulated"
            ) from error
        return whole


def _traces(value: Any) -> Iterator[Trace]:
    if isinstance(value, Trace):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _traces(item)
    elif isinstance(value, dict):
        yield from _traces(list(value.values()))


# ---- whether two ranks run the same program


def _compare(rank: int, one: Trace, other_rank: int, other: Trace) -> None:
    """Raise ValueError at the first line in which two programs differ."""
    mine, theirs = list(_facts(one)), list(_facts(other))
    for here, there in zip(mine, theirs, strict=False):
        if here != there:
            break
    else:
        if len(mine) == len(theirs):
            return
        here, there = f"{len(mine)} lines", f"{len(theirs)} lines"
    raise ValueError(
        f"rank {rank} and rank {other_rank} run different programs: {here} against "
        f"{there}. Name the axes on which ranks differ: axes=('pp', 'tp'), for example"
    )


def _facts(t: Trace) -> Iterator[str]:
    """What each line of a program does, in words that do not depend on the rank."""
    for entry in t.program:
        if isinstance(entry, Operator):
            reads, writes = (
                [(p.dtype, p.shape, p.transposed) for p in pieces]
                for pieces in (entry.reads, entry.writes)
            )
            causal = ATTENTION in entry.name and any(o is True for o in entry.options)
            masked = ", causal" * causal
            yield f"{entry.name} of {reads} to {writes}{masked}"
        elif not isinstance(entry, Free):
            m = t.messages[entry.message]
            kind = type(entry).__name__.lower()
            yield (
                f"{kind} {m.op} of {bytes_text(m.payload_bytes)} of {m.dtype} "
                f"{_place(m)}"
            )
    yield f"a peak of {t.peak_total_bytes:,} B"


def _place(m: Message) -> str:
    """A group, and the root in it, as it looks from any of its own ranks."""
    group = m.group
    apart = f", {group[1] - group[0]} apart" if len(group) > 1 else ""
    rooted = m.kind == "collective" and m.peer is not None
    root = f" from place {group.index(m.peer)}" if rooted else ""
    return f"on {len(group)} ranks{apart}{root}"
