"""Who waits where: what a rank reports of itself, and what follows from all reports.

In each rank a helper thread can say what the main thread is blocked in, because
torch lets go of the interpreter's lock while it waits. Collectives come from torch's
flight recorder, which also sees those that C++ code starts. It misses sends and
receives on gloo, so three dispatcher kernels note them here.
"""

import itertools
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from minitrain.runtime import pickling

DTYPES = {  # what the flight recorder and the checker call torch's dtypes
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
SEND_AND_RECEIVE = ("send", "recv_", "recv_any_source_")
MOST_PENDING = 1000  # sends and receives that are remembered


@dataclass(frozen=True)
class Wait:
    """One operation that a rank has started and that has not ended.

    ``sequence`` counts the operations of a group, ``peer`` is a global rank (None: a
    collective, or a receive from anyone); shapes and dtypes are those of the inputs.
    """

    operator: str
    group: tuple[int, ...]
    sequence: int
    peer: int | None
    shapes: list[list[int]]
    dtypes: list[str]
    seconds: float
    name: str = ""  # torch's, of the group: several have the same ranks

    def __str__(self) -> str:
        what = " ".join(
            f"{DTYPES.get(dtype, dtype)}{shape}"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=False)
        )
        if self.operator == "send":
            name = f"send to rank {self.peer}"
        elif self.operator == "recv":
            source = "any rank" if self.peer is None else f"rank {self.peer}"
            name = f"recv from {source}"
        else:
            name = f"{self.operator} #{self.sequence} of ranks {list(self.group)}"
        return f"{name}, {what}" if what else name


@dataclass(frozen=True)
class Report:
    """What one rank was doing: what it waits in, and its line in the user's code.

    ``passed`` says how many collectives of each group it has left behind.
    """

    waits: list[Wait] = field(default_factory=list)
    place: str = ""
    finished: bool = False
    passed: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.finished:
            return "has finished"
        if not self.waits:
            return f"is not communicating; it is at {self.place}"
        first, *more = self.waits
        since = f" {first.seconds:.0f} s" if first.seconds >= 0.5 else ""
        text = f"waits{since} in {first}, at {self.place}"
        return text + (f"; also in flight: {'; '.join(map(str, more))}" if more else "")


class Recorder:
    """Notes every send and receive of this process until it has been waited for."""

    def __init__(self) -> None:
        # The work is kept: else its id would soon be that of another.
        self._pending: dict[int, tuple[Wait, float, Any]] = {}
        self._waited_for: dict[int, int] = {}  # by thread
        self._numbers = itertools.count(1)
        self._library = torch.library.Library("c10d", "IMPL")  # kept alive
        for name in SEND_AND_RECEIVE:
            self._install(name)
        self._patch_wait()

    def _install(self, name: str) -> None:
        operator = getattr(torch.ops.c10d, name).default

        def kernel(keys: Any, tensors: list, group: Any, *rest: Any) -> Any:
            number = next(self._numbers)
            wait = _point_to_point(name, tensors, group, rest, number)
            if wait.peer == dist.get_rank():
                raise ValueError(f"rank {wait.peer} would receive from itself")
            self._pending[-number] = wait, time.time(), None
            boxed = operator.redispatch(
                keys & torch._C._after_autograd_keyset, tensors, group, *rest
            )
            work = c10d.Work.unbox(boxed)
            self._pending[id(work)] = *self._pending.pop(-number)[:2], work
            while len(self._pending) > MOST_PENDING:  # works that nobody waits for
                self._pending.pop(next(iter(self._pending)), None)
            return boxed

        for key in ("AutogradCPU", "AutogradCUDA"):
            self._library.impl(name, kernel, key, with_keyset=True)

    def _patch_wait(self) -> None:
        original = c10d.Work.wait

        def wait(work: Any, *arguments: Any, **options: Any) -> Any:
            thread = threading.get_ident()
            self._waited_for[thread] = id(work)
            try:
                return original(work, *arguments, **options)
            finally:
                self._waited_for.pop(thread, None)
                self._pending.pop(id(work), None)

        c10d.Work.wait = wait  # type: ignore[method-assign, assignment]

    def waits(self) -> list[Wait]:
        """What is in flight now, the operation that blocks the caller first."""
        now = time.time()
        blocking = set(self._waited_for.copy().values())
        pending = self._pending.copy()
        entries = sorted(pending.items(), key=lambda item: item[0] not in blocking)
        messages = [
            Wait(**{**vars(wait), "seconds": now - since})
            for _, (wait, since, _) in entries
        ]
        collectives = [_collective(entry, now) for entry in _flights(active=True)]
        if blocking & pending.keys():
            return messages + collectives
        return collectives + messages


def _point_to_point(
    name: str, tensors: list, group: Any, rest: tuple, count: int
) -> Wait:
    group = c10d.ProcessGroup.unbox(group)
    peer = None
    if name != "recv_any_source_":
        peer = dist.get_global_rank(group, rest[0])
    return Wait(
        operator="send" if name == "send" else "recv",
        group=tuple(dist.get_process_group_ranks(group)),
        sequence=count,
        peer=peer,
        shapes=[list(t.shape) for t in tensors],
        dtypes=[str(t.dtype).removeprefix("torch.") for t in tensors],
        seconds=0.0,
    )


