"""Replicas: the same model on every rank of a group, made equal once."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitrain.runtime.values import gather_objects
from minitrain.workload.step import Placement, placement


def replicate(
    model: nn.Module, group: dist.ProcessGroup | None = None, axis: str = "dp"
) -> nn.Module:
    """The plainest data parallelism: equal replicas, gradients summed over `axis`.

    Parameters and buffers become those of the group's first rank. The sum itself is
    `finalize_gradients`'s, after backward, parameter by parameter.

    Args:
        model: the same on every rank, up to the values; each rank passes its own.
        group: the ranks that hold other data; by default all.
        axis: the mesh axis that the group stands for.

    Returns:
        The same module.

    Raises:
        ValueError: this rank is not in the group, the ranks have different models, or
            a parameter is sharded over the axis.
    """
    make_equal(model, members(group), axis)
    for parameter in model.parameters():
        here = placement(parameter)
        _place(parameter, Placement(here.sharded, here.partial | {axis}))
    return model


def members(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all ranks.

    Raises:
        ValueError: there is none, or this rank does not belong to it.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group: call minitrain.runtime.init first")
    chosen = dist.group.WORLD if group is None else group
    if chosen is None or dist.get_rank(chosen) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group; only its ranks call this"
        )
    return chosen


def check_own(model: nn.Module) -> None:
    """Refuses a model that sums its gradients already.

    Raises:
        ValueError: it does.
    """
    if any(hasattr(part, "set_requires_gradient_sync") for part in model.modules()):
        raise ValueError(
            "this model, or a part of it, synchronizes its gradients already"
        )


def complete(model: nn.Module, axis: str) -> None:
    """Notes that the gradients' sum over `axis` is done elsewhere, during backward."""
    for parameter in model.parameters():
        here = placement(parameter)
        _place(parameter, Placement(here.sharded, here.partial - {axis}))


def _place(parameter: Tensor, where: Placement) -> None:
    parameter.placement = where  # type: ignore[attr-defined]


def make_equal(model: nn.Module, group: dist.ProcessGroup, axis: str) -> None:
    """Gives every rank the parameters and buffers of the group's first rank.

    Raises:
        ValueError: on every rank, if the models differ in more than their values: a
            message of another size than expected would end the process.
    """
    _check_alike(model, group)
    for name, parameter in model.named_parameters():
        if axis in placement(parameter).sharded:
            raise ValueError(
                f"{name} is sharded over {axis!r}: its ranks hold no replicas of it"
            )
    held = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in held:
        if any(
            n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"{name} is expanded, so its elements share memory; clone() it first"
            )
    for _, tensor in held:
        copy_from_first(tensor, group)


@torch.no_grad()
def copy_from_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrites `tensor` with that of the group's first rank.

    Through a contiguous copy where it is not: gloo sends the memory from the first
    element on, whatever the strides.
    """
    if not tensor.numel():
        return
    held = tensor.detach()
    message = held.contiguous()  # itself, if it is
    dist.broadcast(message, group_src=0, group=group)
    if message is not held:
        tensor.copy_(message)


def _check_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    mine = [
        f"{name} {str(t.dtype)[6:]} {list(t.shape)}" + " frozen" * (not t.requires_grad)
        for name, t in named
    ]
    every = gather_objects(mine, group)
    ranks, first = dist.get_process_group_ranks(group), every[0]
    for rank, theirs in zip(ranks, every, strict=True):
        if theirs is not first and theirs != first:
            here = [text for text in theirs if text not in first][:3] or "another order"
            there = [text for text in first if text not in theirs][:3] or "the same"
            raise ValueError(
                f"rank {rank} has another model than rank {ranks[0]}: {here} in place "
                f"of {there}"
            )
