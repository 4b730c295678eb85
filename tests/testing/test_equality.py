"""The harness must say no to whatever is wrong, and yes to what is right.

Each wrong technique is a fault that somebody's code really had, or nearly.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from minitrain import Layout, RankError, StallError
from minitrain.testing import PROBLEMS, Parts, Report, check_equal
from minitrain.testing.steps import oracle
from minitrain.workload.step import (
    Batch,
    Loss,
    Placement,
    TokenLoss,
    accumulate,
    count_tokens,
)

Reduce = Callable[[nn.Module, dist.ProcessGroup], None]


def broadcast(model: nn.Module, group: dist.ProcessGroup, buffers: bool = True) -> None:
    tensors = [*model.parameters(), *(model.buffers() if buffers else ())]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def reducing(reduce: Reduce, copies: bool = True, buffers: bool = True):
    """The technique that calls `reduce(model, group)` after the last backward."""

    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        group = mesh.get_group("dp")
        if copies:
            broadcast(model, group, buffers)

        def forward_backward(model, micro_batches, loss_fn):
            loss = accumulate(model, micro_batches, loss_fn)
            reduce(model, group)
            return loss

        return Parts(model, forward_backward=forward_backward)

    return technique


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)


# ---- right


def finalized(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Nothing but placements: `finalize_gradients` has the sum to do."""
    broadcast(model, mesh.get_group("dp"))
    for parameter in model.parameters():
        parameter.placement = Placement(partial=frozenset({"dp"}))
    return model


def torch_ddp(model: nn.Module, mesh: DeviceMesh) -> Parts:
    """Torch averages what was already divided by the global count: times N."""
    group = mesh.get_group("dp")
    replica = DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True
    )

    def forward_backward(_, micro_batches, loss_fn):
        loss = accumulate(replica, micro_batches, loss_fn)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= group.size()
        return loss

    return Parts(model, forward_backward=forward_backward)


@pytest.mark.parametrize("ranks", [2, 3])
def test_right_implementations_pass_every_problem(ranks: int) -> None:
    right = reducing(sum_gradients) if ranks == 3 else finalized
    report = check_equal(right, ranks, PROBLEMS.values())
    assert report.problems == tuple(PROBLEMS)
    assert report.errors["gradient"] < 1e-5
    assert 0 < report.errors["loss"] < 1e-5
    assert report.errors["buffer"] == 0


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_other_numbers_of_ranks(ranks: int) -> None:
    names = ("few sequences", "branches", "buffers")
    check_equal(finalized, ranks, [PROBLEMS[n] for n in names])


def test_a_technique_may_come_from_a_notebook_cell() -> None:
    cell = """
from minitrain.workload.step import Placement

def technique(model, mesh):
    for parameter in model.parameters():
        parameter.placement = Placement(partial=frozenset({"dp"}))
    return model
"""
    namespace: dict = {"__name__": "__main__"}
    exec(cell, namespace)
    check_equal(namespace["technique"], 2, broadcasts=())


def test_torch_ddp_passes_with_the_right_scale() -> None:
    names = ("plain", "tied", "frozen", "unused", "no tokens", "adamw", "buffers")
    check_equal(torch_ddp, 2, [PROBLEMS[n] for n in names])


def test_a_step_that_is_not_finite_is_skipped_by_all() -> None:
    problem = PROBLEMS["overflow"]
    assert [bool(step.norm.isfinite()) for step in oracle(problem)] == [0, 0, 1]
    for ranks in (1, 2, 3, 4):
        check_equal(finalized, ranks, problem)
    with pytest.raises(AssertionError, match="an inf or a NaN got lost"):
        check_equal(reducing(without_nan), 3, problem)


