"""Plot of a traced step's memory as a skyline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes

from minitrain.display import bytes_text
from minitrain.viz.figure import (
    INK,
    LOOKS,
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
