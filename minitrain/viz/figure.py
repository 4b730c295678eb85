"""One SVG that carries a light and a dark palette, in the book's style.

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
from collections.abc import Iterator
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator


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


def byte_axis(axis: Any, highest: float, what: str) -> float:
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
