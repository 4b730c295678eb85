"""Plots of a traced step: its memory as a skyline, its messages as a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minitrain.display import bytes_text
from minitrain.viz.figure import (
    FAINT,
    INK,
    LOOKS,
    MUTED,
    Figure,
    byte_axis,
    canvas,
    look,
)


class _Traced(Protocol):
    """What the plots read of a `minitrain.runtime.tracing.Trace`."""

    rank: int
    origin_seconds: float
    seconds: float
    messages: list[Any]
    memory: list[tuple[float, str, int]]


def skyline(
    trace: _Traced,
    formula: Mapping[str, int] | int | None = None,
    columns: int = 600,
) -> Figure:
    """Live bytes by kind over a traced step, with what a formula says of the peak.

    The horizontal axis counts allocations and frees, not seconds, so the figure is
    the same on every machine.

    Args:
        trace: Of one rank.
        formula: Predicted peak in bytes, or several by name; each a dashed line.
        columns: Resolution; each column shows its own highest moment.
    """
    moments = _moments(trace.memory, columns)
    kinds = [k for k in moments[0][1] if any(live[k] for _, live in moments)]
    totals = [sum(live.values()) for _, live in moments]
    peak = max(totals)
    lines = {"formula": formula} if isinstance(formula, int) else dict(formula or {})
    alt = (
        f"Live bytes of rank {trace.rank} by kind over the step: they peak at"
        f" {bytes_text(peak)}"
        + "".join(f"; {name} says {bytes_text(b)}" for name, b in lines.items())
    )
    with canvas(7.2, 3.1, alt) as (figure, ax):
        top = max([1, peak, *lines.values()])
        unit = byte_axis(ax.yaxis, top, "live memory")
        x = [when for when, _ in moments]
        base = [0.0] * len(moments)
        for position, kind in enumerate(kinds):
            heights = [live[kind] / unit for _, live in moments]
            upper = [b + h for b, h in zip(base, heights, strict=True)]
            corners = _corners(base, upper)
            ax.fill_between(
                *([line[i] for i in corners] for line in (x, base, upper)),
                step="post",
                label=kind,
                **look(kind, position),
            )
            base = upper
        corners = _corners(base)
        ax.step(
            *([line[i] for i in corners] for line in (x, base)),
            where="post",
            color=INK,
            linewidth=0.9,
        )
        _peak_marks(ax, x[totals.index(peak)], peak, lines, unit, x[-1])
        ax.set_xlim(0, x[-1])
        ax.set_ylim(0, top / unit * 1.16)
        ax.set_xlabel("allocations and frees, in order")
        handles, names = ax.get_legend_handles_labels()
        ax.legend(
            handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1, 0.5)
        )
    return figure


def _corners(*lines: Sequence[float]) -> list[int]:
    """Where any of the lines changes, and their ends: all that a step plot needs."""
    points = list(zip(*lines, strict=True))
    inner = [i for i in range(1, len(points) - 1) if points[i] != points[i - 1]]
    return [0, *inner, len(points) - 1]


def _moments(
    changes: Sequence[tuple[float, str, int]], columns: int
) -> list[tuple[int, dict[str, int]]]:
    """The state at the highest moment of each of so many columns."""
    seen = {kind for _, kind, _ in changes}
    live = {kind: 0 for kind in (*LOOKS, *sorted(seen)) if kind in seen}
    start = 0  # what was there when the trace began is no step of the skyline
    while start < len(changes) and changes[start][0] == 0.0:
        live[changes[start][1]] += changes[start][2]
        start += 1
    moments, highest = [(0, dict(live))], sum(live.values())
    width = max(1, -(-(len(changes) - start) // columns))
    for number, (_, kind, delta) in enumerate(changes[start:], 1):
        live[kind] += delta
        total = sum(live.values())
        if number % width == 0:
            moments.append((number, dict(live)))
            highest = total
        elif total > highest:
            moments[-1] = (moments[-1][0], dict(live))
            highest = total
    return [*moments, (len(changes) - start + 1, moments[-1][1])]


def _peak_marks(
    ax: Axes,
    at: float,
    peak: int,
    lines: Mapping[str, int],
    unit: float,
    right: float,
) -> None:
    """Mark the measured peak, and a dashed line for each predicted one."""
    ax.plot([at], [peak / unit], marker="v", markersize=5, color=INK, clip_on=False)
    ends = "left" if at < right * 0.6 else "right"
    ax.annotate(
        f"peak {bytes_text(peak)}",
        (at, peak / unit),
        xytext=(7 if ends == "left" else -7, 7),
        textcoords="offset points",
        ha=ends,
    )
    for name, predicted in lines.items():
        ax.axhline(predicted / unit, color=INK, linestyle=(0, (5, 3)), linewidth=1.1)
        far = right if ends == "left" else 0
        ax.annotate(
            f"{name} {bytes_text(predicted)}",
            (far, predicted / unit),
            xytext=(-3 if far else 3, 7),
            textcoords="offset points",
            ha="right" if far else "left",
        )


# Messages over time


def timeline(traces: Sequence[_Traced], seconds: float = 0.0) -> Figure:
    """What each rank does over time: a row a rank, computing above, talking below.

    A gap in the upper bar is time in which the rank only waited for others. Each
    message is a box from the call to its completion; arrows lead from a send to the
    receive that it meets.

    Args:
        traces: One of each rank, on one clock.
        seconds: Least length of the axis, so that figures can be compared.
    """
    traces = sorted(traces, key=lambda t: t.rank)
    origin = min(t.origin_seconds for t in traces)
    seen = {m.op for t in traces for m in t.messages}
    operators = [
        op for op in (*LOOKS, "reduce", "gather", "scatter", "barrier") if op in seen
    ]
    alt = f"Timeline of {len(traces)} ranks: computation, and " + (
        ", ".join(op.replace("_", "-") for op in operators) or "no message"
    )
    ends = (t.origin_seconds - origin + t.seconds for t in traces)
    longest = max(seconds, *ends)
    unit, name = (1e-3, "ms") if longest < 2 else (1.0, "s")
    with canvas(7.2, 0.9 + 0.62 * len(traces), alt) as (figure, ax):
        for row, t in enumerate(traces):
            shift = t.origin_seconds - origin
            busy = [((a + shift) / unit, (b - a) / unit) for a, b in _busy(t)]
            ax.broken_barh(busy, (row - 0.38, 0.34), facecolor=MUTED, linewidth=0)
            ax.hlines(row + 0.4, 0, longest / unit, color=FAINT, linewidth=0.7)
            for m, lane, lanes in _lanes(t.messages):
                start = (m.start_seconds + shift) / unit
                length = (m.end_seconds - m.start_seconds) / unit
                box = (row + 0.36 * lane / lanes, 0.34 / lanes)
                ax.broken_barh([(start, length)], box, **look(m.op, 1))
        _arrows(ax, traces, origin, unit)
        ax.set_xlim(0, longest / unit * 1.005)
        ax.set_ylim(len(traces) - 0.5, -0.5)
        ax.set_yticks(range(len(traces)), [f"rank {t.rank}" for t in traces])
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(f"time ({name})")
        handles = [Patch(facecolor=MUTED, label="computing")]
        handles += [Patch(label=op, **look(op, 1)) for op in operators]
        ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


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


def _arrows(ax: Axes, traces: Sequence[_Traced], origin: float, unit: float) -> None:
    """From each send to its receive: the k-th from a to b meets the k-th at b."""
    waiting: dict[tuple[int, int, tuple[int, ...]], list[tuple[float, int]]] = {}
    for row, t in enumerate(traces):
        for m in t.messages:
            if m.op == "recv" and m.peer is not None:
                end = (m.end_seconds + t.origin_seconds - origin) / unit
                waiting.setdefault((m.peer, t.rank, m.group), []).append((end, row))
    for row, t in enumerate(traces):
        for m in t.messages:
            arrivals = (
                waiting.get((t.rank, m.peer, m.group)) if m.op == "send" else None
            )
            if arrivals:
                end, other = arrivals.pop(0)
                start = (m.start_seconds + t.origin_seconds - origin) / unit
                ax.annotate(
                    "",
                    (end, other + (0.0 if other > row else 0.36)),
                    (start, row + (0.36 if other > row else 0.0)),
                    arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 0.7},
                )
