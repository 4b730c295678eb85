"""Collectives that gradients flow through: each is the backward of another.

A collective is a linear map, and its backward is the transposed map, which is again a
collective. Which one, depends on what follows: whether the ranks go on with the same
computation, so that each already has the whole gradient, or with different parts of
it, whose gradients are yet to be summed.

    function        forward             backward            what follows
    copy            nothing             all-reduce          differs from rank to rank
    all_reduce      all-reduce          nothing             is the same on all ranks
    all_gather      all-gather          reduce-scatter      differs
    gather          all-gather          keep own part       is the same
    reduce_scatter  reduce-scatter      all-gather          own part of what is split
    scatter         keep own part       all-gather          own part of what is split
    all_to_all      all-to-all          all-to-all back     own part of what is split

Where what comes before `scatter` or `copy` is computed by every rank alike, every rank
gets its whole gradient. `copy` and `all_reduce` are f and g of Megatron-LM (Shoeybi et
al. 2019, arXiv:1909.08053, section 3); `all_gather` and `reduce_scatter` are in
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2. Sums are made in the dtype of
the tensor.

All use torch's own collectives. Every rank of the group calls the same function with
tensors that fit together, and runs its backward too: what it returns enters every
rank's loss, if only times zero. Sizes that do not divide are given, the same on every
rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.runtime.values import read


@dataclass(frozen=True)
class _Split:
    """How a tensor is split over a group.

    Attributes:
        group: The ranks.
        dim: The dim that is split, 0 or more.
        sizes: Each rank's length of it.
        to_dim: Where an all-to-all joins what it receives.
        received: Lengths along `to_dim` of what arrives from each rank.
    """

    group: dist.ProcessGroup
    dim: int = 0
    sizes: tuple[int, ...] = ()
    to_dim: int = 0
    received: tuple[int, ...] = ()


# ---- the maps, without autograd


def _keep(x: Tensor, split: _Split) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, split: _Split) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=split.group)
    return total


def _own_part(x: Tensor, split: _Split) -> Tensor:
    part = x.split(split.sizes, split.dim)[split.group.rank()]
    return part.clone(memory_format=torch.contiguous_format)


def _join(x: Tensor, split: _Split) -> Tensor:
    """All ranks' parts, side by side; unequal ones travel padded to the longest."""
    longest = max(split.sizes)
    part = _padded(x.movedim(split.dim, 0), longest)  # [longest, ...]
    parts = part.new_empty(len(split.sizes) * longest, *part.shape[1:])
    if parts.numel():
        dist.all_gather_single(parts, part, group=split.group)
    if len(set(split.sizes)) > 1:
        pairs = zip(parts.split(longest), split.sizes, strict=True)
        parts = torch.cat([part[:size] for part, size in pairs])
    return parts.movedim(0, split.dim).contiguous()


def _sum_own_part(x: Tensor, split: _Split) -> Tensor:
    """The sum over the ranks of this rank's part; unequal parts are padded."""
    longest, own = max(split.sizes), split.sizes[split.group.rank()]
    whole = x.movedim(split.dim, 0)  # [sum of sizes, ...]
    if len(set(split.sizes)) > 1:
        parts = whole.split(split.sizes)
        whole = torch.cat([_padded(part, longest) for part in parts])
    part = whole.new_empty(longest, *whole.shape[1:])
    if part.numel():
        dist.reduce_scatter_single(part, whole.contiguous(), group=split.group)
    return part[:own].movedim(0, split.dim).contiguous()


def _padded(part: Tensor, length: int) -> Tensor:
    """`part`, contiguous and zero from its end to `length` along dim 0."""
    if len(part) == length:
        return part.contiguous()
    padded = part.new_zeros(length, *part.shape[1:])
    padded[: len(part)] = part
    return padded


