"""The book's few plots: plain data in, one SVG out, right in light and in dark."""

from minitrain.viz.amounts import Entry, bars, ledger, traffic
from minitrain.viz.figure import FAINT, INK, PALETTE, PAPER, Figure, canvas, look
from minitrain.viz.programs import steps
from minitrain.viz.time import skyline
from minitrain.viz.timelines import timeline, twin

__all__ = [
    "FAINT",
    "INK",
    "PALETTE",
    "PAPER",
    "Entry",
    "Figure",
    "bars",
    "canvas",
    "ledger",
    "look",
    "skyline",
    "steps",
    "timeline",
    "traffic",
    "twin",
]
