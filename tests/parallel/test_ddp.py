"""Bucketed, overlapped data parallelism: its events, its bytes, and its refusals.

That it equals one device is tested over the harness's problems in `test_equal.py`.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minitrain import StallError, launch, trace
from minitrain.parallel.data import (
    built_in,
    ddp,
    gradient_wire_bytes,
    horovod,
    plan_buckets,
    replicate,
)
from minitrain.testing import assert_all_close, assert_close, gradients, weights
from minitrain.workload.step import (
    Batch,
    Placement,
    TokenLoss,
    accumulate,
    placement,
)

SMALL = 150  # bytes that close a bucket: the models below fill several
Gradients = dict[str, Tensor]


def network(seed: int = 0) -> nn.Sequential:
    """Layers of odd sizes in float64."""
    torch.manual_seed(seed)
    layers = (nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    return nn.Sequential(*layers).double()


def data(rank: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def summed(make: Callable[[], nn.Module], ranks: int) -> Gradients:
    """The oracle: one process that has the data of all ranks."""
    model = make()
    for rank in range(ranks):
        model(data(rank)).square().sum().backward()
    return gradients(model)


# ---- the plan ----


def test_buckets_are_filled_from_the_end_and_the_first_is_small() -> None:
    layers = [nn.Linear(1024, 300, bias=False) for _ in range(6)]  # 1.2 MB each
    head = nn.Linear(512, 400, bias=False)  # 0.8 MB
    parameters = [layer.weight for layer in [*layers, head]]
    plan = plan_buckets(parameters, 3 * 2**20)
    assert [len(bucket) for bucket in plan] == [2, 3, 2]
    flat = [parameter for bucket in plan for parameter in bucket]
    assert all(a is b for a, b in zip(flat, reversed(parameters), strict=True))
    assert [len(b) for b in plan_buckets(parameters, 1)] == [1] * 7
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        plan_buckets(parameters, 0)


def test_a_bucket_has_one_dtype_and_the_first_to_be_full_comes_first() -> None:
    big = [nn.Parameter(torch.zeros(100)) for _ in range(4)]
    small = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(4)]
    mixed = [p for pair in zip(small, big, strict=True) for p in pair]
    frozen = nn.Parameter(torch.zeros(100), requires_grad=False)
    plan = plan_buckets([*mixed, frozen], 800)
    assert [[p.numel() for p in bucket] for bucket in plan] == [
        [100, 100],
        [100, 100],
        [2, 2, 2, 2],
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_formula_is_two_times_n_minus_one_over_n(ranks: int) -> None:
    plan = plan_buckets(network().parameters(), SMALL)
    sent = [gradient_wire_bytes(plan, ranks, position) for position in range(ranks)]
    elements = sum(p.numel() for p in network().parameters())
    assert sum(sent) == 2 * (ranks - 1) * 8 * elements
    assert gradient_wire_bytes(plan, ranks, 0, 2) * 4 == sent[0]


# ---- the start ----


def test_replicas_are_the_first_ranks() -> None:
    def run(technique: Callable[..., nn.Module]) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 0))
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(dist.get_rank() + 1)
        for parameter in model.parameters():
            parameter.placement = Placement(partial=frozenset({"dp", "tp"}))
        same = technique(model, dist.new_group([1, 2])) if dist.get_rank() else None
        if not dist.get_rank():
            dist.new_group([1, 2])
        partial = {placement(p).partial for p in model.parameters()}
        return same is model, model.state_dict(), partial

    for technique, left in ((replicate, {"dp", "tp"}), (ddp, {"tp"})):
        (_, alone, _), *members = launch(run, 3, technique)
        assert all((value == 1).all() for value in alone.values())
        for same, state, partial_axes in members:
            assert same
            assert all((value == 2).all() for value in state.values())
            assert partial_axes == {frozenset(left)}


@pytest.mark.parametrize("technique", [replicate, ddp])
def test_what_cannot_start_says_why_on_every_rank(technique: Any) -> None:
    def run() -> list[str]:
        said = []

        def attempt(model: nn.Module, group: Any = None) -> None:
            with pytest.raises(ValueError, match=" ") as caught:
                technique(model, group)
            said.append(str(caught.value))

        attempt(nn.Linear(2, 3 if dist.get_rank() == 1 else 4))
        attempt(nn.Linear(2, 2).requires_grad_(dist.get_rank() != 1))
        sharded = nn.Linear(2, 2)
        sharded.weight.placement = Placement({"dp": 0})
        attempt(sharded)
        other = dist.new_group([1])
        if dist.get_rank() == 0:
            attempt(nn.Linear(2, 2), other)
        return said

    first, second = launch(run, 2)
    for shape, frozen, sharded, *_ in (first, second):
        assert "rank 1 has another model than rank 0" in shape
        assert "['weight float32 [3, 2]', 'bias float32 [3]']" in shape
        assert "weight float32 [2, 2] frozen" in frozen
        assert "weight is sharded over 'dp'" in sharded
    assert "rank 0 is not in the group" in first[-1]
    with pytest.raises(ValueError, match=r"no process group: call minitrain\.runtime"):
        technique(nn.Linear(2, 2))


def test_a_model_synchronizes_once() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="synchronizes its gradients already"):
            ddp(ddp(network()))

    launch(run, 1)


# ---- the events of a backward ----


def events(overlap: bool, micro_batches: int = 1) -> list[str]:
    """What one rank sees: gradients by layer, buckets by their number."""
    seen: list[str] = []

    def recorded(buffer: Tensor, group: dist.ProcessGroup) -> Any:
        seen.append(f"bucket of {buffer.numel()}")
        return built_in(buffer, group)

    model = ddp(network(), bucket_bytes=SMALL, overlap=overlap, all_reduce=recorded)
    for name, parameter in model.named_parameters():
        hook = partial(lambda name, _: seen.append(name), name)
        parameter.register_post_accumulate_grad_hook(hook)
    for micro_batch in range(micro_batches):
        model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
        model(data(dist.get_rank())).sum().backward()
    return seen


def test_a_full_bucket_leaves_while_backward_runs() -> None:
    for seen in launch(events, 3, True):
        assert seen[-1] in ("0.weight", "0.bias")
        buckets = [event for event in seen if event.startswith("bucket")]
        sizes = [sum(p.numel() for p in b) for b in plan_buckets(*plan_of_events())]
        assert buckets == [f"bucket of {size}" for size in sizes]
        assert len(buckets) == 3
        assert seen.index(buckets[0]) < seen.index("2.weight")
        assert seen.index(buckets[1]) < seen.index("0.weight")


def plan_of_events() -> tuple[Any, int]:
    return network().parameters(), SMALL


def test_without_overlap_buckets_leave_at_the_end_in_the_same_order() -> None:
    with_overlap = launch(events, 2, True)[0]
    for seen in launch(events, 2, False):
        assert all(event.startswith("bucket") for event in seen[-3:])
        assert seen[-3:] == [e for e in with_overlap if e.startswith("bucket")]


def test_accumulation_sends_one_round() -> None:
    for seen in launch(events, 2, True, 3):
        assert sum(event.startswith("bucket") for event in seen) == 3
        assert sum(not event.startswith("bucket") for event in seen) == 3 * 6


class Branches(nn.Module):
    """Layers that do not depend on each other, called in an order of the rank's own."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 4) for _ in range(4)).double()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(())
        for i in self.order:
            out = out + (i + 1) * self.parts[i](x).square().sum()
        return out


