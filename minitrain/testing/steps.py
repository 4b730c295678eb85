"""The training steps that are compared: under a technique on one rank, and plain.

A technique replaces some of the four values of a step. `trained` puts its values into
the same few lines as everybody's; `oracle` is one process and torch alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minitrain.invariants import InvariantError, check_invariants
from minitrain.testing.problems import MakeOptimizer, Problem
from minitrain.workload.step import (
    IGNORED,
    Batch,
    Loss,
    LossFunction,
    Placement,
    TokenLoss,
    accumulate,
    count_tokens,
    finalize_gradients,
    placement,
)

Named = Mapping[str, Tensor]


class ForwardBackward(Protocol):
    """Runs the micro-batches; afterwards each `.grad` holds the sum over them."""

    def __call__(
        self, model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFunction
    ) -> Loss:
        """The loss of this rank's micro-batches."""


# ---- the plain parts of a step


def data_share(batch: Batch, mesh: DeviceMesh) -> Batch:
    """The sequences of `batch` for this rank: a run of them for each place on `dp`."""
    parts, place = mesh["dp"].size(), mesh.get_local_rank("dp")
    fields = (batch.tokens, batch.targets, batch.positions)
    return Batch(*(f.tensor_split(parts)[place] for f in fields))


def plain_optimizer(model: nn.Module, make: MakeOptimizer) -> torch.optim.Optimizer:
    """The problem's optimizer for the parameters that are trained."""
    return make([p for p in model.parameters() if p.requires_grad])


def whole(value: Tensor, where: Placement, mesh: DeviceMesh) -> Tensor:
    """The whole tensor of which `value` is this rank's shard, put together.

    Undoes the last split first: `sharded` lists its axes in the order of splitting.
    """
    for axis, dim in reversed(list(where.sharded.items())):
        if dim is not None:
            group = mesh.get_group(axis)
            shards: list[Tensor] = [torch.empty(0)] * group.size()
            dist.all_gather_object(shards, value, group)
            value = torch.cat([s.to(value.device) for s in shards], dim)
    return value


def whole_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
) -> Named:
    """Each parameter's gradient, whole, by each of its names, if it has one."""
    return {
        name: whole(p.grad.clone(), placement(p), mesh)
        for name, p in _parameters(model)
        if p.grad is not None
    }


def whole_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
) -> Named:
    """Each parameter, whole, by each of its names."""
    return {
        name: whole(p.detach().clone(), placement(p), mesh)
        for name, p in _parameters(model)
    }


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A tied weight has two names, and a pipeline stage may hold only the second."""
    return list(model.named_parameters(remove_duplicate=False))


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Parts:
    """The values of a step as a technique leaves them; what is not given is plain.

    Attributes:
        model: The module to train, its parameters' names those of the plain model. A
            parameter that only some ranks have is placed so (`sharded={axis: None}`).
        share: `share(batch, mesh)`: what this rank gets of the global batch.
        forward_backward: Its loss, summed over the data axes (`dp`, `cp`), is that of
            the global batch, on every rank. It calls `loss_fn(logits, batch)` with the
            micro-batches it was given, on a rank that computes logits.
        optimizer: `optimizer(model, make)`; `make(parameters)` is the plain optimizer.
        gradients: `gradients(model, optimizer, mesh)`: whole gradients by name, after
            `finalize_gradients`. By default those of the model's parameters, which
            are put together by their placements.
        weights: Likewise the whole weights, after `optimizer.step`.
        loss_fn: `loss_fn(plain)` is the loss that takes this model's logits, where a
            rank has only those of a part of the vocabulary.
        logits: Makes such logits whole, [batch, seq, vocab].
    """

    model: nn.Module
    share: Callable[[Batch, DeviceMesh], Batch] = data_share
    forward_backward: ForwardBackward = accumulate
    optimizer: Callable[[nn.Module, MakeOptimizer], torch.optim.Optimizer] = (
        plain_optimizer
    )
    gradients: Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh], Named] = (
        whole_gradients
    )
    weights: Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh], Named] = (
        whole_weights
    )
    loss_fn: Callable[[TokenLoss], LossFunction] = _same
    logits: Callable[[Tensor], Tensor] = _same


Technique = Callable[[nn.Module, DeviceMesh], nn.Module | Parts]
"""`technique(model, mesh)`: the model, changed, or several values of the step."""


# ---- what came of a step


@dataclass(frozen=True)
class Step:
    """What a rank, or the oracle, computed in one step.

    Attributes:
        loss: Of the micro-batches of this rank.
        outputs: Pairs of places [n] in the flattened global batch, and logits there
            [n, vocab].
        norm: Of all gradients, before they were clipped.
        gradients, weights, buffers: By name, whole; the last two after the step.
        elsewhere: Names that other ranks of an axis need not have.
        broken: What `check_invariants` said after the step.
    """

    loss: Loss
    outputs: list[tuple[Tensor, Tensor]]
    norm: Tensor
    gradients: Named
    weights: Named
    buffers: Named
    elsewhere: frozenset[str] = frozenset()
    broken: str = ""

    def cpu(self) -> "Step":
        """The same values in the host's memory."""

        def move(named: Named) -> Named:
            return {name: tensor.cpu() for name, tensor in named.items()}

        return replace(
            self,
            loss=Loss(self.loss.sum.cpu(), self.loss.tokens.cpu()),
            outputs=[(places.cpu(), logits.cpu()) for places, logits in self.outputs],
            norm=self.norm.cpu(),
            gradients=move(self.gradients),
            weights=move(self.weights),
            buffers=move(self.buffers),
        )


