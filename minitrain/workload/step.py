"""The values of a training step, in their plain forms.

    loss_fn = TokenLoss(count_tokens(micro_batches, mesh))
    loss = accumulate(model, micro_batches, loss_fn)
    norm = finalize_gradients(optimizer, mesh, max_norm)
    optimizer.step()

A loss is a sum and a count. The count of the whole global batch is known before the
first backward, and the sum is divided by it there, once: no mean of means appears,
however the tokens fall on micro-batches and ranks. What a gradient still lacks after
backward is written on its parameter, as a `Placement`, and one function adds it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minitrain.runtime import read

IGNORED = -100  # a target that is not counted, F.cross_entropy's own default


@dataclass(frozen=True)
class Batch:
    """Sequences to learn from; every field holds integers, [batch, seq].

    `targets[b, s]` is the token that follows `tokens[b, s]`, or `IGNORED`;
    `positions[b, s]` is the token's place in its sequence, whichever rank holds it.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor

    @classmethod
    def from_sequences(cls, sequences: Tensor) -> "Batch":
        """Inputs and shifted targets of `sequences` [batch, seq + 1]."""
        tokens, targets = sequences[:, :-1], sequences[:, 1:]  # [batch, seq]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return cls(tokens, targets, positions.expand_as(tokens))

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        fields = (self.tokens, self.targets, self.positions)
        return Batch(*(f.to(device, non_blocking=True) for f in fields))

    def split(self, parts: int) -> list["Batch"]:
        """`parts` micro-batches that differ by at most one sequence.

        Raises:
            ValueError: there are fewer sequences than parts.
        """
        if not 1 <= parts <= len(self.tokens):
            raise ValueError(
                f"cannot split {len(self.tokens)} sequences into {parts} micro-batches"
            )
        fields = (self.tokens, self.targets, self.positions)
        pieces = zip(*(f.tensor_split(parts) for f in fields), strict=True)
        return [Batch(*piece) for piece in pieces]


@dataclass(frozen=True)
class Loss:
    """A sum of token losses (nats, float32 or wider) and the number of tokens in it."""

    sum: Tensor
    tokens: Tensor

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.sum + other.sum, self.tokens + other.tokens)

    def detach(self) -> "Loss":
        """The same numbers without the graph behind them."""
        return Loss(self.sum.detach(), self.tokens)

    @property
    def mean(self) -> Tensor:
        """Nats per token; zero where there is no token."""
        return self.sum / self.tokens.clamp(min=1)


class LossFunction(Protocol):
    """What `forward_backward` needs of a loss: its value, and what to differentiate."""

    def __call__(self, logits: Tensor, batch: Batch) -> Loss:
        """The loss of `logits` [batch, seq, vocab]."""

    def objective(self, loss: Loss) -> Tensor:
        """The scalar that backward starts from."""


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy of the next token, differentiated as sum / `divisor`.

    Args:
        divisor: valid tokens of the whole global batch, over all ranks and
            micro-batches (`count_tokens`). A batch without any gives zero gradients.
    """

    divisor: int

    def __call__(self, logits: Tensor, batch: Batch) -> Loss:
        """The loss of `logits` [batch, seq, vocab], summed in float32 or wider."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = batch.targets.flatten()  # [batch * seq]
        total = F.cross_entropy(
            wide.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"
        )
        return Loss(total, (targets != IGNORED).sum())

    def objective(self, loss: Loss) -> Tensor:
        """Divided before backward, so that gradients in fp16 stay in range."""
        return loss.sum / max(self.divisor, 1)


