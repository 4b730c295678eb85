"""Plot of ranks over time: when they compute, when they talk, when they wait.

The same rows serve ranks that were measured and ranks that were simulated, so that the
two can stand above each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minitrain.viz.figure import FAINT, INK, LOOKS, MUTED, PAPER, Figure, canvas, look


class _Traced(Protocol):
    """What the plots read of a `minitrain.runtime.tracing.Trace`.

    A simulated one has also `label`, a name for its row, and `begins`, when each of its
    messages began to move.
    """

    rank: int
    origin_seconds: float
    seconds: float
    messages: list[Any]


class _Row(NamedTuple):
    trace: _Traced
    top: float
    origin: float
    begins: list[float]

    def seconds(self, when: float) -> float:
        """On the clock of the figure."""
        return when + (self.trace.origin_seconds - self.origin)


def timeline(traces: Sequence[_Traced], seconds: float = 0.0) -> Figure:
    """What each rank does over time: a row a rank, computing above, talking below.

    A gap in the upper bar is time in which the rank only waited for others. Each
    message is a box from the call to its completion, pale until the last rank of its
    group has called too, since it cannot move before; arrows lead from a send to the
    receive that it meets.

    Args:
        traces: One of each rank, on one clock.
        seconds: Least length of the axis, so that figures can be compared.
    """
    rows = _rows(traces, 0.0)
    alt = f"Timeline of {len(traces)} ranks: computation, and {_said(traces)}"
    with canvas(7.2, 0.9 + 0.62 * len(traces), alt) as (figure, ax):
        _draw(ax, rows, seconds)
    return figure


def twin(
    measured: Sequence[_Traced], simulated: Sequence[_Traced], seconds: float = 0.0
) -> Figure:
    """Ranks that were measured above those that were simulated, on the same axis.

    Args:
        measured: Traces of real ranks, on one clock.
        simulated: The same program, simulated: `Simulation.traces()`.
        seconds: Least length of the axis.
    """
    above, count = _rows(measured, 0.0), len(measured)
    below = _rows(simulated, count + 0.55)
    alt = (
        f"Twin timeline: {count} measured ranks above {len(simulated)} simulated, with "
        f"{_said([*measured, *simulated])}"
    )
    with canvas(7.2, 1.3 + 0.62 * (count + len(simulated)), alt) as (figure, ax):
        right = _draw(ax, [*above, *below], seconds)
        ax.axhline(count - 0.22, color=INK, linewidth=0.9)
        for top, name in ((-0.45, "measured"), (count + 0.1, "simulated")):
            ax.text(right, top, name, ha="right", va="center", style="italic")
        ax.set_ylim(count + len(simulated) + 0.05, -0.7)
    return figure


def _said(traces: Iterable[_Traced]) -> str:
    return ", ".join(op.replace("_", "-") for op in _operators(traces)) or "no message"


def _operators(traces: Iterable[_Traced]) -> list[str]:
    seen = {m.op for t in traces for m in t.messages}
    return [
        op for op in (*LOOKS, "reduce", "gather", "scatter", "barrier") if op in seen
    ]


def _rows(traces: Sequence[_Traced], top: float) -> list[_Row]:
    traces = sorted(traces, key=lambda t: t.rank)
    origin = min(t.origin_seconds for t in traces)
    begins = _begins(traces, origin)
    return [
        _Row(t, top + i, origin, list(getattr(t, "begins", begins[i])))
        for i, t in enumerate(traces)
    ]


def _draw(ax: Axes, rows: Sequence[_Row], seconds: float) -> float:
    """Draws the rows; returns the right end of the axis."""
    longest = max([seconds, *(row.seconds(row.trace.seconds) for row in rows)])
    unit, name = (1e-3, "ms") if longest < 2 else (1.0, "s")
    for row in rows:
        busy = [(row.seconds(a) / unit, (b - a) / unit) for a, b in _busy(row.trace)]
        ax.broken_barh(busy, (row.top - 0.38, 0.34), facecolor=MUTED, linewidth=0)
        ax.hlines(row.top + 0.4, 0, longest / unit, color=FAINT, linewidth=0.7)
        begins = {id(m): b for m, b in zip(row.trace.messages, row.begins, strict=True)}
        for m, lane, lanes in _lanes(row.trace.messages):
            start, end = row.seconds(m.start_seconds), row.seconds(m.end_seconds)
            begin = min(max(row.seconds(begins[id(m)]), start), end)
            box = (row.top + 0.36 * lane / lanes, 0.34 / lanes)
            if begin - start > longest / 500:
                still = [(start / unit, (begin - start) / unit)]
                ax.broken_barh(
                    still, box, facecolor=PAPER, edgecolor=MUTED, linewidth=0.6
                )
            ax.broken_barh([(begin / unit, (end - begin) / unit)], box, **look(m.op, 1))
    _arrows(ax, rows, unit)
    right = longest / unit * 1.005
    ax.set_xlim(0, right)
    ax.set_ylim(max(row.top for row in rows) + 0.5, -0.5)
    names = [getattr(r.trace, "label", "") or f"rank {r.trace.rank}" for r in rows]
    ax.set_yticks([row.top for row in rows], names)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"time ({name})")
    operators = _operators(row.trace for row in rows)
    handles = [Patch(facecolor=MUTED, label="computing")]
    handles += [Patch(label=op, **look(op, 1)) for op in operators]
    if any(_waits(row) for row in rows):
        handles.append(
            Patch(facecolor=PAPER, edgecolor=MUTED, label="not all are ready")
        )
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))
    return right


def _waits(row: _Row) -> bool:
    """Whether a message stands still for a visible while before it moves."""
    least = row.trace.seconds / 500
    pairs = zip(row.trace.messages, row.begins, strict=True)
    return any(begin - m.start_seconds > least for m, begin in pairs)


def _begins(traces: Sequence[_Traced], origin: float) -> list[list[float]]:
    """When each message could move, on its rank's clock: all its ranks had called.

    The k-th call of an operator on a group meets the k-th of the group's other ranks; a
    send the k-th receive. Where not all of them were traced, a message moves at once.
    """
    calls: dict[Any, list[tuple[int, int, float]]] = {}
    turns: dict[Any, int] = {}
    shifts = [t.origin_seconds - origin for t in traces]
    for number, t in enumerate(traces):
        for place, m in enumerate(t.messages):
            key = (m.op, tuple(m.group))
            if m.op in ("send", "recv") and m.peer is not None:
                ends = (t.rank, m.peer) if m.op == "send" else (m.peer, t.rank)
                key = ("send", ends)
            turn = turns[number, m.op, key] = turns.get((number, m.op, key), -1) + 1
            start = m.start_seconds + shifts[number]
            calls.setdefault((key, turn), []).append((number, place, start))
    begins = [[m.start_seconds for m in t.messages] for t in traces]
    for (key, _), met in calls.items():
        if len(met) == len(key[1]):
            last = max(start for _, _, start in met)
            for number, place, _ in met:
                begins[number][place] = last - shifts[number]
    return begins


def _busy(t: _Traced) -> list[tuple[float, float]]:
    """The stretches in which a rank was not blocked by a message."""
    busy, free = [], 0.0
    blocked = sorted(
        (m.end_seconds - m.waited_seconds, m.end_seconds) for m in t.messages
    )
    for start, end in blocked:
        if start > free:
            busy.append((free, start))
        free = max(free, end)
    return [*busy, (free, t.seconds)] if t.seconds > free else busy


def _lanes(messages: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Give messages that overlap lanes of their own: message, lane, how many."""
    free_at: list[float] = []
    placed = []
    for m in sorted(messages, key=lambda m: m.start_seconds):
        lane = next(
            (i for i, end in enumerate(free_at) if end <= m.start_seconds), len(free_at)
        )
        free_at[lane : lane + 1] = [m.end_seconds]
        placed.append((m, lane))
    return [(m, lane, len(free_at)) for m, lane in placed]


def _arrows(ax: Axes, rows: Sequence[_Row], unit: float) -> None:
    """From each send to its receive: the k-th from a to b meets the k-th at b."""
    waiting: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        for m in row.trace.messages:
            if m.op == "recv" and m.peer is not None:
                key = (_part(row), m.peer, row.trace.rank, m.group)
                end = row.seconds(m.end_seconds) / unit
                waiting.setdefault(key, []).append((end, row.top))
    for row in rows:
        for m in row.trace.messages:
            key = (_part(row), row.trace.rank, m.peer, m.group)
            arrivals = waiting.get(key) if m.op == "send" else None
            if arrivals:
                end, other = arrivals.pop(0)
                start = row.seconds(m.start_seconds) / unit
                ax.annotate(
                    "",
                    (end, other + (0.0 if other > row.top else 0.36)),
                    (start, row.top + (0.36 if other > row.top else 0.0)),
                    arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 0.7},
                )


def _part(row: _Row) -> bool:
    """Whether a row is simulated: measured ones send to each other only."""
    return hasattr(row.trace, "begins")
