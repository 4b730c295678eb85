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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from minitrain.runtime import memory
from minitrain.runtime.memory import Change, Storages, local
from minitrain.runtime.messages import Call, Message, flat, read_call
from minitrain.show import Table, bytes_text


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
    """

    rank: int = 0
    world_size: int = 1
    origin_seconds: float = 0.0
    seconds: float = 0.0
    messages: list[Message] = field(default_factory=list)
    memory: list[Change] = field(default_factory=list)

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
                [op, str(t.calls), bytes_text(t.payload_bytes), bytes_text(t.wire_bytes)]
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
            f"Trace(rank {self.rank} of {self.world_size}: {len(self.messages)} messages,"
            f" {bytes_text(self.wire_bytes)} sent,"
            f" memory peak {bytes_text(self.peak_total_bytes)})"
        )


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Record every message and every live byte of the code inside.

    Sees what runs in this thread and in the backward passes that it starts. Costs
    about ten microseconds an operator, and a line of Python for each message.

    Yields:
        A `Trace`, filled when the block ends, also when it ends by an exception.

    Raises:
        RuntimeError: If a trace is already running in this process.
    """
    if hasattr(c10d.Work.wait, "traced"):
        raise RuntimeError(
            "a trace is already running in this process: two would each miss what"
            " the other sees, so end the outer one first"
        )
    result = Trace()
    if dist.is_initialized():
        result.rank, result.world_size = dist.get_rank(), dist.get_world_size()
    result.origin_seconds = time.time()
    recorder = _Recorder(result.rank)
    try:
        with recorder, _patched(recorder), _hooked(recorder):
            yield result
    finally:
        result.seconds = recorder.now()
        result.messages = recorder.finished_messages()
        result.memory = recorder.finished_memory()


class _Pending:
    """A call that was made, until we know when it was complete."""

    __slots__ = ("call", "start", "end", "waited", "caller", "async_", "work")

    def __init__(self, call: Call, start: float, caller: str, async_: bool) -> None:
        self.call = call
        self.start = start
        self.end: float | None = None
        self.waited = 0.0
        self.caller = caller
        self.async_ = async_
        self.work: c10d.Work | None = None


class _Operator(NamedTuple):
    """What the recorder needs to know of an operator; worked out once for each."""

    communicates: bool
    waits: bool
    makes: bool  # returns at least one new storage
    lifts: bool  # wraps data that was made just before, out of sight
    resizes: bool


def _describe(func: Any) -> _Operator:
    schema, name = func._schema, func._schema.name
    return _Operator(
        communicates=func.namespace in ("c10d", "_c10d_functional"),
        waits=name == "_c10d_functional::wait_tensor",
        makes=any(r.alias_info is None for r in schema.returns),
        lifts=name in ("aten::lift_fresh", "aten::lift"),
        resizes=schema.is_mutable
        and ("resize" in name or "set_" in name or "out" in func._overloadname),
    )


def _wraps_others(cls: type) -> bool:
    """Whether a tensor class, such as `DTensor`, runs its operators on inner ones."""
    own = getattr(cls, "__torch_dispatch__", None)
    plain = own is None or own is torch._C._disabled_torch_dispatch_impl
    return not plain and not issubclass(cls, FakeTensor)


