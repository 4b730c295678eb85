"""The book's few plots. Each is one SVG that carries a light and a dark palette.

A figure is drawn in sentinel colours, which the style sheet inside the SVG replaces:
so it follows the page's theme, wherever it is shown. Its bytes depend on nothing but
what is drawn. Series differ in colour (Okabe and Ito, 2008), in lightness and in
hatching, so that they stay apart for the colour-blind and on a grey printer.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import matplotlib
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

from minitrain.display import bytes_text


class Ink(NamedTuple):
    """A colour by its role: the sentinel to draw with, and what it becomes."""

    sentinel: str
    light: str
    dark: str


PALETTE = {
    "ink": Ink("#010101", "#1f2328", "#e6e6e6"),
    "paper": Ink("#fefefe", "#ffffff", "#121212"),
    "faint": Ink("#020202", "#d8dce0", "#3a3f45"),
    "muted": Ink("#030303", "#57606a", "#a8b0b8"),
    "blue": Ink("#0072b2", "#0072b2", "#3d9be0"),
    "orange": Ink("#e69f00", "#e69f00", "#e6a817"),
    "green": Ink("#009e73", "#009e73", "#17b890"),
    "red": Ink("#d55e00", "#d55e00", "#f07a2b"),
    "sky": Ink("#56b4e9", "#56b4e9", "#8fd0f5"),
    "pink": Ink("#cc79a7", "#cc79a7", "#dd92bc"),
    "grey": Ink("#999999", "#b4bac1", "#52585f"),
}
INK, PAPER, FAINT, MUTED, *_ = (ink.sentinel for ink in PALETTE.values())

# What is stacked or coloured by name: colour and hatching.
LOOKS = {
    "parameters": ("blue", ""),
    "gradients": ("orange", "////"),
    "optimizer state": ("green", "\\\\\\\\"),
    "communication": ("red", "xxxx"),
    "activations": ("sky", "----"),
    "other": ("grey", ""),
    "all_reduce": ("blue", ""),
    "all_gather": ("sky", "----"),
    "reduce_scatter": ("green", "\\\\\\\\"),
    "all_to_all": ("red", "xxxx"),
    "broadcast": ("pink", "||||"),
    "send": ("orange", "////"),
    "recv": ("orange", ""),
}
SPARE = (("pink", "||||"), ("grey", "////"), ("blue", "++++"), ("red", "----"))

_STYLE: Any = {
    "svg.hashsalt": "minitrain",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.7,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.handleheight": 1.1,
}


def _style_sheet() -> str:
    def variables(palette: str) -> str:
        return "".join(f"--{n}:{getattr(ink, palette)};" for n, ink in PALETTE.items())

    return (
        f"<style>svg{{color-scheme:light dark;{variables('light')}}}"
        f"@media (prefers-color-scheme:dark){{svg{{{variables('dark')}}}}}"
        "text{font-family:system-ui,sans-serif!important}</style>"
    )


class Figure:
    """One SVG that displays itself; `alt` says in words what it shows."""

    def __init__(self, svg: str, alt: str) -> None:
        self.svg, self.alt = svg, alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        return {"image/svg+xml": self.svg, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"<figure: {self.alt}>"


@contextlib.contextmanager
def canvas(
    width: float, height: float, alt: str, columns: int = 1
) -> Iterator[tuple[Figure, Any]]:
    """Draw a figure in the book's style.

    Args:
        width: In inches; 7.2 fills the text column.
        height: In inches.
        alt: What the figure shows, for those who cannot see it.
        columns: How many axes, side by side.

    Yields:
        The figure, which can be displayed after the block, and its matplotlib axes
        (a list of them if there are several columns).
    """
    figure = Figure("", alt)
    with matplotlib.rc_context(_STYLE):
        drawing = Canvas(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.subplots(1, columns)
        yield figure, axes if columns == 1 else list(axes)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    figure.svg = _finish(buffer.getvalue(), alt)


def _finish(svg: str, alt: str) -> str:
    svg = svg[svg.index("<svg") :]
    for name, ink in PALETTE.items():
        svg = svg.replace(ink.sentinel, f"var(--{name})")
    label = f'role="img" aria-label="{html.escape(alt)}"'
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is plenty
    head = re.compile(r"<svg ([^>]*)>", re.S)
    return head.sub(lambda m: f"<svg {label} {m[1]}>{_style_sheet()}", svg, count=1)


def look(name: str, position: int = 0) -> dict[str, Any]:
    """Face colour and hatching of a series, as keywords for matplotlib.

    Args:
        name: A memory kind or an operator; other names take a spare look.
        position: Which spare look.
    """
    colour, hatch = LOOKS.get(name, SPARE[position % len(SPARE)])
    return {
        "facecolor": PALETTE[colour].sentinel,
        "hatch": hatch,
        "edgecolor": PAPER,  # of the hatching
        "linewidth": 0.0,
    }


def _byte_axis(axis: Any, highest: float, what: str) -> float:
    """Label an axis of bytes in one binary unit, and return the unit's size."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while power < len(units) - 1 and highest >= 2 * 1024 ** (power + 1):
        power += 1
    size = 1024.0**power
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_label_text(f"{what} ({units[power]})")
    return size


class _Traced(Protocol):
    """What the plots read of a `minitrain.runtime.tracing.Trace`."""

    rank: int
    origin_seconds: float
    seconds: float
    messages: list[Any]
    memory: list[tuple[float, str, int]]


# Memory over a step


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
        top = max([peak, *lines.values()])
        unit = _byte_axis(ax.yaxis, top, "live memory")
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


def timeline(traces: Sequence[_Traced]) -> Figure:
    """What each rank does over time: a row a rank, computing above, talking below.

    A gap in the upper bar is time in which the rank only waited for others. Each
    message is a box from the call to its completion; arrows lead from a send to the
    receive that it meets.

    Args:
        traces: One of each rank, on one clock.
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
    longest = max(t.origin_seconds - origin + t.seconds for t in traces)
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
        handles = [matplotlib.patches.Patch(facecolor=MUTED, label="computing")]
        handles += [
            matplotlib.patches.Patch(label=op, **look(op, 1)) for op in operators
        ]
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


# Memory, traffic and the ledger


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
        unit = _byte_axis(ax.xaxis, top, "memory")
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
                    matplotlib.patches.Rectangle(
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
        unit = _byte_axis(left.xaxis, max([*memories, capacity or 0]), "memory a GPU")
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
        _end_label(ax, label, end, row)
        before = value
    highest = max((v for v in values if v is not None), default=1.0)
    ax.set_xlim(0, highest * 1.28)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