def _exchange(x: Tensor, split: _Split) -> Tensor:
    """Part i goes to rank i; what arrives is joined along `to_dim`."""
    parts = x.split(split.sizes, split.dim)
    shape = list(parts[split.group.rank()].shape)
    shapes = []
    for length in split.received:
        shape[split.to_dim] = length
        shapes.append(tuple(shape))
    arriving = [torch.Size(s).numel() for s in shapes]
    sent = torch.cat([part.flatten() for part in parts])
    got = x.new_empty(sum(arriving))
    leaving = [part.numel() for part in parts]
    dist.all_to_all_single(got, sent, arriving, leaving, group=split.group)
    pieces = zip(got.split(arriving), shapes, strict=True)
    return torch.cat([piece.view(shape) for piece, shape in pieces], split.to_dim)


def _exchange_back(x: Tensor, split: _Split) -> Tensor:
    back = replace(
        split,
        dim=split.to_dim,
        to_dim=split.dim,
        sizes=split.received,
        received=split.sizes,
    )
    return _exchange(x, back)


# ---- the pairs

Map = Callable[[Tensor, _Split], Tensor]

PAIRS: Mapping[str, tuple[Map, Map]] = MappingProxyType(
    {
        "copy": (_keep, _sum),
        "all_reduce": (_sum, _keep),
        "all_gather": (_join, _sum_own_part),
        "gather": (_join, _own_part),
        "reduce_scatter": (_sum_own_part, _join),
        "scatter": (_own_part, _join),
        "all_to_all": (_exchange, _exchange_back),
    }
)
"""Forward and backward of each function."""


class _Pair(torch.autograd.Function):
    """A map whose backward is another, and whose backward's backward is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: _Split, there: Map, back: Map) -> Tensor:
        ctx.split, ctx.there, ctx.back = split, there, back
        return there(x, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Pair.apply(gradient, ctx.split, ctx.back, ctx.there), None, None, None


def copy(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`x` itself, the same on every rank; its gradient is summed over the ranks.

    For a value that all ranks have, where each goes on to another part of the model.
    """
    return _Pair.apply(x, _Split(_group(group)), *PAIRS["copy"])