def test_ranks_may_get_gradients_in_different_orders() -> None:
    def run(in_ready_order: bool) -> tuple[Gradients, Gradients]:
        rank = dist.get_rank()
        order = [0, 1, 2, 3] if rank % 2 else [2, 0, 3, 1]
        model, oracle = Branches(order), Branches([0, 1, 2, 3])
        for other in range(dist.get_world_size()):
            oracle(data(other)).backward()
        if in_ready_order:
            launch_as_they_come(model)
        else:
            ddp(model, bucket_bytes=1)
        model(data(rank)).backward()
        return gradients(model), gradients(oracle)

    for ours, oracle in launch(run, 3, False):
        assert_all_close(ours, oracle)
    for wrong, oracle in launch(
        run, 3, True
    ):  # one layer's gradient added to another's
        with pytest.raises(AssertionError):
            assert_all_close(wrong, oracle)


def launch_as_they_come(model: nn.Module) -> nn.Module:
    """The mutant: a gradient leaves when it is ready, whatever the other ranks do."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


# ---- what ranks do not share ----


class Sometimes(nn.Module):
    """Layers of which a rank uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 4) for _ in range(4)).double()

    def forward(self, x: Tensor, *used: int) -> Tensor:
        return sum((self.parts[i](x).square().sum() for i in used), x.sum())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_parts_that_some_ranks_use_or_none(overlap: bool, bucket_bytes: int) -> None:
    used = [[0], [1, 0], []]  # by rank; nobody uses part 3

    def run() -> tuple[Gradients, Gradients]:
        rank, model, oracle = dist.get_rank(), Sometimes(), Sometimes()
        ddp(model, overlap=overlap, bucket_bytes=bucket_bytes)
        zeros = sum(0 * p.sum() for p in oracle.parameters())
        (sum(oracle(data(r), *used[r]) for r in range(3)) + zeros).backward()
        for _ in range(2):
            model.zero_grad()
            # The rank that uses nothing has a backward all the same.
            model(data(rank).requires_grad_(), *used[rank]).backward()
        return gradients(model), gradients(oracle)

    for ours, oracle in launch(run, 3, timeout=10.0):
        assert_all_close(ours, oracle)


