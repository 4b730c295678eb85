"""What a simulated step says of itself: figures, tables, words and a Perfetto file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minitrain.display import Table, bytes_text
from minitrain.runtime.tracing import Trace
from minitrain.simulate.costs import HARDWARE
from minitrain.simulate.program import FLASH, MEMORY, PRODUCTS
from minitrain.simulate.replay import LAUNCHES

if TYPE_CHECKING:
    from minitrain.simulate.simulation import Simulation

DISTURBED = "slowed by messages"
EXPOSED = "messages not hidden"
BUBBLE = "waiting for other ranks"

ERRORS: Mapping[str, float] = MappingProxyType(
    {
        PRODUCTS: 0.06,
        FLASH: 0.10,
        MEMORY: 0.15,
        LAUNCHES: 0.40,
        DISTURBED: 0.50,
        EXPOSED: 0.20,
        BUBBLE: 0.15,
    }
)
"""Relative standard error of each part of a step: that of the kernels and collectives
on measurements that the fits did not see, and for the last three of replays."""
PROGRAM_ERROR = 0.03
"""Relative standard error of what no part holds: the program is not the kernels."""
FOUR_OF_FIVE = 1.2816
"""Standard errors on each side within which four in five normal values lie."""


def relative_half_width(parts: Mapping[str, float]) -> float:
    """Half of the 80 % interval, as a share of the step; errors of parts are apart."""
    total = sum(parts.values())
    if not total:
        return 0.0
    errors = [seconds / total * ERRORS[part] for part, seconds in parts.items()]
    return FOUR_OF_FIVE * sqrt(sum(e * e for e in [*errors, PROGRAM_ERROR]))


def seconds_text(seconds: float) -> str:
    """A time in a unit that suits it, to three figures: `1.24 s`, `12.4 ms`."""
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def _three(value: float) -> str:
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{decimals}f}"


# ---- the summary


def headline(s: Simulation) -> str:
    """One line: where, how, how long."""
    device, size = s.cluster.accelerator.name, s.cluster.world_size
    plural = "s" * (size > 1)
    low, high = s.interval
    return (
        f"{size:,} {device}{plural}, {s.layout}: a step takes "
        f"{seconds_text(s.step_seconds)} (80 %: {seconds_text(low)} to "
        f"{seconds_text(high)})"
    )


def summary(s: Simulation) -> Table:
    """The main figures of a simulated step."""
    hidden = s.communication_seconds - s.exposed_seconds
    room = s.cluster.accelerator.memory_bytes
    rows = [["step", seconds_text(s.step_seconds)]]
    if s.tokens:
        each = s.tokens_per_second / s.cluster.world_size
        per_second = f"{s.tokens_per_second:,.0f} ({each:,.0f} each)"
        rows.append(["tokens per second", per_second])
    if s.model_flops:
        again = s.hardware_flops > s.model_flops * 1.02
        also = f" (HFU {s.hfu:.1%})" if again else ""
        rows.append(["model FLOPs utilization", f"{s.mfu:.1%}{also}"])
    fits = "fits" if s.fits else "does not fit"
    rows += [
        ["messages", f"{seconds_text(s.communication_seconds)}"],
        ["of these hidden", seconds_text(max(0.0, hidden))],
        ["of these not hidden", seconds_text(s.exposed_seconds)],
        ["waiting for other ranks", seconds_text(s.bubble_seconds)],
        [
            "memory of the fullest rank",
            f"{bytes_text(s.memory_bytes)} of {bytes_text(room)}: {fits}",
        ],
    ]
    return Table(["", f"on {s.cluster.accelerator.name}"], rows)


# ---- where the time goes


@dataclass(frozen=True)
class Explanation:
    """Where the time of a step goes, and what would change it most.

    Attributes:
        words: The main of it in two sentences.
        parts: Seconds of each part, on the rank that computes longest.
        gains: Share of the step that is saved if a number of the hardware were a tenth
            better.
    """

    words: str
    parts: Table
    gains: Table

    def __str__(self) -> str:
        return f"{self.words}\n\n{self.parts.text}\n\n{self.gains.text}"

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        markdown = f"{self.words}\n\n{self.parts.markdown}\n\n{self.gains.markdown}"
        return {"text/markdown": markdown, "text/plain": str(self)}


def explain(s: Simulation) -> Explanation:
    """See `Simulation.explain`."""
    whole = s.step_seconds
    parts = sorted(s.parts.items(), key=lambda part: -part[1])
    gains = {name: 1 - s.better(name) / whole for name in HARDWARE}
    order = sorted(gains.items(), key=lambda gain: -gain[1])  # ties as in HARDWARE
    (first, most), (best, gain) = parts[0], order[0]
    name = s.roles[s.slowest].name
    where = "" if len(s.roles) == 1 else f" on {name}, which computes longest"
    words = (
        f"Of {seconds_text(whole)}{where}, {most / whole:.0%} goes into {first}"
        + (f" and {parts[1][1] / whole:.0%} into {parts[1][0]}" * (len(parts) > 1))
        + f". What would help most: {best}, of which a tenth better saves {gain:.1%}."
    )
    rows = [[part, seconds_text(t), f"{t / whole:.1%}"] for part, t in parts]
    rows.append(["all", seconds_text(whole), "100.0%"])
    saved = [[number, f"{share:.2%}"] for number, share in order]
    return Explanation(
        words,
        Table(["part", "time", "share"], rows),
        Table(["a tenth better", "saves"], saved),
    )


# ---- timelines


@dataclass(eq=False)
class Simulated(Trace):
    """A role's trace on the simulated clock.

    Attributes:
        label: The role's name.
        begins: When each message began to move, in seconds.
        computing: Stretches of computing: begin, end, phase.
    """

    label: str = ""
    begins: list[float] = field(default_factory=list)
    computing: list[tuple[float, float, str]] = field(default_factory=list)


def traces(s: Simulation) -> list[Simulated]:
    """See `Simulation.traces`."""
    place = {end: i for i, meeting in enumerate(s.meetings) for end in meeting.ends}
    line, result = s.timeline, []
    for number, role in enumerate(s.roles):
        waited: dict[int, float] = {}
        for wait in line.waits[number]:
            length = wait.end - wait.start
            waited[wait.transfer] = waited.get(wait.transfer, 0.0) + length
        messages, begins = [], []
        for i, message in enumerate(role.trace.messages):
            transfer = place[number, i]
            timed = replace(
                message,
                start_seconds=line.posted[number, transfer],
                end_seconds=line.ends[transfer],
                waited_seconds=waited.get(transfer, 0.0),
            )
            messages.append(timed)
            begins.append(line.begins[transfer])
        result.append(
            Simulated(
                rank=role.rank,
                world_size=s.layout.world_size,
                seconds=s.step_seconds,
                messages=messages,
                memory=role.trace.memory,
                label=role.name,
                begins=begins,
                computing=[(a, b, phase) for a, b, phase in line.computing[number]],
            )
        )
    return result


def save(s: Simulation, path: str | Path) -> None:
    """See `Simulation.save`."""
    events: list[dict[str, Any]] = []
    for pid, t in enumerate(traces(s)):
        title = {"name": f"{t.label} (rank {t.rank})"}
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": title})
        for start, end, phase in t.computing:
            events.append(_slice(pid, "computing", phase, start, end))
        for message, begin in zip(t.messages, t.begins, strict=True):
            keys = ("dtype", "shapes", "payload_bytes", "peer", "caller")
            args = {key: getattr(message, key) for key in keys}
            args |= {"ranks": len(message.group)}
            stream = f"{message.kind} of {len(message.group)}"
            end = message.end_seconds
            events.append(_slice(pid, stream, message.op, begin, end) | {"args": args})
        for wait in s.timeline.waits[pid]:
            name = s.meetings[wait.transfer].message.op
            events.append(_slice(pid, "waiting", name, wait.start, wait.end))
    Path(path).write_text(json.dumps({"traceEvents": events}))


def _slice(pid: int, row: str, name: str, start: float, end: float) -> dict[str, Any]:
    times = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
    return {"name": name, "ph": "X", "pid": pid, "tid": row, **times}
