"""The problems are as difficult as their names say, for every number of ranks."""

import pytest
import torch
from torch import Tensor, nn

from minitrain.testing import PROBLEMS, Problem
from minitrain.workload.step import IGNORED, Batch

RANKS = (2, 3, 4, 8)


def shares(problem: Problem, ranks: int, step: int = 0) -> list[Batch]:
    batch = problem.batch(step)
    fields = (batch.tokens, batch.targets, batch.positions)
    return [
        Batch(*parts)
        for parts in zip(*(f.tensor_split(ranks) for f in fields), strict=True)
    ]


def valid(batch: Batch) -> int:
    return int((batch.targets != IGNORED).sum())


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_is_the_same_each_time_and_other_for_another_seed(name: str) -> None:
    def tensors(model: nn.Module) -> dict[str, Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    problem = PROBLEMS[name]
    a, b, other = (tensors(problem.build(seed)) for seed in (0, 0, 1))
    state = torch.get_rng_state()
    problem.build()
    assert torch.equal(torch.get_rng_state(), state)
    for key, tensor in a.items():
        assert torch.equal(tensor, b[key])
        if tensor.numel():
            assert not torch.equal(tensor, other[key]), key
        if tensor.dtype == torch.float64 and tensor.numel():
            assert not torch.equal(tensor, tensor.float().double()), key


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_and_steps_differ_and_nothing_divides(ranks: int) -> None:
    for name, problem in PROBLEMS.items():
        assert problem.sequences % ranks or problem.sequences == 3, name
        for step in range(problem.steps):
            counts = [valid(s) for s in shares(problem, ranks, step)]
            if any(counts):
                assert len(set(counts)) > 1, name
        first, second = problem.batch(0), problem.batch(1)
        assert not torch.equal(first.tokens, second.tokens)
        assert problem.steps > 1


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_without_tokens_and_a_step_without(ranks: int) -> None:
    problem = PROBLEMS["no tokens"]
    counts = [valid(share) for share in shares(problem, ranks)]
    assert counts[-1] == 0 < counts[0]
    assert valid(problem.batch(1)) == 0 < valid(problem.batch(2))


def test_a_rank_without_sequences() -> None:
    problem = PROBLEMS["few sequences"]
    assert [len(s.tokens) for s in shares(problem, 4)] == [1, 1, 1, 0]
    *_, last = shares(problem, 4)
    (micro_batch,) = problem.split(last)
    logits = problem.build()(micro_batch.tokens, micro_batch.positions)
    assert logits.shape == (0, 7, 37)


def test_micro_batches_are_uneven() -> None:
    problem = PROBLEMS["micro-batches"]
    sizes = [
        [len(part.tokens) for part in problem.split(share)]
        for share in shares(problem, 3)
    ]
    assert sizes == [[2, 1, 1], [2, 1, 1], [1, 1, 1]]
    assert len(problem.split(shares(problem, 8)[-1])) == 1  # one sequence


@pytest.mark.parametrize("ranks", RANKS)
def test_a_branch_is_used_on_some_ranks_only(ranks: int) -> None:
    problem = PROBLEMS["branches"]
    used = []
    for share in shares(problem, ranks, step=2):
        model = problem.build()
        model(share.tokens, share.positions).sum().backward()
        used.append((model.low.weight.grad is None, model.high.weight.grad is None))
    assert used[0] == (False, True)
    assert used[-1] == (True, False)


def test_each_name_says_what_is_there() -> None:
    def parameters(name: str) -> dict[str, nn.Parameter]:
        return dict(PROBLEMS[name].build().named_parameters(remove_duplicate=False))

    tied = parameters("tied")
    assert tied["head.weight"] is tied["embed.tokens.weight"]
    frozen = [n for n, p in parameters("frozen").items() if not p.requires_grad]
    assert "embed.tokens.weight" in frozen
    assert len(frozen) == 6
    assert "never.weight" in parameters("unused")
    assert parameters("empty parameters")["weight"].shape == (0, 5)
    buffers = PROBLEMS["buffers"].build().buffers()
    kinds = {torch.float64, torch.int64, torch.bool}
    assert {b.dtype for b in buffers} == kinds
    assert PROBLEMS["float32"].build().head.weight.dtype == torch.float32
    assert not PROBLEMS["gradients kept"].set_to_none
    adamw = PROBLEMS["adamw"]
    assert isinstance(adamw.optimizer(adamw.build().parameters()), torch.optim.AdamW)
