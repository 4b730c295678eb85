"""The one mode through which every operator passes while a trace runs.

It meets the tensors that go in and come out, and reads the communication; autograd,
the optimizers, `Work.wait` and storage resizing tell it what the dispatcher does not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from minitrain.runtime import memory
from minitrain.runtime import operators as program
from minitrain.runtime.memory import Change, Storages, local
from minitrain.runtime.messages import Message, flat, read_call
from minitrain.runtime.operators import Program


@contextlib.contextmanager
def record(rank: int, operators: bool = False) -> Iterator[Recorder]:
    """Record all that this thread, and the backward passes it starts, does.

    Args:
        rank: Global rank of this process.
        operators: Whether to keep the program too: operators, starts and waits.

    Raises:
        RuntimeError: If a recorder is already running in this process.
    """
    if hasattr(c10d.Work.wait, "recorder"):
        raise RuntimeError(
            "a trace is already running in this process: two would each miss what"
            " the other sees, so end the outer one first"
        )
    recorder = Recorder(rank, operators)
    with recorder, _patched(recorder), _hooked(recorder):
        yield recorder


_DEVICE = torch.ops.prim.device.default


class _Pending:
    """A call that was made, until we know when it was complete."""

    __slots__ = ("end", "message", "number", "waited", "work")

    def __init__(self, message: Message, number: int) -> None:
        self.message = message
        self.number = number
        self.end: float | None = None
        self.waited = 0.0
        self.work: c10d.Work | None = None

    def finish(self, trace_end: float) -> Message:
        """The message with its times; one still under way ends with the trace."""
        end = trace_end if self.end is None else self.end
        return replace(self.message, end_seconds=end, waited_seconds=self.waited)


class _Operator(NamedTuple):
    """What the recorder needs to know of an operator; worked out once for each."""

    name: str
    works: bool  # moves data
    changed: tuple[int, ...]  # places of the arguments that it writes to
    communicates: bool
    waits: bool
    makes: bool  # returns at least one new storage
    lifts: bool  # wraps data that was made just before, out of sight
    resizes: bool


def _describe(func: Any) -> _Operator:
    schema, name = func._schema, func._schema.name
    works, changed = program.works(schema)
    return _Operator(
        name=name,
        works=works,
        changed=changed,
        communicates=func.namespace in ("c10d", "_c10d_functional"),
        waits=name == "_c10d_functional::wait_tensor",
        makes=any(r.alias_info is None for r in schema.returns),
        lifts=name in ("aten::lift_fresh", "aten::lift"),
        resizes=schema.is_mutable
        and ("resize" in name or "set_" in name or "out" in func._overloadname),
    )


class Recorder(TorchDispatchMode):
    """The mode. Times are seconds since it was made."""

    def __init__(self, rank: int, operators: bool = False) -> None:
        super().__init__()
        self.rank = rank
        begin = time.perf_counter()
        self.now: Callable[[], float] = lambda: time.perf_counter() - begin
        self.program: Program | None = [] if operators else None
        self.storages = Storages(self.now, self._freed if operators else None)
        self.groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        # Of messages, by id of their Work, which is kept so that no other gets its id.
        self.unawaited: dict[int, tuple[int, c10d.Work]] = {}
        # A Work keeps its tensors alive until it is waited for; a fake one does not.
        self.kept: dict[int, list[Tensor]] = {}
        self.stepping = False
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
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for many times in each operator
        kwargs = kwargs or {}
        for cls in types:
            if self._wraps(cls):  # it comes back to us with its inner tensors
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
        found = not (operator.lifts or self.stepping)
        self._meet_arguments(args, backward, found=found)
        out = func(*args, **kwargs)
        if operator.makes:
            for tensor in flat(out):
                self.storages.see(tensor, found=False, forward=not backward)
        if operator.resizes:
            for tensor in flat((*args, *kwargs.values())):
                self.storages.resized(tensor.untyped_storage())
        if self.program is not None and operator.works:
            self._note(operator, args, kwargs, out, backward)
        return out

    def _wraps(self, cls: type) -> bool:
        """Whether a tensor class, such as `DTensor`, works on inner tensors."""
        wraps = self.wrappers.get(cls)
        if wraps is None:
            own = getattr(cls, "__torch_dispatch__", None)
            wraps = own not in (None, torch._C._disabled_torch_dispatch_impl)
            wraps = self.wrappers[cls] = wraps and not issubclass(cls, FakeTensor)
        return wraps

    # The program

    def _note(
        self, operator: _Operator, args: Any, kwargs: Any, out: Any, backward: bool
    ) -> None:
        """Append an operator to the program."""
        inputs = list(flat((*args, *kwargs.values())))
        if self.stepping:
            phase = program.OPTIMIZER
        elif backward:
            phase = program.BACKWARD
        elif torch._C._current_graph_task_id() != -1:
            phase = program.RECOMPUTE
        else:
            trains = any(t.requires_grad for t in inputs)
            phase = program.FORWARD if trains else program.OTHER
        changed = flat([args[i] for i in operator.changed if i < len(args)])
        outputs = [*flat(out), *changed]
        pieces = [[self._piece(t) for t in some] for some in (inputs, outputs)]
        entry = program.describe(operator.name, phase, args, *pieces)
        assert self.program is not None
        self.program.append(entry)

    def _piece(self, tensor: Tensor) -> program.Piece:
        return program.piece(tensor, self.storages.see(tensor).number)

    def _freed(self, storage: int) -> None:
        assert self.program is not None
        self.program.append(program.Free(storage))

    def _awaited(self, message: int) -> None:
        if self.program is not None:
            self.program.append(program.Await(message))

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
                    storage.kind = memory.ACTIVATIONS  # from forward, for backward
            elif isinstance(arg, (list, tuple)):
                self._meet_arguments(arg, backward, found)

    def _meet_parameters(self, args: Any) -> None:
        for tensor in flat(args):
            if isinstance(tensor, Parameter):
                self._meet_parameter(tensor)

    def _meet_parameter(self, parameter: Tensor) -> None:
        self.storages.see(local(parameter), memory.PARAMETERS)
        trains = parameter.requires_grad and parameter.is_leaf
        if trains and parameter not in self.hooks:
            self.hooks[parameter] = parameter.register_hook(self._meet_gradient)

    def _meet_gradient(self, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            self.storages.see(local(gradient), memory.GRADIENTS)

    def saved(self, tensor: Tensor) -> Tensor:
        """Pack hook of autograd: what is saved for backward is an activation."""
        if not self._wraps(type(tensor)):
            storage = self.storages.see(tensor)
            if not storage.found and storage.kind == memory.OTHER:
                storage.kind = memory.ACTIVATIONS
        # An output that its own graph keeps would never be freed: detach it.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Step hook: what an optimizer steps are parameters and gradients.

        Its state is met before the step as well. What is new within is new: a count of
        steps, made of a Python number, comes by unseen where tensors have no values.
        """
        self._meet_state(optimizer)
        self.stepping = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._meet_parameter(parameter)
                if parameter.grad is not None:
                    self._meet_gradient(parameter.grad)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Step hook: what an optimizer keeps is its state."""
        self.stepping = False
        self._meet_state(optimizer)

    def _meet_state(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for tensor in flat(list(state.values()) if isinstance(state, dict) else ()):
                self.storages.see(local(tensor), memory.STATE)

    def finished_memory(self) -> list[Change]:
        """All changes of the live bytes, after a last look at the gradients."""
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
                self._awaited(made.number)
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
            call = call._replace(group=self.groups.setdefault(call.group, call.group))
            message = call.message(self.rank, start, caller, async_)
            made = _Pending(message, len(self.pending))
            made.waited = returned - start
            self.pending.append(made)
            if self.program is not None:
                self.program.append(program.Start(made.number))
            self._follow(made, out, buffers)
        return out

    def _follow(self, made: _Pending, out: Any, buffers: list[Tensor]) -> None:
        """Learn when a call is complete: from its Work, or from `wait_tensor`."""
        last = out[-1] if isinstance(out, tuple) and out else out
        if isinstance(last, (Tensor, list)):
            for tensor in flat(last):
                self.promises[tensor.untyped_storage()._cdata] = made
        elif isinstance(last, torch.ScriptObject):
            work = made.work = c10d.Work.unbox(last)
            self.works[id(work)] = made
            if self.program is not None:
                self.unawaited[id(work)] = made.number, work
            if isinstance(work, c10d.FakeWork) and self.program is not None:
                self.kept[id(work)] = buffers
            with contextlib.suppress(RuntimeError):  # send and recv have no future
                work.get_future().add_done_callback(lambda _: self._complete(made))
        else:
            made.end = self.now()
            self._awaited(made.number)

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
        self.kept.pop(id(work), None)
        if known := self.unawaited.pop(id(work), None):
            self._awaited(known[0])
        out = wait(work, *args, **kw)
        if made is not None:
            made.waited += self.now() - start
            self._complete(made)
        return out

    def finished_messages(self) -> list[Message]:
        """All messages, in the order in which they were sent."""
        self.works.clear()
        self.kept.clear()
        self.unawaited.clear()
        end = self.now()
        return [made.finish(end) for made in self.pending]


@contextlib.contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """See what the dispatcher does not show: waits, and storages being resized."""
    resize = torch.UntypedStorage.resize_
    # A fake group's Work is a class of its own, with a wait of its own.
    waits = [(cls, cls.wait) for cls in (c10d.Work, c10d.FakeWork)]

    def traced_resize(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.storages.resized(storage)
        out = resize(storage, size)
        recorder.storages.resized(storage)
        return out

    for cls, wait in waits:
        cls.wait = _traced(wait, recorder)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = traced_resize  # type: ignore[assignment]
    try:
        yield
    finally:
        for cls, wait in waits:
            cls.wait = wait  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _traced(wait: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def traced_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.wait(wait, work, *args, **kwargs)

    traced_wait.recorder = recorder  # type: ignore[attr-defined]
    return traced_wait


@contextlib.contextmanager
def _hooked(recorder: Recorder) -> Iterator[None]:
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


_INTERNAL = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(os.path.dirname(__file__), ""),
    contextlib.__file__,
)


def _caller() -> tuple[str, str]:
    """The line outside PyTorch and this folder that made this call, and its name."""
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
