"""A plot of a pipeline schedule: what each stage computes, when, and where it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minitrain.viz.figure import PALETTE, PAPER, Figure, canvas

KINDS = {
    "F": ("forward", ("blue", "sky"), ""),
    "BW": ("backward", ("orange", "red"), ""),
    "B": ("backward to the input", ("orange", "red"), ""),
    "W": ("backward to the weights", ("green", "grey"), "////"),
}
"""What a task is called, its colour in even and odd chunks, and its hatching."""
DARK = ("blue", "red", "green")
"""Colours on which a number is written in paper's colour, which turns with them."""
ALWAYS_DARK = "#111111"
"""On the other colours, which are light in both palettes."""
MOST_NUMBERS = 600


class _Run(Protocol):
    """What the plot reads of a `minitrain.simulate.pipeline.PipelineRun`."""

    @property
    def schedule(self) -> Any: ...

    @property
    def seconds(self) -> float: ...

    def timeline(self) -> Iterator[tuple[int, Any, float, float]]: ...


def passes(run: _Run, seconds: float = 0.0, unit: str = "s") -> Figure:
    """A row for each stage, a box for each pass, with the number of its micro-batch.

    Args:
        run: A replayed schedule.
        seconds: Least length of the axis, so that schedules can be compared.
        unit: What the replay's times are counted in.
    """
    plan = run.schedule
    busy = sum(end - start for _, _, start, end in run.timeline())
    whole = max(seconds, run.seconds)
    idle = 1 - busy / (plan.stages * run.seconds)
    alt = (
        f"{plan.name} with {plan.stages} stages and {plan.micro_batches} micro-batches:"
        f" {run.seconds:g} {unit}, of which stages wait {idle:.0%}"
    )
    with canvas(7.2, 1.2 + 0.34 * plan.stages, alt) as (figure, ax):
        seen = set(_boxes(ax, run, whole))
        ax.set_xlim(0, whole)
        ax.set_ylim(plan.stages - 0.5, -0.5)
        names = [f"stage {rank}" for rank in range(plan.stages)]
        ax.set_yticks(range(plan.stages), names)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(f"time ({unit})")
        ax.figure.legend(handles=_legend(seen), loc="outside lower center", ncols=3)
    return figure


def _boxes(ax: Axes, run: _Run, whole: float) -> Iterator[tuple[str, int]]:
    numbered = run.schedule.micro_batches * run.schedule.stages * 3 <= MOST_NUMBERS
    for rank, task, start, end in run.timeline():
        _, hues, hatch = KINDS[task.kind]
        hue = hues[task.chunk % 2]
        ax.broken_barh(
            [(start, end - start)],
            (rank - 0.42, 0.84),
            facecolor=PALETTE[hue].sentinel,
            edgecolor=PAPER,
            hatch=hatch,
            linewidth=0.6,
        )
        if numbered and (end - start) / whole > 0.017 and not hatch:
            colour = PAPER if hue in DARK else ALWAYS_DARK
            ax.text(
                *((start + end) / 2, rank, str(task.micro)),
                ha="center",
                va="center",
                fontsize=7,
                color=colour,
            )
        yield task.kind, task.chunk % 2


def _legend(seen: Iterable[tuple[str, int]]) -> list[Patch]:
    several = len({odd for _, odd in seen}) > 1
    return [
        Patch(
            facecolor=PALETTE[hues[odd]].sentinel,
            edgecolor=PAPER,
            hatch=hatch,
            label=name + (f", chunk {odd}" if several else ""),
        )
        for kind, (name, hues, hatch) in KINDS.items()
        for odd in (0, 1)
        if (kind, odd) in seen
    ]
