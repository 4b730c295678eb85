"""A collective as it runs: what every rank holds, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from minitrain.viz.figure import FAINT, INK, MUTED, PALETTE, PAPER, Figure, canvas

WIDTH, MARGIN, GAP = 7.2, 0.5, 0.24  # in inches, as all lengths here
ROW, HEAD, LEGEND = 0.2, 0.44, 0.3
PARTIAL, COMPLETE, ADD = (PALETTE[c].sentinel for c in ("sky", "blue", "red"))


class _Program(Protocol):
    """What the figure reads of a `minitrain.collectives.Program`."""

    def to_dict(self) -> dict[str, Any]:
        """Ranks, chunks, steps, and what is held before each step."""


class _Arrow(NamedTuple):
    """Neighbouring chunks of one message."""

    source: int
    to: int
    first: int
    last: int
    add: bool


class _Box(NamedTuple):
    """A rectangle, in inches."""

    left: float
    top: float
    right: float
    bottom: float


def steps(program: _Program, which: Sequence[int] | None = None) -> Figure:
    """A program step by step: a panel a step, a row a rank, a column a chunk.

    A panel shows what the ranks hold before the step, and the messages of the step. A
    cell is as full as its chunk has terms of all that it needs, and dark when it has
    them all (in an all-to-all: when it is with its owner). An arrow stays in the
    columns of the chunks that it carries. The columns of an all-to-all are what rank 0
    has for ranks 0, 1, ..., then what rank 1 has for them, and so on.

    Args:
        program: To be drawn.
        which: Steps to draw, by their number; the number of steps is the end, where no
            message is left. By default all of them, and the end.

    Raises:
        ValueError: There is no such step.
    """
    plan = program.to_dict()
    count = len(plan["steps"])
    chosen = list(range(count + 1) if which is None else which)
    if not chosen or not all(0 <= number <= count for number in chosen):
        raise ValueError(f"steps {chosen}: numbers from 0 to {count}, the end, please")
    most = _abreast(plan["chunks"])
    abreast = min(len(chosen), most)
    panel = (WIDTH - MARGIN + GAP) / most - GAP
    width = max(4.0, MARGIN + abreast * (panel + GAP) - GAP)
    tall = HEAD + ROW * plan["ranks"] + GAP / 2
    height = LEGEND + tall * -(-len(chosen) // abreast)
    with canvas(width, height, _words(plan, chosen)) as (figure, ax):
        ax.set_xlim(0, width)
        ax.set_ylim(height, 0)
        ax.set_axis_off()
        for place, number in enumerate(chosen):
            row, column = divmod(place, abreast)
            left, top = MARGIN + column * (panel + GAP), LEGEND + row * tall + HEAD
            _panel(ax, plan, number, left, top, panel, labels=column == 0)
        _legend(ax, plan, chosen)
    return figure


def _abreast(chunks: int) -> int:
    """How many panels fit side by side."""
    return 4 if chunks <= 8 else 2 if chunks <= 20 else 1


def _panel(
    ax: Axes,
    plan: dict[str, Any],
    number: int,
    left: float,
    top: float,
    width: float,
    labels: bool,
) -> None:
    """One step: its cells, its arrows, and what to call them."""
    messages = plan["steps"][number] if number < len(plan["steps"]) else []
    cell = width / plan["chunks"]
    _cells(ax, plan, plan["held"][number], left, top, cell)
    for rank in range(plan["ranks"]) if labels else ():
        y = top + (rank + 0.5) * ROW
        ax.text(left - 0.07, y, f"rank {rank}", ha="right", va="center", fontsize=7.5)
    small: Any = {"fontsize": 7, "color": MUTED}
    if labels:
        ax.text(left - 0.07, top - 0.06, "chunk", ha="right", **small)
    for name, place in _columns(plan):
        ax.text(left + place * cell, top - 0.06, name, ha="center", **small)
    title = f"step {number}" if messages else "the end"
    ax.text(left, top - 0.23, title, fontsize=9, fontweight="bold")
    for x, arrow in _lanes(list(_arrows(messages))):
        _draw(ax, arrow, left + x * cell, left, top, cell)


def _cells(
    ax: Axes,
    plan: dict[str, Any],
    held: Sequence[Sequence[Sequence[int]]],
    left: float,
    top: float,
    cell: float,
) -> None:
    """A place for each rank and chunk, filled from the bottom."""
    needed = plan["ranks"] if "reduce" in plan["collective"] else 1
    exchange = plan["collective"] == "all_to_all"
    inset = 0.012 if cell > 0.08 else 0.004
    places: list[_Box] = []
    partial: list[_Box] = []
    complete: list[_Box] = []
    for rank, row in enumerate(held):
        high = top + rank * ROW + 0.012
        low = high + ROW - 0.024
        for chunk, terms in enumerate(row):
            a = left + chunk * cell + inset
            b = left + (chunk + 1) * cell - inset
            places.append(_Box(a, high, b, low))
            if terms:
                level = low - (low - high) * len(terms) / needed
                passing = exchange and chunk % plan["ranks"] != rank
                done = len(terms) == needed and not passing
                (complete if done else partial).append(_Box(a, level, b, low))
    _boxes(ax, partial, facecolor=PARTIAL, linewidth=0)
    _boxes(ax, complete, facecolor=COMPLETE, linewidth=0)
    _boxes(ax, places, facecolor="none", edgecolor=FAINT, linewidth=0.7)


def _boxes(ax: Axes, boxes: Sequence[_Box], **look: Any) -> None:
    """All boxes of one look, as a single path."""
    if boxes:
        corners = [[(a, y), (a, z), (b, z), (b, y), (a, y)] for a, y, b, z in boxes]
        paths = [Path(line, closed=True) for line in corners]
        ax.add_patch(PathPatch(Path.make_compound_path(*paths), **look))


def _columns(plan: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names above the columns, and where; of an all-to-all above each rank's chunks."""
    ranks, chunks = plan["ranks"], plan["chunks"]
    if plan["collective"] == "all_to_all":
        for source in range(ranks):
            yield f"from {source}", (source + 0.5) * ranks
    else:
        for chunk in range(chunks):
            yield str(chunk), chunk + 0.5


