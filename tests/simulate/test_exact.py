"""The closed form of a replica's memory, against what real ranks held."""

import pytest
import torch
import torch.distributed as dist

from minitrain import Layout, launch, trace
from minitrain.parallel.data import ddp, replicate
from minitrain.simulate.exact import replica_bytes
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.step import Batch, TokenLoss, accumulate, finalize_gradients

ODD = ModelConfig(vocab_size=301, layers=3, hidden=40, heads=4, kv_heads=2, max_seq=64)


def second_step(technique, batch, seq, micro_batches):
    """A traced step of real training, after one that made the optimizer's state."""
    ranks, mesh = dist.get_world_size(), Layout(dp=dist.get_world_size()).mesh()
    wrap = {"replicate": replicate, "ddp": ddp}[technique]
    model = wrap(Transformer(ODD, seed=dist.get_rank()), mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(dist.get_rank())
    shape = (batch * micro_batches, seq + 1)
    tokens = torch.randint(ODD.vocab_size, shape, generator=draw)

    def step():
        parts = Batch.from_sequences(tokens).split(micro_batches)
        accumulate(model, parts, TokenLoss(batch * seq * micro_batches * ranks))
        finalize_gradients(optimizer, mesh)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with trace() as t:
        step()
    return t


@pytest.mark.parametrize("technique", ["replicate", "ddp"])
@pytest.mark.parametrize(
    ("ranks", "batch", "seq", "micro_batches"),
    [(1, 3, 37, 1), (2, 2, 33, 1), (2, 2, 33, 2), (3, 1, 64, 3)],
)
def test_every_rank_holds_what_the_form_says(
    technique, ranks, batch, seq, micro_batches
):
    expected = replica_bytes(
        ODD, batch, seq, micro_batches=micro_batches, technique=technique
    )
    traces = launch(second_step, ranks, technique, batch, seq, micro_batches)
    for t in traces:
        held = {kind: live for kind, live in t.at_peak.items() if live}
        assert held == {kind: live for kind, live in expected.items() if live}


def test_the_simulated_rank_holds_the_same():
    fake = launch(second_step, 2048, "ddp", 2, 33, 2, backend="fake")[0]
    expected = replica_bytes(ODD, 2, 33, micro_batches=2, technique="ddp")
    assert {k: v for k, v in fake.at_peak.items() if v} == expected


def test_buckets_and_sums_cost_what_they_must():
    one = replica_bytes(ODD, 2, 33, micro_batches=2)
    two = replica_bytes(ODD, 2, 33, micro_batches=2, technique="ddp")
    weights = 4 * sum(p.numel() for p in Transformer(ODD, device="meta").parameters())
    assert two["gradients"] - one["gradients"] == weights == one["parameters"]
