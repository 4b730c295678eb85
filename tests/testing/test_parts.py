"""The harness carries every kind of technique, each in its smallest form.

Optimizer state is sharded, then parameters, then layers, sequences and the vocabulary:
for each there is a right version that passes, and a wrong one that is named.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minitrain import Layout, launch
from minitrain.collectives import differentiable as d
from minitrain.testing import PROBLEMS, Parts, check_equal, whole
from minitrain.workload.step import (
    Batch,
    Loss,
    Placement,
    accumulate,
    placement,
)

FIVE = ("plain", "tied", "no tokens", "clipped", "adamw")


def problems(*names: str) -> list:
    return [PROBLEMS[name] for name in names]


def replicated(model: nn.Module, mesh: DeviceMesh, axis: str = "dp") -> nn.Module:
    group = mesh.get_group(axis)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    for parameter in model.parameters():
        there = placement(parameter)
        partial = there.partial | {axis}
        parameter.placement = replace(there, partial=partial)
    return model


# ---- the optimizer is replaced


def sharded_state(exchange: bool) -> Callable[[nn.Module, DeviceMesh], Parts]:
    """Each rank steps its own share of the parameters, and hands them out (ZeRO-1)."""

    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        group = mesh.get_group("dp")

        def optimizer(model, make):
            parameters = [p for p in model.parameters() if p.requires_grad]
            own = make(parameters[group.rank() :: group.size()])
            outer = torch.optim.SGD(parameters)

            def step() -> None:
                own.step()
                for i, parameter in enumerate(parameters if exchange else ()):
                    source = i % group.size()
                    dist.broadcast(parameter.detach(), group=group, group_src=source)

            outer.step = step
            return outer

        return Parts(replicated(model, mesh), optimizer=optimizer)

    return technique


def test_an_optimizer_that_shards_its_state() -> None:
    check_equal(sharded_state(exchange=True), 3, problems(*FIVE))
    with pytest.raises(AssertionError, match="step 0, rank 0 of 3: weight"):
        check_equal(sharded_state(exchange=False), 3)


# ---- parameters are sharded


def sharded_parameters(flaw: str = "") -> Callable[[nn.Module, DeviceMesh], Parts]:
    """Parameters lie in pieces along dim 0, and are whole in forward_backward."""

    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        group = mesh.get_group("dp")
        if flaw != "no broadcast":
            replicated(model, mesh)
        heights = {p: len(p) for p in model.parameters()}

        def piece(tensor: Tensor, height: int) -> Tensor:
            sizes = d.even_sizes(height, group.size())
            return tensor.detach().split(sizes)[group.rank()].clone()

        for parameter, height in heights.items():
            parameter.data = piece(parameter, height)
            where = {} if flaw == "unplaced" else {"dp": 0}
            parameter.placement = Placement(sharded=where)

        def forward_backward(model, micro_batches, loss_fn):
            for parameter, height in heights.items():
                sizes = d.even_sizes(height, group.size())
                parameter.data = d.all_gather(parameter.detach(), group, sizes=sizes)
            loss = accumulate(model, micro_batches, loss_fn)
            for parameter, height in heights.items():
                gradient = parameter.grad
                parameter.grad = None
                parameter.data = piece(parameter, height)
                if gradient is not None:
                    if flaw != "own gradient":
                        dist.all_reduce(gradient, group=group)
                    parameter.grad = piece(gradient, height)
            return loss

        return Parts(model, forward_backward=forward_backward)

    return technique


def test_parameters_that_are_sharded() -> None:
    some = problems("tied", "no tokens", "clipped", "empty parameters")
    check_equal(sharded_parameters(), 3, some)
    check_equal(sharded_parameters(), 1, PROBLEMS["tied"])
    whole_everywhere = sharded_parameters("no broadcast")
    check_equal(whole_everywhere, 2, broadcasts=())
    with pytest.raises(AssertionError, match="step 0, rank 0 of 2: outputs: differs"):
        check_equal(whole_everywhere, 2)
    with pytest.raises(AssertionError, match="rank 0 of 2: gradient"):
        check_equal(sharded_parameters("own gradient"), 2)
    with pytest.raises(AssertionError, match=r"gradient .*\[19, 12\], expected"):
        check_equal(sharded_parameters("unplaced"), 2)


# ---- layers are spread over the ranks


def staged(flaw: str = "") -> Callable[[nn.Module, DeviceMesh], Parts]:
    """Two stages of a pipeline, one micro-batch after the other."""

    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        stage, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
        hidden = len(model.norm.weight)
        model.blocks[1 - stage] = None
        if stage:
            model.embed = None
        else:
            model.head = model.norm = None
        if flaw == "lost":
            model.norm = None
        for parameter in model.parameters():
            parameter.placement = Placement(sharded={"pp": None})

        def one(model, batch, loss_fn) -> Loss:
            if stage == 0:
                out = model(batch.tokens, batch.positions)
                dist.isend(out.detach(), group=group, group_dst=1).wait()
                dist.recv(gradient := torch.empty_like(out), group=group, group_src=1)
                out.backward(gradient)
                zero = out.detach().new_zeros(())
                return Loss(zero, zero.long())
            size = (*batch.tokens.shape, hidden)
            x = torch.empty(size, dtype=torch.float64)
            dist.recv(x, group=group, group_src=0)
            loss = loss_fn(model(x.requires_grad_(), batch.positions), batch)
            loss_fn.objective(loss).backward()
            dist.isend(x.grad, group=group, group_dst=0).wait()
            return loss.detach()

        def forward_backward(model, micro_batches, loss_fn):
            losses = [one(model, batch, loss_fn) for batch in micro_batches]
            if flaw == "no gradient" and stage:
                model.norm.weight.grad = None
            total = torch.stack([loss.sum for loss in losses]).sum()
            tokens = torch.stack([loss.tokens for loss in losses]).sum()
            if flaw != "silent stage":
                dist.broadcast(total, group=group, group_src=1)
                dist.broadcast(tokens, group=group, group_src=1)
            return Loss(total, tokens)

        return Parts(model, forward_backward=forward_backward)

    return technique


def test_stages_that_hold_different_layers() -> None:
    layout = Layout(pp=2)
    some = [PROBLEMS["plain"], replace(PROBLEMS["clipped"], micro_batches=3)]
    check_equal(staged(), 2, some, layout=layout)
    with pytest.raises(AssertionError, match="rank 0 of 2: the loss counts 0 tokens"):
        check_equal(staged("silent stage"), 2, layout=layout)
    with pytest.raises(AssertionError, match=r"outputs|norm\.weight is missing"):
        check_equal(staged("lost"), 2, layout=layout)
    with pytest.raises(AssertionError, match=r"gradient norm\.weight is on no rank"):
        check_equal(staged("no gradient"), 2, layout=layout)


# ---- sequences are spread over the ranks


def striped(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Every N-th position: the model of these tests mixes no positions."""
    step, start = mesh["cp"].size(), mesh.get_local_rank("cp")
    fields = (batch.tokens, batch.targets, batch.positions)
    return Batch(*(f[:, start::step].contiguous() for f in fields))


