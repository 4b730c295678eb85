"""What a stretch of code says and holds: every message, and every live byte.

One dispatch mode stands between PyTorch and its kernels. Whatever runs inside it,
ours or PyTorch's own (DDP with its C++ reducer, FSDP, DTensor, ZeRO), passes by.

    with trace() as t:
        step()
    print(t.table().text)
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from minitrain.display import Table, bytes_text
from minitrain.runtime import memory
from minitrain.runtime.group import simulated
from minitrain.runtime.memory import Change
from minitrain.runtime.messages import Message
from minitrain.runtime.operators import Program
from minitrain.runtime.recorder import record


class Total(NamedTuple):
    """What all the calls of one operator add up to."""

    calls: int
    payload_bytes: int
    wire_bytes: int
    waited_seconds: float


@dataclass(eq=False)
class Trace:
    """What one rank did while it was traced: plain data, to be sent and kept.

    Attributes:
        rank, world_size: Of the default group; 0 of 1 where there is none.
        origin_seconds: Wall-clock time at which the trace began (Unix time).
        seconds: How long it lasted.
        messages: The calls, in order.
        memory: Each change of the live bytes, in order: when, which kind, how many.
            Exact for every storage that an operator returns; what a kernel or the
            network library allocates for itself is not seen.
        program: Operators, starts and waits of messages in order, where they were
            asked for; else empty.
    """

    rank: int = 0
    world_size: int = 1
    origin_seconds: float = 0.0
    seconds: float = 0.0
    messages: list[Message] = field(default_factory=list)
    memory: list[Change] = field(default_factory=list)
    program: Program = field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all buffers handed to a call."""
        return sum(m.payload_bytes for m in self.messages)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(m.wire_bytes for m in self.messages)

    @cached_property
    def _peaks(self) -> tuple[dict[str, int], dict[str, int]]:
        return memory.peaks(self.memory)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The highest number of live bytes of each kind (at its own time)."""
        return self._peaks[0]

    @property
    def at_peak(self) -> dict[str, int]:
        """Live bytes of each kind when their sum was highest."""
        return self._peaks[1]

    @property
    def peak_total_bytes(self) -> int:
        """The highest number of live bytes of all kinds together."""
        return sum(self.at_peak.values())

    def by_op(self) -> dict[str, Total]:
        """Totals by operator, in the order of first use."""
        calls: dict[str, list[Message]] = {}
        for message in self.messages:
            calls.setdefault(message.op, []).append(message)
        return {
            op: Total(
                len(ms),
                sum(m.payload_bytes for m in ms),
                sum(m.wire_bytes for m in ms),
                sum(m.waited_seconds for m in ms),
            )
            for op, ms in calls.items()
        }

    def table(self) -> Table:
        """The messages, one a row; equal neighbours are counted, times left out."""
        rows: list[list[str]] = []
        counts: list[int] = []
        for m in self.messages:
            row = [
                m.op,
                _ranks_text(m.group),
                "" if m.peer is None else str(m.peer),
                m.dtype,
                ", ".join("×".join(map(str, s)) or "scalar" for s in m.shapes[:3])
                + (f", … ({len(m.shapes)})" if len(m.shapes) > 3 else ""),
                bytes_text(m.payload_bytes),
                f"{bytes_text(m.wire_bytes)} {m.wire}",
                m.caller,
            ]
            if rows and rows[-1] == row:
                counts[-1] += 1
            else:
                rows.append(row)
                counts.append(1)
        head = ["calls", "op", "group", "peer", "dtype", "shape", "payload", "wire"]
        body = [[str(n), *row] for n, row in zip(counts, rows, strict=True)]
        return Table([*head, "caller"], body)

    def op_table(self) -> Table:
        """Calls, payload and wire bytes of each operator."""
        return Table(
            ["op", "calls", "payload", "wire"],
            [
                [op, str(t.calls), *map(bytes_text, (t.payload_bytes, t.wire_bytes))]
                for op, t in self.by_op().items()
            ],
        )

    def memory_table(self) -> Table:
        """Peak of each kind, and the kinds at the peak of their sum."""
        rows = [
            [kind, bytes_text(peak), bytes_text(self.at_peak[kind])]
            for kind, peak in self.peak_bytes.items()
            if peak
        ]
        total = ["all", "", bytes_text(self.peak_total_bytes)]
        return Table(["kind", "own peak", "at the peak of all"], [*rows, total])

    def skyline(self, formula: dict[str, int] | int | None = None) -> Any:
        """Figure of the live bytes over time; see `minitrain.viz.skyline`."""
        from minitrain import viz

        return viz.skyline(self, formula)

    def save_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the trace for chrome://tracing and ui.perfetto.dev."""
        save_chrome([self], path)

    def __repr__(self) -> str:
        return (
            f"Trace(rank {self.rank} of {self.world_size}:"
            f" {len(self.messages)} messages, {bytes_text(self.wire_bytes)} sent,"
            f" memory peak {bytes_text(self.peak_total_bytes)})"
        )


@contextlib.contextmanager
def trace(operators: bool | None = None) -> Iterator[Trace]:
    """Record every message and every live byte of the code inside.

    Sees what runs in this thread and in the backward passes that it starts. Costs
    about ten microseconds an operator, and a line of Python for each message.

    Args:
        operators: Whether to keep the program too, which costs as much again; by
            default on a simulated group only.

    Yields:
        A `Trace`, filled when the block ends, also when it ends by an exception.

    Raises:
        RuntimeError: If a trace is already running in this process.
    """
    result = Trace()
    if dist.is_initialized():
        result.rank, result.world_size = dist.get_rank(), dist.get_world_size()
    result.origin_seconds = time.time()
    operators = simulated() if operators is None else operators
    with record(result.rank, operators) as recorder:
        try:
            yield result
        finally:
            result.seconds = recorder.now()
            result.messages = recorder.finished_messages()
            result.memory = recorder.finished_memory()
            result.program = recorder.program or []


def _ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks as a range where they are one: `0-7`, `1,3,5`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:8])) + (",…" if len(ranks) > 8 else "")


def save_chrome(traces: Sequence[Trace], path: str | os.PathLike[str]) -> None:
    """Write traces of several ranks, on one clock, as Chrome trace events.

    Open the file with chrome://tracing or https://ui.perfetto.dev: one process for
    each rank, its messages as slices, its live bytes as a stacked counter.

    Args:
        traces: Of the ranks, in any order.
        path: File to write (JSON).
    """
    origin = min((t.origin_seconds for t in traces), default=0.0)
    events: list[dict[str, Any]] = []
    for t in traces:
        shift, pid = t.origin_seconds - origin, t.rank

        def micro(seconds: float, shift: float = shift) -> float:
            return round((seconds + shift) * 1e6, 3)

        name = {"name": f"rank {t.rank}"}
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": name})
        for number, m in enumerate(t.messages):
            common = {"name": m.op, "cat": m.kind, "pid": pid, "tid": "messages"}
            common |= {"id": f"{pid}.{number}"}
            shown = ("group", "peer", "dtype", "shapes", "wire_bytes", "wire", "caller")
            args = {key: getattr(m, key) for key in shown}
            # Asynchronous events, because messages may overlap.
            events.append(
                common | {"ph": "b", "ts": micro(m.start_seconds), "args": args}
            )
            events.append(common | {"ph": "e", "ts": micro(m.end_seconds)})
        for seconds, live in memory.running(t.memory):
            counter = {"name": "live bytes", "ph": "C", "pid": pid, "args": dict(live)}
            events.append(counter | {"ts": micro(seconds)})
    Path(path).write_text(json.dumps({"traceEvents": events}))
