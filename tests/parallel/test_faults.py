"""What users do to a data-parallel model, and what must come of it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitrain import launch
from minitrain.parallel.data import ddp, horovod
from minitrain.testing import same_bits

TECHNIQUES = [ddp, horovod]


class Bomb(torch.autograd.Function):
    """Goes off in backward, if it is armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.armed:
            raise ValueError("bomb")
        return gradient, None


class Net(nn.Module):
    """Two layers, a buffer, and a bomb between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("kept", torch.ones(5))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Bomb.apply(self.first(x), self.armed))


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3) * (dist.get_rank() + 1)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_backward_that_failed_on_one_rank_is_no_step_for_any(technique: Any) -> None:
    def run() -> tuple[list[str], Tensor]:
        model = technique(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = []
        for step in range(4):
            model.armed = step == 1 and dist.get_rank() == 1
            optimizer.zero_grad()
            try:
                model(inputs()).square().sum().backward()
            except ValueError:
                told.append("failed")
                continue
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            told.append("stepped" if norm.isfinite() else "skipped")
            if norm.isfinite():
                optimizer.step()
        return told, torch.cat([p.detach().flatten() for p in model.parameters()])

    results = launch(run, 3, timeout=8.0)
    for rank, (told, weights) in enumerate(results):
        missed = "failed" if rank == 1 else "skipped"
        assert told == ["stepped", missed, "stepped", "stepped"]
        assert same_bits(weights, results[0][1])


class Scale(nn.Module):
    """Two parameters, of which one may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return x * self.v + (x * self.u if use else 0)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_two_models_in_one_backward(technique: Any) -> None:
    def run() -> list[Tensor]:
        first, second = technique(Scale()), technique(Scale())
        output = second(first(torch.ones(4)), use=dist.get_rank() == 1)
        output.sum().backward()
        parameters = [*first.parameters(), *second.parameters()]
        return [p.grad.clone() for p in parameters]

    def alone() -> list[Tensor]:
        total = [torch.zeros(4) for _ in range(4)]
        for rank in range(2):
            first, second = Scale(), Scale()
            second(first(torch.ones(4)), use=rank == 1).sum().backward()
            for sum_, p in zip(
                total, [*first.parameters(), *second.parameters()], strict=True
            ):
                sum_ += 0 if p.grad is None else p.grad
        return total

    for grads in launch(run, 2, timeout=8.0):
        assert all(map(torch.equal, grads, alone()))


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_model_whose_outputs_are_out_of_sight_trains(technique: Any) -> None:
    def run() -> list[float]:
        model = technique(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):  # by its parts: the model itself is never called
            loss = model.second(model.first(inputs())).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in launch(run, 2, timeout=8.0):
        assert losses[0] > losses[1] > losses[2]


def replaced(model: Any) -> None:
    model.second = nn.Linear(4, 2)


def added(model: Any) -> None:
    model.third = nn.Parameter(torch.ones(2))


def narrowed(model: Any) -> None:
    model.to(torch.float64)


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced, "added or replaced"),
        (added, "added or replaced"),
        (narrowed, "another dtype or device"),
    ],
)
def test_a_change_after_the_fact_is_refused(
    technique: Any, change: Callable[[Any], None], words: str
) -> None:
    def run() -> str:
        model = technique(Net())
        change(model)
        x = inputs().to(next(model.parameters()).dtype)
        with pytest.raises(RuntimeError, match=words):
            model(x).sum().backward()
        return "refused"

    assert launch(run, 2, timeout=8.0) == ["refused"] * 2


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_part_that_synchronizes_and_a_copy_are_refused(technique: Any) -> None:
    def run() -> str:
        model = Net()
        technique(model.first)
        with pytest.raises(ValueError, match="or a part of it"):
            technique(model)
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(model)
        return "refused"

    assert launch(run, 2, timeout=8.0) == ["refused"] * 2


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_sparse_gradient_is_refused(technique: Any) -> None:
    def run() -> str:
        model = technique(nn.Embedding(5, 3, sparse=True))
        with pytest.raises(RuntimeError, match="sparse=False"):
            model(torch.tensor([1])).sum().backward()
        return "refused"

    assert launch(run, 2, timeout=8.0) == ["refused"] * 2