def over_sequences(reduced: bool) -> Callable[[nn.Module, DeviceMesh], Parts]:
    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        if reduced:
            replicated(model, mesh, "cp")
        return Parts(model, share=striped)

    return technique


def test_a_batch_that_is_split_along_the_sequence() -> None:
    layout = Layout(cp=3)
    check_equal(over_sequences(True), 3, PROBLEMS["buffers"], layout=layout)
    with pytest.raises(AssertionError, match="gradient"):
        check_equal(over_sequences(False), 3, PROBLEMS["buffers"], layout=layout)


# ---- the vocabulary is spread over the ranks, with replicas of each part


class VocabularyLoss:
    """Cross-entropy of logits of which each rank has a part of the vocabulary."""

    def __init__(self, plain, group, sizes) -> None:
        self.plain, self.group, self.sizes = plain, group, sizes

    def __call__(self, logits: Tensor, batch: Batch) -> Loss:
        return self.plain(d.gather(logits, self.group, -1, self.sizes), batch)

    def objective(self, loss: Loss) -> Tensor:
        return self.plain.objective(loss)


def over_vocabulary(copied: bool) -> Callable[[nn.Module, DeviceMesh], Parts]:
    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        group, head = mesh.get_group("tp"), model.head
        sizes = d.even_sizes(head.out_features, group.size())
        for parameter in head.parameters():
            parameter.data = parameter.data.split(sizes)[group.rank()].clone()
            parameter.placement = Placement(sharded={"tp": 0})
        replicated(model, mesh)

        def part_of_logits(x: Tensor) -> Tensor:
            x = d.copy(x, group) if copied else x
            return F.linear(x, head.weight, head.bias)

        head.forward = part_of_logits
        return Parts(
            model,
            loss_fn=lambda plain: VocabularyLoss(plain, group, sizes),
            logits=lambda part: d.gather(part, group, -1, sizes),
        )

    return technique


@pytest.mark.parametrize("layout", [Layout(tp=3), Layout(dp=2, tp=2)], ids=str)
def test_a_vocabulary_that_is_sharded(layout: Layout) -> None:
    ranks, problem = layout.world_size, PROBLEMS["buffers"]
    check_equal(over_vocabulary(True), ranks, problem, layout=layout)
    with pytest.raises(AssertionError, match=r"gradient embed\.weight: differs"):
        check_equal(over_vocabulary(False), ranks, problem, layout=layout)


def test_a_tensor_split_twice_is_put_together_last_split_first() -> None:
    first = torch.arange(21.0).view(7, 3)

    def run() -> tuple[Tensor, Tensor]:
        mesh = Layout(dp=2, tp=2).mesh()
        tp, dp = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
        rows = first.tensor_split(2)[tp].tensor_split(2)[dp]
        both = first.tensor_split(2)[dp].tensor_split(2, 1)[tp]
        by_rows = Placement(sharded={"tp": 0, "dp": 0})
        by_both = Placement(sharded={"dp": 0, "tp": 1})
        return whole(rows, by_rows, mesh), whole(both, by_both, mesh)

    for tensors in launch(run, 4):
        assert all(torch.equal(tensor, first) for tensor in tensors)