@dataclass
class Listener:
    """A loss function that remembers the logits it was given."""

    loss_fn: LossFunction
    heard: list[tuple[Tensor, Batch]] = field(default_factory=list)

    def __call__(self, logits: Tensor, batch: Batch) -> Loss:
        """The loss of `logits` [batch, seq, vocab]."""
        self.heard.append((logits.detach(), batch))
        return self.loss_fn(logits, batch)

    def objective(self, loss: Loss) -> Tensor:
        """The scalar that backward starts from."""
        return self.loss_fn.objective(loss)


def trained(
    technique: Technique, problem: Problem, mesh: DeviceMesh, seed: int
) -> list[Step]:
    """The steps of `problem` on this rank, under `technique`."""
    device = torch.device(mesh.device_type)
    parts = _parts(technique(problem.build(seed).to(device), mesh))
    model, steps = parts.model, []
    optimizer = parts.optimizer(model, problem.optimizer)
    for number in range(problem.steps):
        batch = problem.batch(number).to(device)
        micro_batches = problem.split(parts.share(batch, mesh))
        plain = TokenLoss(count_tokens(micro_batches, mesh))
        loss_fn = Listener(parts.loss_fn(plain))
        loss = parts.forward_backward(model, micro_batches, loss_fn)
        norm = finalize_gradients(optimizer, mesh, problem.max_norm)
        gradients = parts.gradients(model, optimizer, mesh)
        finite = bool(norm.isfinite())  # else the step is skipped, on all ranks
        if finite:
            optimizer.step()
        broken = _broken(model, mesh, optimizer) if finite else ""
        optimizer.zero_grad(set_to_none=problem.set_to_none)
        weights = parts.weights(model, optimizer, mesh)
        places = problem.split(parts.share(_places(batch), mesh))
        outputs = _outputs(loss_fn, micro_batches, places, parts.logits)
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        results = (loss, outputs, norm, gradients, weights, buffers)
        steps.append(Step(*results, _elsewhere(model), broken))
    return steps


def oracle(problem: Problem) -> list[Step]:
    """The same steps by one process, on the whole batch, with torch alone."""
    model, steps = problem.build(), []
    optimizer = plain_optimizer(model, problem.optimizer)
    limit = float("inf") if problem.max_norm is None else problem.max_norm
    for number in range(problem.steps):
        batch = problem.batch(number)
        logits = model(batch.tokens, batch.positions).flatten(0, 1)  # [tokens, vocab]
        targets = batch.targets.flatten()  # [tokens]
        total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        count = (targets != IGNORED).sum()
        (total / count.clamp(min=1)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        named = _parameters(model)
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        weights = {n: p.detach().clone() for n, p in named}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        outputs = [(torch.arange(len(logits)), logits.detach())]
        loss = Loss(total.detach(), count)
        steps.append(Step(loss, outputs, norm, gradients, weights, buffers))
    return steps


def _parts(made: object) -> Parts:
    if isinstance(made, Parts):
        return made
    if isinstance(made, nn.Module):
        return Parts(made)
    kind = type(made).__name__
    raise TypeError(f"a technique returns the model or Parts, and this one a {kind}")


def _places(batch: Batch) -> Batch:
    """A batch that holds, for each token, its place in the flattened batch."""
    places = torch.arange(batch.tokens.numel(), device=batch.tokens.device)
    places = places.view_as(batch.tokens)  # [batch, seq]
    return Batch(places, places, batch.positions)


def _outputs(
    loss_fn: Listener,
    micro_batches: Sequence[Batch],
    places: Sequence[Batch],
    make_whole: Callable[[Tensor], Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Logits and where they belong; of micro-batches that are known as such."""
    number = {id(batch): i for i, batch in enumerate(micro_batches)}
    return [
        (places[number[id(batch)]].tokens.flatten(), make_whole(logits).flatten(0, 1))
        for logits, batch in loss_fn.heard
        if id(batch) in number
    ]


def _broken(
    model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer
) -> str:
    try:
        check_invariants(model, mesh, optimizer)
    except InvariantError as error:
        return str(error)
    return ""


def _elsewhere(model: nn.Module) -> frozenset[str]:
    named = _parameters(model)
    return frozenset(n for n, p in named if None in placement(p).sharded.values())
