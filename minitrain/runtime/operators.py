"""The program of a rank: what it computes, and where it starts and awaits messages.

A `Trace` holds it where the other ranks are not there (a fake group), or where asked.
An operator is noted with its name and the tensors that it reads and writes, so that
someone who knows hardware can price it later; here is nothing of hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = (
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "other",
)


class Piece(NamedTuple):
    """A tensor that an operator reads or writes.

    Attributes:
        storage: Number of the storage that it lies in, counted from the trace's begin.
        shape: Its shape.
        dtype: Such as `bfloat16`.
        nbytes: Its elements' bytes; where it is expanded, those that are there.
        held: Bytes of the storage.
        transposed: Whether its last two dims are swapped in memory.
    """

    storage: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    held: int
    transposed: bool


class Operator(NamedTuple):
    """A call of a kernel.

    Attributes:
        name: Of the operator, such as `aten::mm`.
        phase: `forward`; `backward`; `recompute` (forward again, in backward);
            `optimizer` (inside its step); `other`.
        reads: The tensors that go in.
        writes: The tensors that come out, or are changed in place.
        options: Its arguments that are no tensors, for attention.
    """

    name: str
    phase: str
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    options: tuple[Any, ...] = ()


class Start(NamedTuple):
    """A message is handed over; `message` is its place in the trace's list."""

    message: int


class Await(NamedTuple):
    """What follows needs the message."""

    message: int


class Free(NamedTuple):
    """Nothing refers to a storage any more."""

    storage: int


Entry = Operator | Start | Await | Free
"""One line of a program."""

Program = list[Entry]


def piece(tensor: Tensor, storage: int) -> Piece:
    """The tensor as data."""
    there = tensor.untyped_storage().nbytes()
    nbytes = min(tensor.numel() * tensor.element_size(), there)
    shape, stride = tuple(tensor.shape), tensor.stride()
    swapped = len(shape) > 1 and stride[-2] == 1 and shape[-1] > 1 and stride[-1] > 1
    return Piece(storage, shape, str(tensor.dtype)[6:], nbytes, there, swapped)


def plain(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """The numbers and flags among an operator's arguments."""
    return tuple(a for a in arguments if isinstance(a, (bool, int, float)))


# Operators that move no data, though they return a tensor that is new to Python.
IDLE = frozenset(
    {
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::set_",
    }
)
ATTENTION = "_scaled_dot_product"


def works(schema: Any) -> tuple[bool, tuple[int, ...]]:
    """Whether an operator moves data, and the places of arguments that it changes."""
    changed = tuple(
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    makes = any(
        r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns
    )
    data = schema.name.partition("::")[0] not in ("prim", "profiler")
    return data and (makes or bool(changed)) and schema.name not in IDLE, changed


def describe(
    name: str,
    phase: str,
    arguments: Sequence[Any],
    reads: Sequence[Piece],
    writes: Sequence[Piece],
) -> Operator:
    """The entry of one call."""
    options = plain(arguments) if ATTENTION in name else ()
    # What is changed in place is returned too.
    return Operator(name, phase, tuple(reads), tuple(dict.fromkeys(writes)), options)