def _arrows(messages: Sequence[dict[str, Any]]) -> Iterator[_Arrow]:
    """The messages, those of chunks that are not neighbours in several arrows."""
    for m in messages:
        numbered = enumerate(sorted(m["chunks"]))
        for _, run in groupby(numbered, lambda pair: pair[1] - pair[0]):
            chunks = [chunk for _, chunk in run]
            yield _Arrow(m["source"], m["to"], chunks[0], chunks[-1], m["add"])


def _lanes(arrows: Sequence[_Arrow]) -> Iterator[tuple[float, _Arrow]]:
    """A place for each arrow inside its columns, so that none lies on another."""
    for columns in sorted({(a.first, a.last) for a in arrows}):
        first, last = columns
        here = [a for a in arrows if (a.first, a.last) == columns]
        ends: list[list[_Arrow]] = []
        for arrow in sorted(here, key=lambda a: (min(a.source, a.to), a.source)):
            lane = next((x for x in ends if not _meet(x[-1], arrow)), None)
            if lane is None:
                ends.append(lane := [])
            lane.append(arrow)
        for position, lane in enumerate(ends):
            x = first + (last + 1 - first) * (position + 0.5) / len(ends)
            yield from ((x, arrow) for arrow in lane)


def _meet(a: _Arrow, b: _Arrow) -> bool:
    """Whether two arrows in one line would touch; `a` does not start below `b`."""
    return max(a.source, a.to) >= min(b.source, b.to)


def _draw(
    ax: Axes, arrow: _Arrow, x: float, left: float, top: float, cell: float
) -> None:
    """From the middle of the sender's row to the middle of the receiver's."""
    start, end = (top + (rank + 0.5) * ROW for rank in (arrow.source, arrow.to))
    colour = ADD if arrow.add else INK
    halo = [withStroke(linewidth=2.6, foreground=PAPER)]
    if arrow.last > arrow.first:  # a bar over all chunks that the message carries
        span = left + (arrow.first + 0.2) * cell, left + (arrow.last + 0.8) * cell
        ax.plot(span, (start, start), color=colour, lw=1.1, path_effects=halo)
    ax.annotate(
        "",
        (x, end),
        (x, start),
        arrowprops={
            "arrowstyle": "-|>,head_width=.16,head_length=.3"
            if arrow.add
            else "->,head_width=.16,head_length=.25",
            "color": colour,
            "lw": 1.1,
            "shrinkA": 0,
            "shrinkB": 0,
            "path_effects": halo,
        },
    )
    ax.plot([x], [start], "o", ms=3, mew=0, color=colour, zorder=5)


def _legend(ax: Axes, plan: dict[str, Any], chosen: Sequence[int]) -> None:
    """Only of what can be seen."""
    exchange = plan["collective"] == "all_to_all"
    shown = [plan["steps"][n] for n in chosen if n < len(plan["steps"])]
    adds = {m["add"] for step in shown for m in step}
    full = "at its owner" if exchange else "complete"
    handles: list[Any] = [Patch(facecolor=COMPLETE, label=full)]
    if exchange or "reduce" in plan["collective"]:
        name = "for another rank" if exchange else "some of the terms"
        handles.append(Patch(facecolor=PARTIAL, label=name))
    if True in adds:
        handles.append(Line2D([], [], color=ADD, lw=1.3, marker="v", label="add"))
    if False in adds:
        handles.append(
            Line2D([], [], color=INK, lw=1.3, marker="v", mfc=PAPER, label="copy")
        )
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=4,
        borderaxespad=0,
        fontsize=8,
    )


def _words(plan: dict[str, Any], chosen: Sequence[int]) -> str:
    """The figure in words: all messages where they are few, else how many."""
    name = plan["collective"].replace("_", "-")
    count = len(plan["steps"])
    text = (
        f"{plan['algorithm'].replace('_', ' ')} {name} among {plan['ranks']} ranks, "
        f"{plan['chunks']} chunks, {count} steps"
    )
    for number in chosen:
        step = plan["steps"][number] if number < count else []
        if not step:
            continue
        said = [_sentence(message) for message in step]
        if len(said) > 4:
            said = [f"{len(step)} messages, the first: {said[0]}"]
        text += f"; step {number}: " + "; ".join(said)
    return text


def _sentence(message: dict[str, Any]) -> str:
    chunks = ", ".join(map(str, message["chunks"]))
    adds = ", which adds it" if message["add"] else ""
    return (
        f"rank {message['source']} sends chunk {chunks} to rank {message['to']}{adds}"
    )
