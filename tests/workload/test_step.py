"""The step against one process with the whole batch, on data that is uneven."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minitrain import launch
from minitrain.testing import assert_close, assert_same_gradients, gradients
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.step import (
    IGNORED,
    Batch,
    Loss,
    Placement,
    TokenLoss,
    accumulate,
    count_tokens,
    finalize_gradients,
    placement,
)

CONFIG = ModelConfig(vocab_size=37, layers=1, hidden=16, heads=4, kv_heads=2)


def batch(*valid: int, seq: int = 8) -> Batch:
    """One sequence for each number of valid targets; the rest is ignored."""
    generator = torch.Generator().manual_seed(5)
    size = (len(valid), seq + 1)
    data = torch.randint(CONFIG.vocab_size, size, generator=generator)
    made = Batch.from_sequences(data)
    targets = made.targets.clone()
    for row, count in enumerate(valid):
        targets[row, count:] = IGNORED
    return Batch(made.tokens, targets, made.positions)


def oracle(whole: Batch) -> tuple[Transformer, Tensor]:
    """One process, one backward, torch's own mean over the valid targets."""
    model = Transformer(CONFIG, dtype=torch.float64)
    logits = model(whole.tokens, whole.positions)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), whole.targets.flatten())
    loss.backward()
    return model, loss


def part(whole: Batch, rows: slice) -> Batch:
    return Batch(whole.tokens[rows], whole.targets[rows], whole.positions[rows])


def partial_over(model: nn.Module, *axes: str) -> None:
    for parameter in model.parameters():
        parameter.placement = Placement(partial=frozenset(axes))


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=1.0)


def with_gradient(values: Tensor, **where: object) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values.clone()
    parameter.placement = Placement(**where)
    return parameter


def test_targets_are_the_next_tokens() -> None:
    made = Batch.from_sequences(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]))
    assert made.tokens.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert made.targets.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert made.positions.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_micro_batches_that_do_not_divide() -> None:
    whole = batch(8, 1, 3, 8, 2, 7, 8)
    parts = whole.split(3)
    assert [len(p.tokens) for p in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([p.targets for p in parts]), whole.targets)
    for wrong in (0, 8):
        with pytest.raises(ValueError, match=f"7 sequences into {wrong}"):
            whole.split(wrong)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_short_micro_batches_weigh_by_their_tokens(micro_batches: int) -> None:
    whole = batch(1, 7, 8, 0, 3, 2, 0)
    model, expected = Transformer(CONFIG, dtype=torch.float64), oracle(whole)
    parts = whole.split(micro_batches)
    loss = accumulate(model, parts, TokenLoss(count_tokens(parts)))
    assert_same_gradients(model, expected[0])
    assert loss.tokens == 21
    assert not loss.sum.requires_grad
    assert_close(loss.mean, expected[1])


def test_a_batch_without_targets_gives_zero_and_not_nan() -> None:
    model, empty = Transformer(CONFIG), batch(0, 0)
    loss = accumulate(model, [empty], TokenLoss(count_tokens([empty])))
    assert loss.mean == 0
    assert all(not g.any() for g in gradients(model).values())
    with pytest.raises(ValueError, match="at least one micro-batch"):
        accumulate(model, [], TokenLoss(1))


def test_the_sum_is_wide_and_divided_before_backward() -> None:
    logits = torch.zeros(1, 40_000, 4, dtype=torch.float16, requires_grad=True)
    zeros = torch.zeros(1, 40_000, dtype=torch.int64)
    loss_fn = TokenLoss(40_000)
    loss = loss_fn(logits, Batch(zeros, zeros, zeros))
    assert loss.sum.dtype == torch.float32
    assert_close(loss.mean, torch.tensor(4.0).log())
    total = Loss(torch.tensor(256.0), torch.tensor(1))
    for _ in range(256):
        total = total + Loss(torch.tensor(1.0), torch.tensor(1))
    assert total.sum == 512
    assert total.tokens == 257
    # 30,000 summed over 4 ranks leaves float16, unless each was divided first.
    weight = torch.zeros((), dtype=torch.float16, requires_grad=True)
    objective = loss_fn.objective(Loss(weight * 30_000.0 * 4, torch.tensor(4)))
    objective.backward()
    assert weight.grad is not None
    assert weight.grad.isfinite()