class _Recorder(TorchDispatchMode):
    """The mode. Times are seconds since it was made."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        begin = time.perf_counter()
        self.now: Callable[[], float] = lambda: time.perf_counter() - begin
        self.storages = Storages(self.now)
        self.pending: list[_Pending] = []
        self.works: dict[int, _Pending] = {}  # by id of the Work, while it runs
        self.promises: dict[int, _Pending] = {}  # by storage of a functional result
        self.hooks = WeakIdKeyDictionary()  # parameter -> handle of its gradient hook
        self.operators: dict[Any, _Operator] = {}
        self.wrappers: dict[type, bool] = {Tensor: False, Parameter: False}

    # The one door

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for cls in types:
            wraps = self.wrappers.get(cls)
            if wraps is None:
                wraps = self.wrappers[cls] = _wraps_others(cls)
            if wraps:  # it comes back to us with its inner tensors
                self._meet_parameters(args)
                return NotImplemented
        operator = self.operators.get(func)
        if operator is None:
            operator = self.operators[func] = _describe(func)
        if operator.communicates:
            return self._communicate(func, args, kwargs, operator)
        backward = (
            torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        )
        self._meet_arguments(args, backward, found=not operator.lifts)
        out = func(*args, **kwargs)
        if operator.makes:
            for tensor in flat(out):
                self.storages.see(tensor, found=False, forward=not backward)
        if operator.resizes:
            for tensor in flat((*args, *kwargs.values())):
                self.storages.resized(tensor.untyped_storage())
        return out

    # Memory

    def _meet_arguments(self, args: Any, backward: bool, found: bool) -> None:
        see = self.storages.see
        for arg in args:
            if isinstance(arg, Tensor):
                if type(arg) is not Tensor and isinstance(arg, Parameter):
                    self._meet_parameter(arg)
                    continue
                storage = see(arg, found=found, forward=not found)
                if backward and storage.forward and storage.kind == memory.OTHER:
                    storage.kind = memory.ACTIVATIONS  # made in forward, read in backward
            elif isinstance(arg, (list, tuple)):
                self._meet_arguments(arg, backward, found)

    def _meet_parameters(self, args: Any) -> None:
        for tensor in flat(args):
            if isinstance(tensor, Parameter):
                self._meet_parameter(tensor)

    def _meet_parameter(self, parameter: Tensor) -> None:
        self.storages.see(local(parameter), memory.PARAMETERS)
        if parameter.requires_grad and parameter.is_leaf:
            if parameter not in self.hooks:
                self.hooks[parameter] = parameter.register_hook(self._meet_gradient)

    def _meet_gradient(self, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            self.storages.see(local(gradient), memory.GRADIENTS)

    def saved(self, tensor: Tensor) -> Tensor:
        """Pack hook of autograd: what is saved for backward is an activation."""
        if not _wraps_others(type(tensor)):
            storage = self.storages.see(tensor)
            if not storage.found and storage.kind == memory.OTHER:
                storage.kind = memory.ACTIVATIONS
        return tensor

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._meet_parameter(parameter)
                if parameter.grad is not None:
                    self._meet_gradient(parameter.grad)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for tensor in flat(tuple(state.values()) if isinstance(state, dict) else ()):
                self.storages.see(local(tensor), memory.STATE)

    def finished_memory(self) -> list[Change]:
        for parameter, hook in self.hooks.items():
            hook.remove()
            if parameter.grad is not None:
                self._meet_gradient(parameter.grad)
        return self.storages.close()

    # Messages

    def _communicate(
        self, func: Any, args: Any, kwargs: dict[str, Any], operator: _Operator
    ) -> Any:
        buffers = list(flat((*args, *kwargs.values())))
        for tensor in buffers:
            self.storages.see(tensor, memory.COMMUNICATION)
        if operator.waits:
            key, start = buffers[0].untyped_storage()._cdata, self.now()
            out = func(*args, **kwargs)
            if made := self.promises.pop(key, None):
                made.end = self.now()
                made.waited += made.end - start
            return out
        calls = read_call(func, args, kwargs) or []
        caller, entry = _caller()
        start = self.now()
        out = func(*args, **kwargs)
        returned = self.now()
        for tensor in flat(out):
            self.storages.see(tensor, memory.COMMUNICATION, found=False)
        for call in calls:
            async_ = call.async_op
            if async_ is None:  # send or isend? The dispatcher does not say
                async_ = entry not in ("send", "recv", "barrier", "monitored_barrier")
            made = _Pending(call, start, caller, async_)
            made.waited = returned - start
            self.pending.append(made)
            self._follow(made, out)
        return out

    def _follow(self, made: _Pending, out: Any) -> None:
        """Learn when a call is complete: from its Work, or from `wait_tensor`."""
        last = out[-1] if isinstance(out, tuple) and out else out
        if isinstance(last, (Tensor, list)):
            for tensor in flat(last):
                self.promises[tensor.untyped_storage()._cdata] = made
        elif isinstance(last, torch.ScriptObject):
            work = made.work = c10d.Work.unbox(last)
            self.works[id(work)] = made
            with contextlib.suppress(RuntimeError):  # send and recv have no future
                work.get_future().add_done_callback(lambda _: self._complete(made))
        else:
            made.end = self.now()

    def _complete(self, made: _Pending) -> None:
        """Note the end, and let go of the Work: it would keep the tensors alive."""
        if made.end is None:
            made.end = self.now()
        if made.work is not None:
            self.works.pop(id(made.work), None)
            made.work = None

    def wait(self, wait: Callable[..., Any], work: Any, *args: Any, **kw: Any) -> Any:
        """`Work.wait`, timed."""
        made, start = self.works.get(id(work)), self.now()
        out = wait(work, *args, **kw)
        if made is not None:
            made.waited += self.now() - start
            self._complete(made)
        return out

    def finished_messages(self) -> list[Message]:
        self.works.clear()
        end = self.now()
        return [self._message(made, end) for made in self.pending]

    def _message(self, made: _Pending, end: float) -> Message:
        made.work, call = None, made.call
        counted = call.op in ("send", "recv")
        return Message(
            op=call.op,
            kind="p2p" if counted else "collective",
            group=call.group,
            dtype=call.dtype,
            shapes=call.shapes,
            payload_bytes=call.payload_bytes,
            wire_bytes=call.wire_bytes(self.rank),
            wire="counted" if counted else "modelled",
            start_seconds=made.start,
            end_seconds=end if made.end is None else made.end,
            waited_seconds=made.waited,
            caller=made.caller,
            peer=call.peer,
            async_=made.async_,
        )


@contextlib.contextmanager
def _patched(recorder: _Recorder) -> Iterator[None]:
    """See what the dispatcher does not show: waits, and storages being resized."""
    wait, resize = c10d.Work.wait, torch.UntypedStorage.resize_

    def traced_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.wait(wait, work, *args, **kwargs)

    def traced_resize(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.storages.resized(storage)
        out = resize(storage, size)
        recorder.storages.resized(storage)
        return out

    traced_wait.traced = True  # type: ignore[attr-defined]
    c10d.Work.wait = traced_wait
    torch.UntypedStorage.resize_ = traced_resize  # type: ignore[assignment]
    try:
        yield
    finally:
        c10d.Work.wait = wait
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextlib.contextmanager
def _hooked(recorder: _Recorder) -> Iterator[None]:
    """Learn from autograd and from the optimizers what a storage is used for."""
    handles = [
        register_optimizer_step_pre_hook(recorder.before_step),
        register_optimizer_step_post_hook(recorder.after_step),
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda t: t):
            yield
    finally:
        for handle in handles:
            handle.remove()


_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, __file__, contextlib.__file__)


def _caller() -> tuple[str, str]:
    """The line outside PyTorch that made this call, and what it called there."""
    frame, entry = sys._getframe(1), ""
    while frame.f_code.co_filename.startswith(_INTERNAL):
        if frame.f_code.co_name != "wrapper":  # a decorator of torch.distributed
            entry = frame.f_code.co_name
        if frame.f_back is None:
            return "autograd thread", entry
        frame = frame.f_back
    path, function = frame.f_code.co_filename, frame.f_code.co_name
    # A notebook cell's file name holds a process id, so it would change each time.
    name = "cell" if "ipykernel" in path else os.path.basename(path)
    inside = "" if function == "<module>" else f" in {function}"
    return f"{name}:{frame.f_lineno}{inside}", entry


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