def all_reduce(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of `x` over the ranks, as a new tensor; the gradient passes unchanged.

    For partial sums, after which every rank goes on with the same computation. Where
    the ranks then add different terms to one loss, write `copy(all_reduce(x))`.
    """
    return _Pair.apply(x, _Split(_group(group)), *PAIRS["all_reduce"])


def all_gather(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """All ranks' `x`, joined along `dim`; gradients are summed, each part at its rank.

    For parts of which every rank goes on to use the whole in a different computation
    (a weight that is split and multiplies different data). See `gather`.

    Args:
        x: this rank's part.
        dim: where to join; counted from the end if negative.
        sizes: each rank's length along `dim`, the same list on every rank; zero is
            allowed. Default: all have this one's.

    Raises:
        ValueError: there is no such dim, or `sizes` is not of this group and part.
    """
    return _Pair.apply(x, _split_of_part(x, group, dim, sizes), *PAIRS["all_gather"])


def gather(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """All ranks' `x`, joined along `dim`; of the gradient each rank keeps its part.

    For parts after which every rank goes on with the same computation on the whole.
    Arguments and errors are those of `all_gather`.
    """
    return _Pair.apply(x, _split_of_part(x, group, dim, sizes), *PAIRS["gather"])


def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of the sum of `x` over the ranks; gradients are gathered.

    For partial sums after which every rank goes on with its own part.

    Args:
        x: a term of the whole sum.
        dim: along which the sum is split; counted from the end if negative.
        sizes: each rank's length along `dim`, the same list on every rank; zero is
            allowed. Default: equal ones.

    Raises:
        ValueError: there is no such dim, `sizes` do not add up to its length, or they
            are not given and the length does not divide by the number of ranks.
    """
    split = _split_of_whole(x, group, dim, sizes)
    return _Pair.apply(x, split, *PAIRS["reduce_scatter"])


def scatter(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of `x`, which is the same on every rank; gradients are gathered.

    For a value that every rank has computed alike, and of which each goes on with its
    part. Nothing is sent in forward. Arguments and errors are `reduce_scatter`'s.
    """
    return _Pair.apply(x, _split_of_whole(x, group, dim, sizes), *PAIRS["scatter"])


def all_to_all(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 0,
    to_dim: int | None = None,
    sizes: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Splits `x` along `dim`, sends part i to rank i, and joins what arrives.

    With `to_dim` another dim, a tensor that was split along it becomes one that is
    split along `dim` (Ulysses: from sequence to heads). Gradients go back the way.

    Args:
        x: this rank's tensor.
        dim: along which it is split; counted from the end if negative.
        to_dim: along which the received parts are joined; by default `dim`.
        sizes: lengths of the parts along `dim`, zero allowed; by default equal ones.
            If `to_dim` is another dim, the same list on every rank.
        received: lengths along `to_dim` of what arrives from each rank. By default,
            where `sizes` differ from rank to rank (`to_dim` is `dim`, `sizes` are
            given), they are asked for, which is one small message more, and a wait;
            elsewhere all ranks send what this one does.

    Raises:
        ValueError: there is no such dim, `sizes` do not add up to its length, or a list
            is not of the length of the group.
    """
    split = _split_of_whole(x, group, dim, sizes)
    to_dim = split.dim if to_dim is None else _dim(x, to_dim)
    ranks = split.group.size()
    if received is not None:
        arriving = _checked(received, ranks, "received")
    elif to_dim != split.dim:
        arriving = (x.shape[to_dim],) * ranks
    elif sizes is None:
        arriving = split.sizes
    else:
        arriving = _exchanged(split, x.device)
    split = replace(split, to_dim=to_dim, received=arriving)
    return _Pair.apply(x, split, *PAIRS["all_to_all"])


def even_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Lengths that add up to `length` and differ by at most one, longer ones first.

    Those of `torch.tensor_split`.
    """
    return tuple(length // ranks + (i < length % ranks) for i in range(ranks))


# ---- checks


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no process group; call minitrain.runtime.init first")
    return found


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim} of a tensor of shape {list(x.shape)}")
    return dim % x.ndim


def _checked(sizes: Sequence[int], ranks: int, name: str) -> tuple[int, ...]:
    if len(sizes) != ranks or any(size < 0 for size in sizes):
        raise ValueError(
            f"{name}={list(sizes)}: a group of {ranks} ranks takes {ranks} lengths, "
            "each zero or more"
        )
    return tuple(sizes)


def _split_of_part(
    x: Tensor, group: dist.ProcessGroup | None, dim: int, sizes: Sequence[int] | None
) -> _Split:
    """The split of which `x` is this rank's part."""
    group, dim = _group(group), _dim(x, dim)
    own, ranks, rank = x.shape[dim], group.size(), group.rank()
    checked = _checked([own] * ranks if sizes is None else sizes, ranks, "sizes")
    if checked[rank] != own:
        raise ValueError(
            f"sizes={list(checked)} says {checked[rank]} for place {rank} in the "
            f"group, whose tensor {list(x.shape)} has {own} along dim {dim}"
        )
    return _Split(group, dim, checked)


def _split_of_whole(
    x: Tensor, group: dist.ProcessGroup | None, dim: int, sizes: Sequence[int] | None
) -> _Split:
    """The split of `x` itself."""
    group, dim = _group(group), _dim(x, dim)
    length, ranks = x.shape[dim], group.size()
    if sizes is None and length % ranks:
        raise ValueError(
            f"dim {dim} has length {length}, which {ranks} ranks do not divide; give "
            f"sizes, such as {list(even_sizes(length, ranks))}"
        )
    equal = [length // ranks] * ranks
    checked = _checked(equal if sizes is None else sizes, ranks, "sizes")
    if sum(checked) != length:
        raise ValueError(
            f"sizes={list(checked)} add up to {sum(checked)}, but dim {dim} of "
            f"{list(x.shape)} has length {length}"
        )
    return _Split(group, dim, checked)


def _exchanged(split: _Split, device: torch.device) -> tuple[int, ...]:
    """What the other ranks send to this one."""
    sent = torch.tensor(split.sizes, device=device)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=split.group)
    expected = zip(got, split.sizes, strict=True)
    return tuple(int(read(length, expected=own)) for length, own in expected)