@pytest.mark.parametrize("valid", [(5, 1), (0, 6), (8, 0, 1, 2)])
def test_tokens_weigh_the_same_on_every_rank(valid: tuple[int, ...]) -> None:
    whole, ranks = batch(*valid), len(valid)

    def run() -> tuple[dict[str, Tensor], Tensor, int, Tensor]:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        rank = dist.get_rank()
        model = Transformer(CONFIG, dtype=torch.float64)
        partial_over(model, "dp")
        mine = [part(whole, slice(rank, rank + 1))]
        count = count_tokens(mine, mesh)
        loss = accumulate(model, mine, TokenLoss(count))
        optimizer = torch.optim.SGD(model.parameters())
        norm = finalize_gradients(optimizer, mesh, max_norm=0.1)
        return gradients(model), norm, count, loss.tokens

    expected, _ = oracle(whole)
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    results = launch(run, ranks)
    for grads, got, count, tokens in results:
        assert_same_gradients(grads, expected)
        assert_close(got, norm)
        assert count == sum(valid)
        assert_close(got, results[0][1], tol=0.0)
        assert tokens <= 8


def test_only_axes_that_split_the_data_count_tokens() -> None:
    def run() -> tuple[int, int]:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        cp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp_ring"))
        # Ranks along tp and pp see the same data; along dp and cp, other data.
        by_dp, by_cp = batch(5) if rank < 2 else batch(1), batch(3 * (rank % 2))
        return count_tokens([by_dp, by_dp], mesh), count_tokens([by_cp], cp)

    assert launch(run, 4) == [(12, 3)] * 4


def test_reduction_is_in_float32_and_takes_absent_gradients_as_zero() -> None:
    """bf16 partial sums 256 + 1 + 1 + 1 would stall; unused branches must not hang."""

    def run() -> list[Tensor | None]:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        over = {"partial": frozenset({"dp"})}
        generator = torch.Generator().manual_seed(rank)
        low = torch.randn(999, generator=generator).to(torch.bfloat16)
        parameters = [
            with_gradient(low, **over),
            with_gradient(torch.ones(3), **over),
            with_gradient(torch.ones(3), **over),
            with_gradient(torch.ones(4, 0), **over),
            with_gradient(torch.full((2, 3), float(rank)).T, **over),
            with_gradient(torch.ones(2)),  # somebody else has reduced this one
        ]
        if rank != 0:
            parameters[1].grad = None  # a branch used on rank 0 only
        parameters[2].grad, parameters[2].requires_grad = None, False  # frozen
        finalize_gradients(sgd(*parameters), mesh)
        return [low, *(p.grad for p in parameters)]

    results = launch(run, 4)
    exact = torch.stack([r[0].double() for r in results]).sum(0)
    for _, low, once, frozen, empty, transposed, own in results:
        assert torch.equal(low, exact.to(torch.bfloat16))
        assert once.tolist() == [1, 1, 1]
        assert frozen is None
        assert empty.shape == (4, 0)
        assert torch.equal(transposed, torch.full((3, 2), 6.0))
        assert own.tolist() == [1, 1]
    stalled = results[0][0]
    for result in results[1:]:
        stalled = stalled + result[0]
    assert not torch.equal(stalled, exact.to(torch.bfloat16)), "the data proves nothing"


def test_the_norm_is_that_of_the_whole_model() -> None:
    def stages() -> tuple[Tensor, Tensor]:  # norms 3 and 4: 5 on both, grads by 1/5
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        value = torch.tensor([3.0 + dist.get_rank()])
        parameter = with_gradient(value, sharded={"pp": None})
        norm = finalize_gradients(sgd(parameter), mesh, max_norm=1.0)
        return norm, parameter.grad / value

    for norm, scale in launch(stages, 2):
        assert_close(norm, torch.tensor(5.0))
        assert_close(scale, torch.tensor([0.2]))

    def replicated() -> Tensor:  # 3 on both ranks, halves of 4: 5, not sqrt(9+9+16)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        half = torch.full((2,), 8.0**0.5)
        return finalize_gradients(
            sgd(
                with_gradient(torch.tensor([3.0])),
                with_gradient(half[:1], sharded={"tp": 0}),
            ),
            mesh,
        )

    for norm in launch(replicated, 2):
        assert_close(norm, torch.tensor(5.0))