def _flights(active: bool) -> list[dict[str, Any]]:
    """Torch's record of this process's collectives: those in flight, or the others."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # the second where NCCL is
        if dump := vars(c10d).get(name):
            entries += pickle.loads(dump(True, False, active))["entries"]
    return [entry for entry in entries if entry["retired"] != active]


def _collective(entry: dict[str, Any], now: float) -> Wait:
    return Wait(
        operator=entry["profiling_name"].partition(":")[2],
        group=_ranks_of(entry["process_group"][0]),
        sequence=entry["collective_seq_id"],
        peer=None,
        shapes=entry["input_sizes"],
        dtypes=entry["input_dtypes"],
        seconds=now - entry["time_created_ns"] / 1e9,
        name=entry["process_group"][0],
    )


def passed() -> dict[str, int]:
    """The number of the last collective of each group that has ended here."""
    last: dict[str, int] = {}
    for entry in _flights(active=False):
        group = entry["process_group"][0]
        last[group] = max(last.get(group, 0), entry["collective_seq_id"])
    return last


def _ranks_of(group_name: str) -> tuple[int, ...]:
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():
        if name == group_name:
            return tuple(world.pg_group_ranks[group])
    return ()


# ---------------------------------------------------------- the user's own line


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def users_line(frame: FrameType | None) -> str:
    """The innermost line outside torch and this runtime: ``file:line in function``."""
    while frame and _hidden(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "its start"
    code = frame.f_code
    file = os.path.basename(pickling.known_as(code.co_filename))
    return f"{file}:{frame.f_lineno} in {code.co_name}"


def _hidden(file: str) -> bool:
    """Whether a file belongs to torch, to Python's own library, or to this runtime."""
    if "site-packages" not in file and file.startswith(os.path.dirname(os.__file__)):
        return True
    here, torchs = os.path.dirname(__file__), os.path.dirname(torch.__file__)
    return file.startswith((here + os.sep, torchs + os.sep, "<frozen "))


def position(frame: FrameType | None) -> tuple:
    """Where a thread is, to the instruction; unchanged while it is blocked."""
    place: list[tuple[int, int]] = []
    while frame and len(place) < 64:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(place)


# ----------------------------------------------------------------- the verdict


def explain(reports: dict[int, Report]) -> list[str]:
    """Say which ranks disagree, from what each of them waits in.

    Three things make ranks wait for ever: they call different operators as the same
    step of a group, some never arrive, or they wait for each other in a circle.
    """
    return _different_operators(reports) + _missing(reports) + _circle(reports)


def _first(reports: dict[int, Report]) -> dict[int, Wait]:
    return {rank: report.waits[0] for rank, report in reports.items() if report.waits}


def _different_operators(reports: dict[int, Report]) -> list[str]:
    steps: dict[tuple, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, wait in _first(reports).items():
        if wait.operator not in ("send", "recv"):
            step = f" #{wait.sequence} of ranks {list(wait.group)}"
            what = str(wait).replace(step, "")
            steps[wait.group, wait.name, wait.sequence][what].append(rank)
    verdict = []
    for (group, _, sequence), calls in steps.items():
        if len(calls) > 1:
            sides = [f"  {_ranks(r)} in {what}" for what, r in calls.items()]
            first = f"The ranks disagree on step {sequence} of the group {list(group)}:"
            verdict.append("\n".join([first, *sides]))
    return verdict


def _missing(reports: dict[int, Report]) -> list[str]:
    here: dict[tuple, list[int]] = defaultdict(list)
    for rank, wait in _first(reports).items():
        if wait.operator not in ("send", "recv"):
            here[wait.group, wait.name, wait.sequence].append(rank)
    verdict = []
    for (group, name, sequence), ranks in here.items():
        away = [r for r in group if (name, sequence) not in _steps(reports.get(r))]
        past = [r for r in away if _passed(reports.get(r), name) >= sequence]
        never = [r for r in away if r not in past]
        operators = {reports[rank].waits[0].operator for rank in ranks}
        step = operators.pop() if len(operators) == 1 else "step"
        waiting = f"{_ranks(ranks).capitalize()} wait{'s' * (len(ranks) == 1)} in"
        waiting = f"{waiting} {step} #{sequence} for"
        if never:
            verdict.append(f"{waiting} {_ranks(never)}, which never called it.")
        if past:
            verdict.append(
                f"{waiting} {_ranks(past)}, which came out of it: their tensors differ "
                "in shape or dtype (check=True names them)."
            )
    return verdict


def _passed(report: Report | None, group: str) -> int:
    return report.passed.get(group, 0) if report else 0


def _steps(report: Report | None) -> set[tuple]:
    waits = report.waits if report else []
    return {(w.name, w.sequence) for w in waits if w.operator not in ("send", "recv")}


def _circle(reports: dict[int, Report]) -> list[str]:
    after = {
        rank: wait.peer
        for rank, wait in _first(reports).items()
        if wait.operator in ("send", "recv") and wait.peer is not None
    }
    for start in after:
        path = [start]
        while (following := after.get(path[-1])) is not None:
            if following == start:
                arrows = " -> ".join(map(str, [*path, start]))
                return [f"The ranks wait for each other in a circle: {arrows}."]
            if following in path:
                break
            path.append(following)
    return []


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, sorted(ranks)[:-1]))} and {max(ranks)}"
