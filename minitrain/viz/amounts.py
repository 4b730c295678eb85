"""Plots of amounts: memory by kind, traffic between ranks, the book's ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minitrain.display import bytes_text
from minitrain.viz.figure import (
    INK,
    LOOKS,
    MUTED,
    PALETTE,
    PAPER,
    Figure,
    byte_axis,
    canvas,
    look,
)


def bars(
    rows: Mapping[str, Mapping[str, int]],
    capacity: int | None = None,
    capacity_name: str = "capacity",
) -> Figure:
    """Memory by kind, a stacked bar for each row, and what a device can hold.

    Args:
        rows: Bytes by kind, by the name of the row.
        capacity: Bytes that fit: a dashed line.
        capacity_name: What it is called.
    """
    totals = {name: sum(kinds.values()) for name, kinds in rows.items()}
    alt = "Memory by kind: " + ", ".join(
        f"{name} {bytes_text(total)}" for name, total in totals.items()
    )
    if capacity:
        alt += f"; {capacity_name} {bytes_text(capacity)}"
    present = {k for kinds in rows.values() for k, b in kinds.items() if b}
    kinds = [k for k in LOOKS if k in present]
    kinds += [k for r in rows.values() for k in r if k in present and k not in LOOKS]
    with canvas(7.2, 0.95 + 0.42 * len(rows), alt) as (figure, ax):
        top = max([*totals.values(), capacity or 0])
        unit = byte_axis(ax.xaxis, top, "memory")
        left = [0.0] * len(rows)
        for position, kind in enumerate(dict.fromkeys(kinds)):
            widths = [r.get(kind, 0) / unit for r in rows.values()]
            ax.barh(
                range(len(rows)), widths, 0.62, left, label=kind, **look(kind, position)
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, total in enumerate(totals.values()):
            over = capacity is not None and total > capacity
            weight = "bold" if over else "normal"
            _end_label(ax, bytes_text(total), total / unit, row, fontweight=weight)
        if capacity:
            _capacity_line(ax, capacity, unit, capacity_name)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(0, top / unit * 1.14)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _capacity_line(ax: Axes, capacity: int, unit: float, name: str) -> None:
    at = capacity / unit
    ax.axvline(at, color=INK, linestyle=(0, (5, 3)), linewidth=1.1)
    ax.annotate(
        f"{name} {bytes_text(capacity)}",
        (at, -0.5),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        annotation_clip=False,
    )


def _end_label(ax: Axes, text: str, at: float, row: int, **style: Any) -> None:
    """Write a bar's value behind its end, on paper, so that no line crosses it."""
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}
    ax.annotate(
        text,
        (at, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        bbox=box,
        **style,
    )


def traffic(matrix: Sequence[Sequence[int]]) -> Figure:
    """Bytes from each rank (row) to each rank (column).

    Args:
        matrix: `matrix[source][destination]` in bytes, square.

    Raises:
        ValueError: If the matrix is not square.
    """
    ranks = len(matrix)
    if any(len(row) != ranks for row in matrix):
        widths = sorted({len(row) for row in matrix})
        raise ValueError(
            f"traffic needs a square matrix: {ranks} rows have {widths} columns"
        )
    top = max(max(row) for row in matrix) or 1
    total = sum(map(sum, matrix))
    alt = f"Traffic among {ranks} ranks: {bytes_text(total)} in all"
    size = 1.0 + 0.62 * ranks
    with canvas(min(size, 7.2), min(size - 0.2, 7.0), alt) as (figure, ax):
        for source, row in enumerate(matrix):
            for destination, count in enumerate(row):
                cell = (destination - 0.5, source - 0.5)
                ax.add_patch(
                    Rectangle(
                        cell,
                        1,
                        1,
                        facecolor=PALETTE["blue"].sentinel,
                        alpha=0.75 * count / top,
                        linewidth=0,
                    )
                )
                if ranks <= 16:
                    label = bytes_text(count).replace(" ", "\n") if count else "·"
                    ax.text(
                        destination, source, label, ha="center", va="center", size=7.5
                    )
        ax.set_xlim(-0.5, ranks - 0.5)
        ax.set_ylim(ranks - 0.5, -0.5)
        ax.set_aspect("equal")
        step = -(-ranks // 16)
        ax.set_xticks(range(0, ranks, step))
        ax.set_yticks(range(0, ranks, step))
        ax.tick_params(length=0)
        ax.set_xlabel("to rank")
        ax.set_ylabel("from rank")
    return figure


class Entry(NamedTuple):
    """A line of the ledger: what a chapter made of the run.

    Attributes:
        name: Of the chapter or the technique.
        memory_bytes: Peak memory of one GPU.
        step_seconds: Time of one step; None where the run does not fit, or not yet.
    """

    name: str
    memory_bytes: int
    step_seconds: float | None


def ledger(
    entries: Sequence[Entry],
    capacity: int | None = None,
    capacity_name: str = "capacity",
) -> Figure:
    """The book's one run, chapter by chapter: memory and step time as waterfalls.

    The pale bar is what stays of the line above; the hatched piece is what a chapter
    saved (green, leftwards) or added (red, rightwards).

    Args:
        entries: In the order of the book.
        capacity: Bytes of one GPU: a dashed line.
        capacity_name: What it is called.
    """
    last = entries[-1]
    alt = f"Ledger of the run after {last.name}: {bytes_text(last.memory_bytes)} a GPU"
    if last.step_seconds is not None:
        alt += f", {last.step_seconds:.3g} s a step"
    height = 1.0 + 0.4 * len(entries)
    with canvas(7.2, height, alt, columns=2) as (figure, (left, right)):
        memories = [e.memory_bytes for e in entries]
        unit = byte_axis(left.xaxis, max([*memories, capacity or 0]), "memory a GPU")
        _waterfall(left, [b / unit for b in memories], [*map(bytes_text, memories)])
        left.set_xlim(0, max([*memories, capacity or 0]) / unit * 1.28)
        seconds = [e.step_seconds for e in entries]
        _waterfall(right, seconds, ["" if s is None else f"{s:.3g} s" for s in seconds])
        if capacity:
            _capacity_line(left, capacity, unit, capacity_name)
        left.set_yticks(range(len(entries)), [e.name for e in entries])
        right.set_yticks([])
        right.set_xlabel("time a step (s)")
    return figure


def _waterfall(ax: Axes, values: Sequence[float | None], labels: Sequence[str]) -> None:
    before: float | None = None
    for row, (value, label) in enumerate(zip(values, labels, strict=True)):
        if value is None:
            _end_label(ax, "does not fit", before or 0.0, row, color=MUTED)
            continue
        kept, end = (f(value, value if before is None else before) for f in (min, max))
        ax.barh(row, kept, 0.6, **look("other"))
        if end > kept:
            saved = end > value
            colour = PALETTE["green" if saved else "red"].sentinel
            hatch = "\\\\\\\\" if saved else "////"
            style: dict[str, Any] = {
                "facecolor": PAPER,
                "edgecolor": colour,
                "linewidth": 1.0,
            }
            ax.barh(row, end - kept, 0.6, kept, hatch=hatch, **style)
        _end_label(ax, label, value, row)  # on paper, also where a saving is drawn
        before = value
    highest = max((v for v in values if v is not None), default=1.0)
    ax.set_xlim(0, highest * 1.28)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