def test_the_norm_over_two_axes_with_uneven_and_missing_shards() -> None:
    """Stage 1 has no parameter sharded over tp; dp rank 1 holds an empty shard."""
    axes = ("pp", "dp", "tp")

    def grad(i: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(i)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def run() -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
        pp, dp, tp = (mesh.get_local_rank(axis) for axis in axes)
        parameters = [with_gradient(grad(9 + pp, 3), sharded={"pp": None})]
        if pp == 0:
            both = grad(0, 5, 6).tensor_split(2, 0)[dp].tensor_split(2, 1)[tp]
            where = {"pp": None, "dp": 0, "tp": 1}
            parameters.append(with_gradient(both, sharded=where))
        one = grad(1, 1, 3).tensor_split(2, 0)[dp]
        everywhere = {"pp": None, "dp": 0}
        parameters.append(with_gradient(one * (1 - pp), sharded=everywhere))
        return finalize_gradients(sgd(*parameters), mesh)

    pieces = [grad(0, 5, 6), grad(1, 1, 3), grad(9, 3), grad(10, 3)]
    expected = torch.cat([g.flatten() for g in pieces]).norm()
    for norm in launch(run, 8):
        assert_close(norm, expected)


def test_a_small_norm_is_left_alone() -> None:
    parameter = with_gradient(torch.tensor([3.0, 4.0]))
    assert finalize_gradients(sgd(parameter), max_norm=7.0) == 5
    assert parameter.grad.tolist() == [3, 4]
    assert finalize_gradients(sgd(parameter)) == 5
    assert parameter.grad.tolist() == [3, 4]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", [{"sharded": {"tp": 0}}, {"partial": {"tp"}}])
def test_all_ranks_see_one_ranks_overflow(bad: float, where: dict) -> None:
    def run() -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        value = torch.tensor([1.0, bad if dist.get_rank() == 1 else 1.0])
        return finalize_gradients(sgd(with_gradient(value, **where)), mesh, 1.0)

    assert [bool(n.isfinite()) for n in launch(run, 2)] == [False, False]


def test_an_axis_the_mesh_lacks_is_refused() -> None:
    parameter = with_gradient(torch.ones(1), partial=frozenset({"dp"}))
    with pytest.raises(ValueError, match="axis 'dp', but the mesh has no axes"):
        finalize_gradients(sgd(parameter))
    assert placement(torch.ones(1)) == Placement()


def trained(config: ModelConfig, whole: Batch, ranks: int = 1) -> dict[str, Tensor]:
    """Weights after two SGD steps on `ranks` processes; ranks=0: plain torch."""

    def run() -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        model = Transformer(config, dtype=torch.float64)
        partial_over(model, "dp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        rows = torch.arange(len(whole.tokens)).tensor_split(ranks)[dist.get_rank()]
        mine = [part(whole, slice(int(rows[0]), int(rows[-1]) + 1))]
        for _ in range(2):
            accumulate(model, mine, TokenLoss(count_tokens(mine, mesh)))
            finalize_gradients(optimizer, mesh, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert not config.tie_embeddings or model.head.weight is next(
            p for n, p in model.named_parameters() if n == "embed.tokens.weight"
        )
        return copy.deepcopy(model.state_dict())

    return launch(run, ranks)[-1] if ranks else _plain(config, whole)


def _plain(config: ModelConfig, whole: Batch) -> dict[str, Tensor]:
    model = Transformer(config, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        logits = model(whole.tokens, whole.positions).flatten(0, 1)
        nn.functional.cross_entropy(logits, whole.targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("tie", [False, True])
def test_training_on_three_ranks_equals_plain_torch(tie: bool) -> None:
    sizes = {"vocab_size": 37, "layers": 1, "hidden": 16, "heads": 4}
    config = ModelConfig(**sizes, tie_embeddings=tie)
    whole = batch(8, 1, 0, 3, 8, 2, 7)
    expected: dict[str, Tensor] = trained(config, whole, ranks=0)
    make: Callable[[int], dict[str, Tensor]] = lambda n: trained(config, whole, n)  # noqa: E731
    for name, value in make(3).items():
        assert_close(value, expected[name], name=name)
