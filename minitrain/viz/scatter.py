"""A plot of choices: what each layout holds, and how well it uses the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from minitrain.viz.figure import INK, PALETTE, PAPER, Figure, byte_axis, canvas

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
HUES = ("blue", "orange", "green", "red", "sky", "pink", "grey", "ink")


def layouts(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    capacity: float,
    best: tuple[float, float, str] | None = None,
    png: Path | None = None,
) -> Figure:
    """Memory against utilization, a point for each layout, and what fits.

    Args:
        groups: Bytes of the fullest rank and MFU of each layout, by name of the group.
        capacity: Bytes that fit: a dashed line.
        best: The point to mark, and what it is called.
        png: Where to write the same as a picture of dots, if anywhere.
    """
    count = sum(map(len, groups.values()))
    said = f"; the best that fits is {best[2]}, MFU {best[1]:.0%}" if best else ""
    alt = f"Memory and utilization of {count} layouts{said}"
    with canvas(7.2, 4.2, alt) as (figure, ax):
        held = [b for points in groups.values() for b, _ in points]
        ax.set_xscale("log", base=2)
        unit = byte_axis(ax.xaxis, capacity, "memory of the fullest rank")
        ax.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
        for k, (name, points) in enumerate(groups.items()):
            ax.scatter(
                [b / unit for b, _ in points],
                [100 * mfu for _, mfu in points],
                s=22,
                marker=MARKS[k % len(MARKS)],
                facecolor=PALETTE[HUES[k % len(HUES)]].sentinel,
                edgecolor=PAPER,
                linewidth=0.5,
                label=name,
            )
        ax.axvline(capacity / unit, color=INK, linestyle=(0, (5, 3)), linewidth=1.1)
        ax.annotate(
            "capacity",
            (capacity / unit, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -9),
            textcoords="offset points",
        )
        if best:
            _mark(ax, best, unit)
        ax.set_xlim(min(held) / unit / 1.2, max(*held, capacity) / unit * 1.2)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("MFU (%)")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        if png:
            ax.figure.savefig(png, format="png", dpi=160)
    return figure


def _mark(ax: Axes, best: tuple[float, float, str], unit: float) -> None:
    at = (best[0] / unit, 100 * best[1])
    ax.scatter([at[0]], [at[1]], s=120, facecolor="none", edgecolor=INK, linewidth=1.2)
    ax.annotate(
        f"{best[2]}: {best[1]:.1%}",
        at,
        xytext=(-9, 9),
        textcoords="offset points",
        ha="right",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
    )
