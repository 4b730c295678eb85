"""Negotiation, fusion and the background ring."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minitrain import RankError, StallError, collectives, launch, trace
from minitrain.parallel.data import horovod
from minitrain.parallel.data.negotiation import Coordinator, fuse
from minitrain.testing import PROBLEMS, assert_all_close, check_equal, gradients
from minitrain.workload.step import placement


def data(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(3, 3, generator=generator, dtype=torch.float64)


class Branches(nn.Module):
    """Layers that do not depend on each other, called in an order of the rank's own."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 4 + i) for i in range(4)).double()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(())
        for i in self.order:
            out = out + (i + 1) * self.parts[i](x).square().sum()
        return out


def test_what_is_ready_everywhere_is_scheduled_once() -> None:
    coordinator = Coordinator(ranks=3, tensors=4)

    def hear(*reports: list[int]) -> list[int]:
        return coordinator.hear([torch.tensor(report) for report in reports])

    assert hear([1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]) == []
    assert hear([0, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 1]) == [0, 3]
    assert hear([0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0]) == [1]
    assert hear([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]) == [2]
    assert hear([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]) == []


def test_small_tensors_are_fused() -> None:
    def sizes(*elements: int) -> list[Tensor]:
        return [torch.zeros(n, dtype=torch.float64) for n in elements]

    assert fuse(sizes(*[5] * 12), 4 * 40) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert fuse(sizes(1, 90, 1, 1), 40) == [[0], [1], [2, 3]]
    assert fuse(sizes(5, 0, 1), 40) == [[0, 1], [2]]
    mixed = [torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(1)]
    assert fuse(mixed, 1000) == [[0], [1], [2]]
    assert fuse([], 1000) == []


def often(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return horovod(model, mesh.get_group("dp"), fusion_bytes=1000, cycle_seconds=0.0)


def seldom(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return horovod(model, mesh.get_group("dp"), cycle_seconds=0.01)


@pytest.mark.parametrize(
    ("technique", "ranks"), [(often, 1), (often, 2), (often, 3), (seldom, 4)]
)
def test_equals_one_device(technique: Any, ranks: int) -> None:
    names = ("branches", "no tokens", "micro-batches", "buffers", "gradients kept")
    more = ("tied", "frozen", "unused", "empty parameters")
    check_equal(technique, ranks, [PROBLEMS[name] for name in (*names, *more)])


@pytest.mark.parametrize("fusion_bytes", [1, 10**6])
def test_ranks_may_get_gradients_in_different_orders(fusion_bytes: int) -> None:
    def run() -> tuple[Any, ...]:
        rank = dist.get_rank()
        order = [[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]][rank]
        model, oracle = Branches(order), Branches([0, 1, 2, 3])
        for other in range(3):
            oracle(data(other)).backward()
        horovod(model, fusion_bytes=fusion_bytes)
        for _ in range(2):
            model.zero_grad()
            with trace() as t:
                model(data(rank)).backward()
        assert not any(placement(p).partial for p in model.parameters())
        sends = [m for m in t.messages if m.op == "send"]
        return gradients(model), gradients(oracle), sends

    results = launch(run, 3, timeout=10.0)
    bytes_of_all = sum(g.numel() * 8 for g in results[0][1].values())
    for rank, (grads, oracle, sends) in enumerate(results):
        assert_all_close(grads, oracle)
        assert_all_close(grads, results[0][0], tol=0.0)
        assert {m.peer for m in sends} == {(rank + 1) % 3}  # a ring has one neighbour
        assert {m.wire for m in sends} == {"counted"}
        rings = len(sends) / 4  # of 2 (N - 1) messages
        assert rings == 8 if fusion_bytes == 1 else 1 <= rings <= 8
    sent = sum(m.wire_bytes for _, _, sends in results for m in sends)
    assert sent == 2 * (3 - 1) * bytes_of_all


def test_a_rank_that_never_reports_is_named() -> None:
    def run() -> None:
        model = horovod(Branches([0, 1, 2, 3]))
        if dist.get_rank() != 1:
            model(data(0)).backward()

    with pytest.raises(StallError, match="rank 1: has finished") as caught:
        launch(run, 3, timeout=1.0)
    assert "rank 0: waits 1 s in gather" in str(caught.value)


def test_what_the_thread_meets_is_raised_in_backward() -> None:
    def run() -> None:
        def broken(*_: Any) -> None:
            raise ArithmeticError("in the ring")

        model = horovod(Branches([0, 1, 2, 3]))
        collectives.all_reduce = broken  # in this process, which ends here
        model(data(0)).backward()

    with pytest.raises(RankError, match="ArithmeticError: in the ring") as caught:
        launch(run, 2, timeout=5.0)
    assert "in sum" in str(caught.value)  # the thread's own lines


@pytest.mark.parametrize(
    "wrong",
    [{"fusion_bytes": 0}, {"cycle_seconds": -1.0}, {"cycle_seconds": float("nan")}],
)
def test_settings_of_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fusion_bytes=.*cycle_seconds="):
        horovod(nn.Linear(2, 2), **wrong)
