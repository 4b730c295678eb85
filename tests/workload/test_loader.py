"""Every sample once an epoch, in an order that ranks and resuming do not change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.workload.loader import Loader

SEQ = 4
SHARDS = (np.arange(30, dtype="<u2"), np.arange(100, 145, dtype="<u2"))  # 7 + 11


def stream(ranks: int, batches: list[int], seed: int = 0) -> list[list[int]]:
    """Samples in the order of a single process, put together from `ranks` loaders."""
    loaders = [Loader(SHARDS, SEQ, seed, rank, ranks) for rank in range(ranks)]
    out: list[list[int]] = []
    for size in batches:
        parts = [loader.next_batch(size) for loader in loaders]
        sizes = [len(part.tokens) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        out += torch.cat([part.tokens for part in parts]).tolist()
    return out


def test_targets_follow_and_samples_stay_in_their_shard() -> None:
    batch = Loader(SHARDS, SEQ).next_batch(18)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.positions[3].tolist() == [0, 1, 2, 3]
    assert batch.tokens.dtype == torch.int64
    seen = sorted(batch.tokens[:, 0].tolist())
    assert seen == [*range(0, 28, 4), *range(100, 144, 4)]


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 5),
    batches=st.lists(st.integers(5, 23), min_size=1, max_size=6),
)
def test_the_order_does_not_depend_on_ranks_or_batch_size(
    ranks: int, batches: list[int]
) -> None:
    total = sum(batches)
    assert stream(ranks, batches) == stream(1, [1] * total)


def test_each_epoch_is_another_permutation() -> None:
    epochs = next(stream(3, [9, 9]) for _ in range(1)), stream(1, [18] * 3)
    first, second, third = (epochs[1][i : i + 18] for i in (0, 18, 36))
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third
    assert epochs[0] == first
    assert stream(1, [18], seed=1) != first


@settings(max_examples=30, deadline=None)
@given(before=st.integers(1, 4), after=st.integers(1, 4), done=st.integers(1, 5))
def test_resumes_at_the_exact_sample_on_any_number_of_ranks(
    before: int, after: int, done: int
) -> None:
    expected = stream(1, [5] * 9)
    states = []
    for rank in range(before):
        loader = Loader(SHARDS, SEQ, 0, rank, before)
        for _ in range(done):
            loader.next_batch(5)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    rest: list[list[int]] = []
    loaders = [Loader(SHARDS, SEQ, 0, rank, after) for rank in range(after)]
    for loader in loaders:
        loader.load_state_dict(states[-1])
    for _ in range(9 - done):
        rest += torch.cat([one.next_batch(5).tokens for one in loaders]).tolist()
    assert rest == expected[5 * done :]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample of 45 tokens fits in 45 tokens"):
        Loader(SHARDS, 45)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Loader(SHARDS, SEQ, rank=2, ranks=2)
    with pytest.raises(ValueError, match=r"batch of 2 sequences .* 3 ranks"):
        Loader(SHARDS, SEQ, ranks=3).next_batch(2)
    state = Loader(SHARDS, SEQ, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed was 1, now 0"):
        Loader(SHARDS, SEQ).load_state_dict(state)
    with pytest.raises(ValueError, match="epoch_samples was 18, now 7"):
        Loader(SHARDS[:1], SEQ).load_state_dict(Loader(SHARDS, SEQ).state_dict())
