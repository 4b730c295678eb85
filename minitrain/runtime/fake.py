"""One rank of a world that is not there: a fake group, and tensors without values.

The group is torch's own for such purposes: it has any size, a collective on it returns
at once, and nothing is sent. The tensors are on the device "cpu" and take the paths of
that device, but hold no memory: a model of any size fits.
"""

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _DispatchCacheKey,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.utils._pytree import tree_map

PLAIN = frozenset(
    {
        bool,
        int,
        float,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
"""Kinds of arguments that stand for themselves."""
MESH_METHODS = (
    "__init__",
    "__getitem__",
    "__repr__",
    "_flatten",
    "_unflatten",
    "get_group",
)


class NoValueError(RuntimeError):
    """A program looked at a number of a tensor that has none."""


def join(rank: int, world_size: int) -> None:
    """Become `rank` of a fake world, with it as the default group.

    For good: this process can be nothing else afterwards.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _let_meshes_read()
    nn.Module._apply = _convert  # type: ignore[method-assign]


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], *_: Any) -> nn.Module:
    """`to` and its like put new tensors in place; what is tied stays tied.

    torch cannot change these in place, as it does others; so their attributes go along.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old one too, to keep its id
    for one in module.modules():
        tables: tuple[dict[str, Any], ...] = (one._parameters, one._buffers)
        for held in tables:
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in made:
                    made[id(old)] = old, _converted(old, fn)
                held[name] = made[id(old)][1]
    return module


def _converted(old: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        new = fn(old)
    if new is old or not isinstance(old, nn.Parameter):
        return new
    new = nn.Parameter(new, old.requires_grad)
    if old.grad is not None:
        new.grad = fn(old.grad)
    for name in old.__dict__.keys() - new.__dict__.keys():
        setattr(new, name, getattr(old, name))
    return new


def _let_meshes_read() -> None:
    """A mesh reads the ranks in it, so its own tensors keep their values."""
    for name in MESH_METHODS:
        method = _with_values(getattr(device_mesh.DeviceMesh, name))
        setattr(device_mesh.DeviceMesh, name, method)
    make = _with_values(device_mesh.init_device_mesh)
    for module in (device_mesh, torch.distributed, torch.distributed.tensor):
        module.init_device_mesh = make  # type: ignore[attr-defined]


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def player(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, run on tensors without values.

    Tensors and modules among its arguments lose their values before it runs.
    """

    def play(*arguments: Any) -> Any:
        gc.freeze()  # what is loaded stays, and need not be looked through again
        # A tensor that came along in some other way is taken as if it had no values.
        with Tensors(allow_non_fake_inputs=True) as mode:
            arguments = tree_map(lambda a: _without_values(a, mode), arguments)
            try:
                return function(*arguments)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise NoValueError(
                    f"{error} asks for a value, and tensors have none here; where a "
                    "number decides, say which with minitrain.runtime.read(tensor, "
                    "expected=...)"
                ) from error

    return play


class Tensors(FakeTensorMode):
    """torch's mode, which finds what it knows of an operator in half the time.

    It keeps what an operator has returned for inputs of some shapes; to look there,
    torch describes each input in full. Here is what a strided tensor on the CPU needs.
    """

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        values = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        named = (*kwargs, *kwargs.values()) if kwargs else ()
        if self._describe(args, values) and self._describe(named, values):
            return _DispatchCacheKey(tuple(values))
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, args: Any, values: list[Any]) -> bool:
        """Append what tells arguments apart; False if one is of an unusual kind."""
        for a in args:
            kind = type(a)
            values.append(kind)  # 1 and True are equal
            if kind is FakeTensor:
                own = a.fake_mode is self and a.constant is None
                if not own or a.layout is not torch.strided:
                    return False
                nbytes = a.untyped_storage().nbytes()
                values += (a.dtype, a.shape, a.stride(), a.storage_offset(), nbytes)
                values += (a.fake_device, a.requires_grad, a.is_conj(), a.is_neg())
            elif kind is list or kind is tuple:
                values.append(len(a))
                if not self._describe(a, values):
                    return False
            elif kind in PLAIN:
                values.append(a)
            else:
                return False
        return True


def _without_values(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, nn.Module):
        for module in value.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = _fake(tensor, mode)
        return value
    return _fake(value, mode) if isinstance(value, Tensor) else value


def _fake(tensor: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(tensor)  # remembers it: tied weights stay tied