def accumulate(
    model: nn.Module, micro_batches: Iterable[Batch], loss_fn: LossFunction
) -> Loss:
    """The plain `forward_backward`: one micro-batch after the other.

    Each parameter's `.grad` grows by the gradient of the objective, summed over the
    micro-batches. Returns this rank's loss, detached.

    A model that reduces its gradients itself does so once, in the last backward: if it
    has `set_requires_gradient_sync(flag)` (FSDP2's name), it is told before each
    forward whether this micro-batch is the last one.

    Raises:
        ValueError: there is no micro-batch.
    """
    synchronize = getattr(model, "set_requires_gradient_sync", lambda flag: None)
    batches, total = iter(micro_batches), None
    following = next(batches, None)
    if following is None:
        raise ValueError("a step needs at least one micro-batch")
    try:
        while following is not None:
            batch, following = following, next(batches, None)
            synchronize(following is None)
            loss = loss_fn(model(batch.tokens, batch.positions), batch)
            loss_fn.objective(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
    finally:
        synchronize(True)  # also where a micro-batch failed
    assert total is not None
    return total


def count_tokens(micro_batches: Sequence[Batch], mesh: DeviceMesh | None = None) -> int:
    """Valid tokens of the global batch: here, and on all ranks that hold other data.

    The axes that hold other data are `dp`, `cp`, and their parts (`dp_outer`, ...).
    """
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch")
    count = torch.stack([(b.targets != IGNORED).sum() for b in micro_batches]).sum()
    most = sum(b.targets.numel() for b in micro_batches)
    for axis in _axes(mesh):
        if axis.split("_")[0] in ("dp", "cp"):
            group = _group(mesh, axis)
            dist.all_reduce(count, group=group)
            most *= group.size()
    return int(read(count, expected=most))


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies on the mesh, and what its gradient still lacks.

    Attributes:
        sharded: for each mesh axis the tensor is split over, the dim; None where the
            ranks of the axis hold different whole tensors (pipeline stages, experts).
            Over any other axis the parameter is replicated.
        partial: the axes over which `.grad` is still a partial sum.
    """

    sharded: Mapping[str, int | None] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()


def placement(parameter: Tensor) -> Placement:
    """The parameter's placement; replicated and complete if nobody set one."""
    return getattr(parameter, "placement", Placement())


def finalize_gradients(
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh | None = None,
    max_norm: float | None = None,
) -> Tensor:
    """Completes, measures and clips the gradients of the optimizer's parameters.

    In this order: (1) each gradient is summed over its partial axes, in float32 or
    wider, parameter by parameter; (2) the norm over the whole model, in which shards
    are summed over their axes and a replicated parameter counts once; (3) if the norm
    exceeds `max_norm`, all gradients are scaled to it; where it is not finite they stay
    as they are, so that one can see which of them is to blame.

    Every rank makes the same calls: a parameter that got no gradient here takes part
    with zeros, since another rank may have one. A gradient that is not finite on any
    rank makes the norm not finite on every rank, so all can skip the step together.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        ValueError: a placement names an axis that the mesh does not have.
    """
    parameters = list(_parameters(optimizer))
    for parameter in parameters:
        missing = placement(parameter).partial
        if missing and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        for axis in sorted(missing) if parameter.numel() else ():
            _sum_gradient(parameter, _group(mesh, axis))
    norm = gradient_norm(parameters, mesh)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))
        for grad in (p.grad for p in parameters if p.grad is not None):
            grad.mul_(scale.to(grad.dtype))
    return norm


def gradient_norm(parameters: Sequence[Tensor], mesh: DeviceMesh | None) -> Tensor:
    """The 2-norm of all gradients together, as if one process held the model.

    Squares are summed in one slot for each set of axes that a parameter may be sharded
    over, then each axis, from the innermost, sums the slots of the sets it is in. The
    slots depend on the mesh alone and stages are the outermost axis, so stages whose
    parameters are sharded differently still agree on every call.
    """
    axes = _axes(mesh)
    wide = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    device = parameters[0].device if parameters else None
    squares = torch.zeros(2 ** len(axes), dtype=wide, device=device)  # [sets of axes]
    used: set[str] = set()
    for parameter in parameters:
        sharded = placement(parameter).sharded
        used.update(sharded)
        if parameter.grad is not None:
            slot = sum(1 << _index(mesh, axis) for axis in sharded)
            squares[slot] += parameter.grad.to(wide).square().sum()
    slots = torch.arange(len(squares), device=device)
    for i, axis in reversed(list(enumerate(axes))):
        if axis in used:
            inside = (slots >> i) % 2 == 1
            part = squares[inside]
            dist.all_reduce(part, group=_group(mesh, axis))
            squares[inside] = part
    return squares.sum().sqrt()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """The optimizer's trainable parameters, each once, in their order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield parameter


def _sum_gradient(parameter: Tensor, group: dist.ProcessGroup) -> None:
    grad = parameter.grad
    assert grad is not None
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
    dist.all_reduce(wide, group=group)
    if wide is not grad:
        grad.copy_(wide)


def _axes(mesh: DeviceMesh | None) -> tuple[str, ...]:
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())


def _index(mesh: DeviceMesh | None, axis: str) -> int:
    axes = _axes(mesh)
    if axis not in axes:
        raise ValueError(
            f"a parameter is placed over axis {axis!r}, but the mesh has "
            f"{', '.join(axes) or 'no axes'}; pass the mesh the model was made for"
        )
    return axes.index(axis)


def _group(mesh: DeviceMesh | None, axis: str) -> dist.ProcessGroup:
    index = _index(mesh, axis)
    assert mesh is not None
    return mesh.get_group(index)