def test_whoever_sends_only_what_is_ready_waits_for_ever() -> None:
    def run() -> None:
        model = launch_as_they_come(Sometimes())
        model(data(0), *range(1 + dist.get_rank())).backward()

    with pytest.raises(StallError):
        launch(run, 3, timeout=1.0)


def test_a_part_of_an_earlier_micro_batch_is_not_lost() -> None:
    def run() -> tuple[Gradients, Gradients]:
        rank, model, oracle = dist.get_rank(), Sometimes(), Sometimes()
        ddp(model)
        for part in range(4):
            model.set_requires_gradient_sync(part == 3)
            model(data(rank), part).backward()
            for other in range(2):
                oracle(data(other), part).backward()
        return gradients(model), gradients(oracle)

    for ours, oracle in launch(run, 2):
        assert_all_close(ours, oracle)


class Told(nn.Module):
    """A model that notes what `accumulate` tells it, and may fail."""

    def __init__(self, fails_at: int = 9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.told: list[Any] = []
        self.fails_at = fails_at

    def set_requires_gradient_sync(self, flag: bool) -> None:
        self.told.append(flag)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.told.append("forward")
        if self.told.count("forward") == self.fails_at:
            raise ArithmeticError("in the middle")
        return self.weight.expand(*tokens.shape, 4)


def test_a_model_is_told_before_each_forward_whether_it_is_the_last() -> None:
    parts = Batch.from_sequences(torch.ones(5, 3, dtype=torch.int64)).split(3)
    model = Told()
    accumulate(model, iter(parts), TokenLoss(1))
    earlier = [False, "forward"]
    assert model.told == [*earlier, *earlier, True, "forward", True]
    model = Told(fails_at=2)
    with pytest.raises(ArithmeticError):
        accumulate(model, parts, TokenLoss(1))
    assert model.told == [*earlier, *earlier, True]


def test_the_flag_counts_when_backward_begins() -> None:
    """Set after the forward it must not be forgotten: 2.5 in place of 3.0."""

    def run() -> float:
        weight = nn.Linear(1, 1, bias=False)
        ddp(weight)
        weight.set_requires_gradient_sync(False)
        weight(torch.tensor([[1.0]])).backward()
        out = weight(torch.tensor([[float(dist.get_rank())]]))
        weight.set_requires_gradient_sync(True)
        out.backward()
        return weight.weight.grad.item()

    assert launch(run, 2) == [3.0, 3.0]


def test_frozen_parameters_stay_out_and_cannot_come_back_unnoticed() -> None:
    def run() -> None:
        model = network()
        model[2].requires_grad_(False)
        ddp(model)
        model[4].bias.requires_grad_(False)  # frozen later
        model(data(dist.get_rank())).sum().backward()
        has = {name for name, p in model.named_parameters() if p.grad is not None}
        assert has == {"0.weight", "0.bias", "4.weight"}
        model[2].requires_grad_(True)
        model.zero_grad()
        with pytest.raises(RuntimeError, match="unfrozen, added or replaced"):
            model(data(0)).sum().backward()

    launch(run, 2)


def test_tied_and_empty_parameters() -> None:
    def make() -> nn.Module:
        model = network()
        model.append(nn.Linear(2, 0).double())
        model.append(nn.Linear(0, 3).double())
        model.append(nn.Linear(3, 5).double())
        model[7].weight = model[0].weight
        return model

    def run() -> Gradients:
        model = ddp(make(), bucket_bytes=SMALL)
        model(data(dist.get_rank())).square().sum().backward()
        assert model[7].weight is model[0].weight
        return gradients(model)

    expected = summed(make, 3)
    assert "5.weight" in expected
    for grads in launch(run, 3):
        assert_all_close(grads, expected)


def test_buffers_are_the_first_ranks_after_backward() -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        ddp(model)
        alone = copy.deepcopy(model[1])
        model(data(dist.get_rank())).sum().backward()
        alone(model[0](data(0)))
        buffers = dict(model[1].named_buffers()), dict(alone.named_buffers())
        return tuple({k: v.clone() for k, v in b.items()} for b in buffers)

    for buffers, of_rank_0 in launch(run, 3):
        assert buffers["num_batches_tracked"] == 1
        for name, value in buffers.items():
            assert torch.equal(value, of_rank_0[name])


# ---- steps in a row ----


@pytest.mark.parametrize("to_none", [True, False])
def test_steps_in_a_row_and_gradients_that_are_views(to_none: bool) -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        model, oracle = ddp(network(), bucket_bytes=SMALL), network()
        ours = torch.optim.SGD(model.parameters(), 0.05)
        theirs = torch.optim.SGD(oracle.parameters(), 0.05)
        for step in range(4):
            ours.zero_grad(to_none)
            model(data(10 * step + dist.get_rank())).square().sum().backward()
            ours.step()
            theirs.zero_grad()
            for rank in range(2):
                oracle(data(10 * step + rank)).square().sum().backward()
            theirs.step()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return weights(model), weights(oracle), len(storages)

    (first, expected, storages), (second, _, _) = launch(run, 2)
    assert storages == 3
    assert_all_close(first, expected)
    assert_all_close(first, second, tol=0.0)


@pytest.mark.parametrize("synchronized", [True, False])
def test_sums_are_not_summed_again(synchronized: bool) -> None:
    def run() -> None:
        model = ddp(network())
        for to_none in (True, False):
            model.set_requires_gradient_sync(True)
            model.zero_grad(to_none)
            model(data(0)).sum().backward()
            model.set_requires_gradient_sync(synchronized)
            for _ in range(2):  # not only the first time
                with pytest.raises(RuntimeError, match="call zero_grad"):
                    model(data(0)).sum().backward()
        # Zeroing between forward and backward is in time.
        out = model(data(0)).sum()
        model.zero_grad()
        out.backward()

    launch(run, 2)


def test_an_exception_in_backward_leaves_the_model_usable() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("in the middle")

    def run() -> Gradients:
        model = ddp(network(), bucket_bytes=SMALL)
        middle = model[2].register_forward_hook(lambda m, i, out: Fails.apply(out))
        with pytest.raises(ArithmeticError):
            model(data(dist.get_rank())).square().sum().backward()
        middle.remove()
        model.zero_grad()
        model(data(dist.get_rank())).square().sum().backward()
        return gradients(model)

    expected = summed(network, 2)
    for grads in launch(run, 2):
        assert_all_close(grads, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(reentrant: bool) -> None:
    def run() -> Gradients:
        model = network()
        for layer in model[2:]:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
        ddp(model, bucket_bytes=SMALL)
        model(data(dist.get_rank())).square().sum().backward()
        return gradients(model)

    expected = summed(network, 2)
    for grads in launch(run, 2):
        assert_all_close(grads, expected)


class Twice(nn.Module):
    """One layer in two recomputed stretches, in torch's older form of recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_gradient_in_two_parts_is_refused() -> None:
    def run() -> None:
        model = ddp(Twice())
        with pytest.raises(RuntimeError, match=r"in two parts.*use_reentrant=False"):
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()

    launch(run, 2)


# ---- number formats ----


def test_narrow_gradients_are_summed_in_float32() -> None:
    def run(reduce_dtype: torch.dtype | None) -> tuple[list[float], torch.dtype]:
        layer = nn.Linear(30, 1, bias=False, dtype=torch.bfloat16)
        ddp(layer, reduce_dtype=reduce_dtype)
        for to_none in (True, False):
            layer.zero_grad(to_none)
            value = 256.0 if dist.get_rank() == 0 else 1.0
            layer(torch.full((1, 30), value, dtype=torch.bfloat16)).backward()
        return layer.weight.grad.flatten().tolist(), layer.weight.grad.dtype

    for sums, dtype in launch(run, 3, None):
        assert dtype == torch.bfloat16
        assert sums == [258.0] * 30
    for sums, _ in launch(run, 3, torch.bfloat16):  # 256 + 1 is 256 again
        assert 256.0 in sums


def test_autocast_and_mixed_formats() -> None:
    def run() -> tuple[set[torch.dtype], Gradients]:
        model = network().float()
        model[2].bfloat16()
        ddp(model)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data(dist.get_rank()).float())
        out.float().square().sum().backward()
        return {p.grad.dtype for p in model.parameters()}, gradients(model)

    (dtypes, first), (_, second) = launch(run, 2)
    assert dtypes == {torch.float32, torch.bfloat16}
    assert_all_close(first, second, tol=0.0)


# ---- bytes, and a peer ----


def test_bytes_are_those_of_the_formula() -> None:
    def run() -> tuple[list[int], int, int]:
        model = ddp(network(), bucket_bytes=SMALL)
        with trace() as t:
            model(data(dist.get_rank())).sum().backward()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        plan = plan_buckets(model.parameters(), SMALL)
        assert {m.op for m in t.messages} <= {"all_reduce"}
        assert all(m.async_ for m in t.messages)
        sizes = [m.payload_bytes for m in t.messages]
        return sizes, t.wire_bytes, gradient_wire_bytes(plan, ranks, rank)

    for ranks in (1, 2, 3, 4):
        for sizes, sent, formula in launch(run, ranks):
            assert sizes == [184, 280, 160]
            assert sent == formula


def test_torchs_own_gives_the_same_gradients() -> None:
    def run() -> tuple[Gradients, Gradients]:
        x = data(dist.get_rank())
        model = ddp(network(), bucket_bytes=SMALL)
        model(x).square().sum().backward()
        peer = nn.parallel.DistributedDataParallel(network())
        (peer(x).square().sum() * dist.get_world_size()).backward()
        return gradients(model), gradients(peer.module)

    for ours, theirs in launch(run, 3):
        assert_all_close(ours, theirs)
        assert_close(ours["0.bias"], summed(network, 3)["0.bias"])


# ---- layouts in memory ----


class Strided(nn.Module):
    """Parameters and a buffer whose elements do not lie one after the other."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        whole = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) + 100 * rank
        self.turned = nn.Parameter(whole.clone().t())  # [4, 3]
        self.column = nn.Parameter(whole.clone()[:, 1])  # [3]
        self.image = nn.Parameter(
            whole.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.register_buffer("kept", whole.clone()[:, 2])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.turned * self.column + self.kept).sum() * self.image.sum()


@pytest.mark.parametrize("technique", [ddp, horovod, replicate])
def test_strided_tensors_become_the_first_ranks(technique: Any) -> None:
    def run() -> tuple[Any, ...]:
        model = technique(Strided(dist.get_rank()))
        model(torch.ones(2, 4, dtype=torch.float64)).backward()
        return weights(model), model.kept.clone(), gradients(model)

    oracle = Strided(0)
    oracle(torch.ones(2, 4, dtype=torch.float64)).backward()
    ranks = 1 if technique is replicate else 3  # whose sum comes later
    expected = {name: ranks * g for name, g in gradients(oracle).items()}
    for values, kept, grads in launch(run, 3):
        assert_all_close(values, weights(oracle), tol=0.0)
        assert torch.equal(kept, oracle.kept)
        assert_all_close(grads, expected)


def test_an_expanded_tensor_is_refused_by_name() -> None:
    def run() -> str:
        model = Strided(0)
        model.register_buffer("same", torch.zeros(()).expand(4))
        with pytest.raises(ValueError, match="same is expanded"):
            ddp(model)
        return "refused"

    assert launch(run, 2) == ["refused"] * 2