def without_nan(model: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.nan_to_num(parameter.grad)
    sum_gradients(model, group)


# ---- wrong, with all of the model on each rank


def summed_twice(model: nn.Module, group: dist.ProcessGroup) -> None:
    sum_gradients(model, group)
    sum_gradients(model, group)


def averaged_twice(model: nn.Module, group: dist.ProcessGroup) -> None:
    sum_gradients(model, group)
    for parameter in model.parameters():
        parameter.grad /= group.size()  # the loss was divided by all tokens already


def one_left_out(model: nn.Module, group: dist.ProcessGroup) -> None:
    if dist.get_rank() == group.size() - 1:
        for parameter in model.parameters():
            parameter.grad.zero_()
    sum_gradients(model, group)


def parameters_reduced(model: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in model.parameters():  # what a hook gets is not the gradient
        dist.all_reduce(parameter.detach(), group=group)


def wrong_on_rank_2(model: nn.Module, group: dist.ProcessGroup) -> None:
    sum_gradients(model, group)
    if dist.get_rank() == 2:
        next(model.parameters()).grad *= 1.001


def off_by_one_bit(model: nn.Module, group: dist.ProcessGroup) -> None:
    sum_gradients(model, group)
    if dist.get_rank() == 1:
        last = list(model.parameters())[-1].grad.view(-1)
        last[-1] = last[-1].nextafter(torch.tensor(1.0, dtype=last.dtype))


def once_per_use(model: nn.Module, group: dist.ProcessGroup) -> None:
    for _, parameter in model.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad, group=group)


def in_half_the_width(model: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in model.parameters():
        narrow = parameter.grad.float()
        dist.all_reduce(narrow, group=group)
        parameter.grad.copy_(narrow)


def clipped_alone(model: nn.Module, group: dist.ProcessGroup) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    sum_gradients(model, group)


def one_forgotten(model: nn.Module, group: dist.ProcessGroup) -> None:
    sum_gradients(model, group)
    model.norm.weight.grad = None


class Stale:
    """A bucket that still holds what the last step left in it."""

    def __init__(self) -> None:
        self.last: list[Tensor] = []

    def __call__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        sum_gradients(model, group)
        now = [p.grad.clone() for p in model.parameters()]
        for parameter, old in zip(model.parameters(), self.last or now, strict=True):
            parameter.grad.copy_(old)
        self.last = now


def replicas(forward_backward=accumulate, **parts):
    """Right data parallelism around a replaced part."""

    def technique(model: nn.Module, mesh: DeviceMesh) -> Parts:
        finalized(model, mesh)
        given = {"forward_backward": forward_backward, **parts}
        return Parts(model, **given)

    return technique


def mean_of_means(model: nn.Module, mesh: DeviceMesh) -> Parts:
    group = mesh.get_group("dp")
    broadcast(model, group)

    def forward_backward(model, micro_batches, loss_fn):
        loss_fn.loss_fn = TokenLoss(count_tokens(micro_batches))  # those here
        loss = accumulate(model, micro_batches, loss_fn)
        averaged_twice(model, group)
        return loss

    return Parts(model, forward_backward=forward_backward)


def every_micro_batch(model: nn.Module, mesh: DeviceMesh) -> Parts:
    group = mesh.get_group("dp")
    broadcast(model, group)

    def forward_backward(model, micro_batches, loss_fn):
        total = Loss(torch.zeros(()), torch.tensor(0))
        for micro_batch in micro_batches:
            total = total + accumulate(model, [micro_batch], loss_fn)
            sum_gradients(model, group)  # of this micro-batch and those before
        return total

    return Parts(model, forward_backward=forward_backward)


def overwritten(model, micro_batches, loss_fn):
    total = Loss(torch.zeros(()), torch.tensor(0))
    for micro_batch in micro_batches:
        model.zero_grad(set_to_none=True)
        total = total + accumulate(model, [micro_batch], loss_fn)
    return total


def doubled_loss(model, micro_batches, loss_fn):
    loss = accumulate(model, micro_batches, loss_fn)
    return Loss(loss.sum * 2, loss.tokens)


def counted_all(model, micro_batches, loss_fn):
    loss = accumulate(model, micro_batches, loss_fn)
    return Loss(loss.sum, torch.tensor(sum(b.targets.numel() for b in micro_batches)))


def copied_batches(model, micro_batches, loss_fn):
    return accumulate(model, [replace(b) for b in micro_batches], loss_fn)


def same_data(batch: Batch, mesh: DeviceMesh) -> Batch:
    return Batch(batch.tokens[:4], batch.targets[:4], batch.positions[:4])


def without_the_last(model, make):
    return make(list(model.parameters())[:-1])


def with_another_rate(model, make):
    optimizer = make(list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] *= 1 + 1e-6
    return optimizer


def never_zeroed(model, make):
    optimizer = make(list(model.parameters()))
    optimizer.zero_grad = lambda set_to_none: None
    return optimizer


def other_state_on_rank_1(model, make):
    """Nothing of it shows before the next step."""
    optimizer = make(list(model.parameters()))

    def spoil(optimizer, *_):
        if dist.get_rank() == 1:
            optimizer.state[model.norm.weight]["exp_avg"] *= 2

    optimizer.register_step_post_hook(spoil)
    return optimizer


def shifted_logits(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The loss and every gradient are blind to it."""
    model.head.register_forward_hook(lambda module, x, logits: logits + 1.0)
    return finalized(model, mesh)


def drifting_buffer(model, micro_batches, loss_fn):
    loss = accumulate(model, micro_batches, loss_fn)
    model.scale += 1e-6
    return loss


def counted_as_shards(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    finalized(model, mesh)
    for parameter in model.parameters():
        parameter.placement = Placement({"dp": None}, frozenset({"dp"}))
    return model


def thawed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return finalized(model.requires_grad_(True), mesh)


def renamed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    finalized(model, mesh)
    model.module, model.head = model.head, None
    model.register_forward_hook(lambda _, x, hidden: model.module(hidden))
    return model


WRONG = {
    "summed twice": (reducing(summed_twice), 3, "plain", "it is 3 times"),
    "averaged twice": (reducing(averaged_twice), 4, "plain", "it is 0.25 times"),
    "averaged, adamw": (reducing(averaged_twice), 2, "adamw", "gradient .* 0.5 times"),
    "one rank left out": (reducing(one_left_out), 3, "plain", "gradient"),
    "stale bucket": (reducing(Stale()), 2, "plain", "step 1, rank 0 of 2: gradient"),
    "parameters reduced": (reducing(parameters_reduced), 2, "plain", "gradient"),
    "wrong on rank 2": (
        reducing(wrong_on_rank_2),
        4,
        "plain",
        "rank 2 of 4: gradient .* 1.001 times[^(]*$",
    ),
    "forgotten": (reducing(one_forgotten), 2, "plain", "gradient norm.* is missing"),
    "a bit off": (
        reducing(off_by_one_bit),
        2,
        "plain",
        "step 0, rank 1 of 2: gradient .* not that of rank 0, bit by bit",
    ),
    "tied twice": (reducing(once_per_use), 2, "tied", "gradient embed.tokens.weight"),
    "float32 in float64": (reducing(in_half_the_width), 2, "plain", "gradient"),
    "clipped alone": (reducing(clipped_alone), 2, "clipped", "gradient"),
    "no broadcast": (
        reducing(sum_gradients, copies=False),
        3,
        "plain",
        r"step 0, rank 1 of 3: outputs: .*\(and on rank 2\)",
    ),
    "no buffers": (
        reducing(sum_gradients, buffers=False),
        2,
        "buffers",
        "step 0, rank 1 of 2: outputs",
    ),
    "no reduction": (reducing(lambda *_: None), 2, "plain", "gradient"),
    "mean of means": (mean_of_means, 2, "plain", "gradient"),
    "every micro-batch": (every_micro_batch, 2, "micro-batches", "gradient"),
    "overwritten": (replicas(overwritten), 1, "micro-batches", "gradient"),
    "loss": (replicas(doubled_loss), 2, "plain", "loss: differs"),
    "count": (replicas(counted_all), 2, "plain", "loss counts 77 tokens, expected"),
    "buffer": (replicas(drifting_buffer), 2, "buffers", "step 0.*: buffer scale: d"),
    "copied": (replicas(copied_batches), 1, "plain", "77 of 77 tokens have no logits"),
    "same data": (
        replicas(share=same_data),
        2,
        "plain",
        "tokens have no logits on any",
    ),
    "norm": (counted_as_shards, 2, "plain", r"gradient norm: differs.*and on rank 1"),
    "a weight left": (
        replicas(optimizer=without_the_last),
        2,
        "plain",
        "head.weight",
    ),
    "rate": (replicas(optimizer=with_another_rate), 2, "plain", "step 0.*: weight"),
    "state": (
        replicas(optimizer=other_state_on_rank_1),
        2,
        "adamw",
        "step 0, .*state norm.weight:exp_avg: replicas along dp differ",
    ),
    "not zeroed": (replicas(optimizer=never_zeroed), 2, "plain", "step 1.*gradient"),
    "shifted logits": (shifted_logits, 2, "plain", "outputs: differs"),
    "thawed": (thawed, 2, "frozen", "gradient embed.tokens.weight: .*expected 0"),
    "renamed": (renamed, 2, "plain", "gradient module.weight: the plain model has"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_implementation_is_caught(name: str) -> None:
    technique, ranks, problem, message = WRONG[name]
    with pytest.raises(AssertionError, match=f"(?s)^problem '{problem}', .*{message}"):
        check_equal(technique, ranks, PROBLEMS[problem])


# ---- what is no difference


def test_a_hang_and_an_exception_are_named() -> None:
    def waiting(model: nn.Module, group: dist.ProcessGroup) -> None:
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), group=group, group_src=0)

    with pytest.raises(StallError, match="rank 1"):
        check_equal(reducing(waiting), 2, timeout=1.0)

    def forgotten(model: nn.Module, mesh: DeviceMesh) -> None:
        finalized(model, mesh)

    with pytest.raises(RankError, match=r"returns the model or Parts, .* a NoneType"):
        check_equal(forgotten, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs 3 ranks, and there are 2"):
        check_equal(finalized, 2, layout=Layout(dp=3))
    with pytest.raises(ValueError, match=r"'rows'.*: the axes are pp, dp, cp, tp"):
        check_equal(finalized, 2, broadcasts=("rows", "dp"))


def test_the_report_is_plain_data_and_a_table() -> None:
    report = check_equal(finalized, 2, PROBLEMS["empty parameters"])
    assert isinstance(report, Report)
    assert (report.ranks, report.problems) == (2, ("empty parameters",))
    assert report.tensors > 3 * 8
    assert set(report.errors) == {
        "loss",
        "outputs",
        "gradient",
        "gradient norm",
        "weight",
    }
    assert "relative error" in repr(report)
    assert report.table().rows[0][0] == "outputs"


def test_the_tolerance_is_the_callers() -> None:
    narrow = reducing(in_half_the_width)
    check_equal(narrow, 2, tol=1e-5)
    with pytest.raises(AssertionError, match="exceeds 1e-08"):
        check_equal(narrow, 2, tol=1e-8)
