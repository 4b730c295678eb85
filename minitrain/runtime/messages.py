"""What one rank says to the others: a record of each call, and its bytes on the wire.

PyTorch has many spellings of the same few collectives (`allgather_`,
`_allgather_base_`, `all_gather_into_tensor`, coalesced, functional...). Here each
spelling is reduced to an operator, a buffer and the piece of it that belongs to
each rank; from these the bytes follow, whatever the spelling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
    """One collective or point-to-point call, as one rank made it.

    Times are seconds since the trace began, by the host's clock: with NCCL a call
    ends for the host when it is enqueued.

    Attributes:
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`,
            `reduce`, `gather`, `scatter`, `send`, `recv` or `barrier`.
        kind: `collective` or `p2p`.
        group: Global ranks of the group, in group order.
        dtype: Element type, such as `bfloat16`.
        shapes: Shapes of the tensors in the call that hold the buffer.
        payload_bytes: Size of the buffer: the tensor that is sent, broadcast or
            reduced; the whole that is gathered, scattered or reduce-scattered; what
            this rank hands in to an all-to-all. (The S of nccl-tests.)
        wire_bytes: Bytes that this rank sends. Summed over the ranks it is the
            traffic of the call; a `recv` has none.
        wire: `counted` where the call itself says what is sent (send and recv);
            `modelled` where `wire_bytes` is the ring algorithm's.
        start_seconds: When the call was made.
        end_seconds: When it was complete; the end of the trace if it never was.
        waited_seconds: How long the caller was blocked in the call and its waits.
        caller: Line outside PyTorch that made the call, as `file:line in function`.
        peer: Global rank at the other end, or the root of a rooted collective.
        async_: Whether the call returned before it was complete.
    """

    op: str
    kind: Literal["collective", "p2p"]
    group: tuple[int, ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    payload_bytes: int
    wire_bytes: int
    wire: Literal["counted", "modelled"]
    start_seconds: float
    end_seconds: float
    waited_seconds: float
    caller: str
    peer: int | None
    async_: bool


class Call(NamedTuple):
    """A call as the dispatcher shows it, before it is made.

    Attributes:
        op: Operator, as in `Message`.
        group: Global ranks of the group.
        tensors: The tensors that make up the buffer.
        copies: How often they do; n where only one rank's piece is at hand.
        pieces: Elements of the buffer that belong to each rank, for the operators
            that divide it.
        root: Position in the group of the root, the receiver or the sender.
        async_op: What the caller asked for, or None where the call does not say.
    """

    op: str
    group: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    copies: int
    pieces: tuple[int, ...]
    root: int | None
    async_op: bool | None

    def message(self, rank: int, start: float, caller: str, async_: bool) -> Message:
        """The record of the call, made by global rank `rank`, without its tensors."""
        elements = self.copies * sum(map(Tensor.numel, self.tensors))
        element_bytes = self.tensors[0].element_size() if self.tensors else 0
        pieces = self.pieces or even(elements, self.group)
        position = self.group.index(rank)
        sent = sent_elements(self.op, pieces, position, self.root or 0)
        p2p = self.op in ("send", "recv")
        return Message(
            op=self.op,
            kind="p2p" if p2p else "collective",
            group=self.group,
            dtype=str(self.tensors[0].dtype)[len("torch.") :] if self.tensors else "",
            shapes=tuple(tuple(t.shape) for t in self.tensors),
            payload_bytes=elements * element_bytes,
            wire_bytes=sent * element_bytes,
            wire="counted" if p2p else "modelled",
            start_seconds=start,
            end_seconds=start,
            waited_seconds=0.0,
            caller=caller,
            peer=None if self.root is None else self.group[self.root],
            async_=async_,
        )


def even(elements: int, group: Sequence[int]) -> tuple[int, ...]:
    """Divide `elements` over the ranks of `group`, the first ones getting one more."""
    each, rest = divmod(elements, len(group))
    return tuple(each + (position < rest) for position in range(len(group)))


def sent_elements(op: str, pieces: Sequence[int], position: int, root: int = 0) -> int:
    """Elements that one rank of a ring sends, of a buffer divided into `pieces`.

    In a ring each rank sends to the next. A reduced piece ends its way at its
    owner, who never sends it; a gathered piece starts at its owner, so the rank
    before the owner never sends that one. An all-reduce is the one after the other
    (Patarasuk and Yuan, 2009): 2 (n - 1) / n of the buffer. Broadcast and reduce
    pass the buffer along the chain that starts, or ends, at the root. All-to-all,
    gather and scatter send each piece straight to its owner.

    Args:
        op: Operator, as in `Message`.
        pieces: Elements that belong to each rank, in group order.
        position: Place of the sending rank in the group.
        root: Place of the root in the group.

    Returns:
        The number of elements sent; 0 in a group of one.
    """
    ranks, total = len(pieces), sum(pieces)
    if ranks == 1 and op not in ("send", "recv"):
        return 0
    mine, next_one = pieces[position], pieces[(position + 1) % ranks]
    match op:
        case "all_reduce":
            return (total - mine) + (total - next_one)
        case "all_gather":
            return total - next_one
        case "reduce_scatter" | "all_to_all":
            return total - mine
        case "broadcast":
            return total if (position - root) % ranks < ranks - 1 else 0
        case "reduce":
            return total if position != root else 0
        case "gather":
            return mine if position != root else 0
        case "scatter":
            return total - mine if position == root else 0
        case "send":
            return total
        case "recv" | "barrier":
            return 0
    raise ValueError(f"no wire model for the operator {op!r}")


# Operator and the argument that holds its buffer, for every spelling. A star marks
# a buffer of which the argument is only this rank's piece.
SPELLINGS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "*input_tensors"),
    "c10d::scatter_": ("scatter", "*output_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
    "c10d::barrier": ("barrier", ""),
    "c10d::monitored_barrier_": ("barrier", ""),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "*input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "*input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "*inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_c10d_functional::irecv": ("recv", "tensor"),
}


def read_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Call] | None:
    """Read an operator of the dispatcher as communication.

    Args:
        func: The operator, an `OpOverload`.
        args: Its positional arguments.
        kwargs: Its named arguments.

    Returns:
        The calls it makes (a batch of point-to-point calls makes several), or None
        if it is not a communication that we know, such as `wait_tensor`.
    """
    name = func._schema.name
    given = {a.name: a.default_value for a in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    if name == "_c10d_functional::batch_p2p_ops":
        return list(_batch(given))
    if name not in SPELLINGS:
        return None
    op, buffer = SPELLINGS[name]
    group = group_ranks(given.get("process_group", given.get("group_name")))
    tensors = tuple(flat(given[buffer.strip("*")])) if buffer else ()
    return [
        Call(
            op=op,
            group=group,
            tensors=tensors,
            copies=len(group) if buffer.startswith("*") else 1,
            pieces=_pieces(name, given),
            root=_root(given),
            async_op=given.get("async_op"),
        )
    ]


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, given boxed, unboxed or by its name."""
    if isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of the dispatcher: a tensor, or lists of lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)


def _root(given: dict[str, Any]) -> int | None:
    for name in ("root_rank", "src", "dst"):
        if name in given:
            return int(given[name])
    return None


def _pieces(name: str, given: dict[str, Any]) -> tuple[int, ...]:
    """Elements of each rank's piece, where the call lists them; else ()."""
    match name.partition("::")[2]:
        case "allgather_":
            lists = given["output_tensors"][0]
        case "allgather_coalesced_":
            lists = given["output_lists"]
        case "reduce_scatter_":
            lists = given["input_tensors"][0]
        case "alltoall_":
            lists = given["input_tensors"]
        case "alltoall_base_" | "all_to_all_single" if given["input_split_sizes"]:
            rows = given["input_split_sizes"]
            row = given["input"].numel() // max(sum(rows), 1)
            return tuple(row * count for count in rows)
        case _:
            return ()
    return tuple(sum(map(Tensor.numel, flat(item))) for item in lists)


def _batch(given: dict[str, Any]) -> Iterator[Call]:
    group = group_ranks(given["group_name"])
    names, peers = given["op_list"], given["peer_list"]
    for name, peer, tensor in zip(names, peers, given["tensors"], strict=True):
        yield Call(name.lstrip("i"), group, (tensor,), 1, (), peer, True)
