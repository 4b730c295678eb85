"""The two statements of a step's time: a recorded program, and the closed form."""

import pytest
import torch
import torch.distributed as dist

from minitrain import Layout, trace
from minitrain.parallel.data import ddp
from minitrain.simulate.estimate import estimate
from minitrain.simulate.plan import Plan
from minitrain.simulate.simulation import simulate
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.step import Batch, TokenLoss, accumulate, finalize_gradients

WITHIN = 0.02

LLAMA = ModelConfig(
    vocab_size=32_000,
    layers=2,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14_336,
    max_seq=8192,
)
GPT = ModelConfig(
    vocab_size=50_304,
    layers=3,
    hidden=2048,
    heads=16,
    max_seq=2048,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
)


def second_step(config, batch, seq, micro_batches):
    """A step in bfloat16, buckets overlapped with backward, after one untraced."""
    ranks = dist.get_world_size()
    model = ddp(Transformer(config, dtype=torch.bfloat16), reduce_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(batch * micro_batches, seq + 1, dtype=torch.long)

    def step():
        parts = Batch.from_sequences(tokens).split(micro_batches)
        accumulate(model, parts, TokenLoss(batch * seq * micro_batches * ranks))
        finalize_gradients(optimizer, Layout(dp=ranks).mesh())
        optimizer.step()
        optimizer.zero_grad()

    step()
    with trace() as t:
        step()
    return t


@pytest.mark.parametrize(
    ("config", "batch", "seq", "micro_batches"),
    [(LLAMA, 1, 8192, 1), (LLAMA, 2, 2048, 3), (GPT, 4, 2048, 1)],
    ids=["long", "three micro-batches", "gpt"],
)
def test_a_recorded_step_takes_what_the_closed_form_says(
    config, batch, seq, micro_batches
):
    shape = (config, batch, seq, micro_batches)
    recorded = simulate(second_step, "h100:1x8", None, *shape, check=False)
    for cluster in ("h100:1x8", "h100:64x8", "a100:8x8"):
        there = recorded.at(cluster)
        ranks = there.cluster.world_size
        plan = Plan(
            seq=seq,
            global_batch=ranks * batch * micro_batches,
            micro_batch=batch,
            dp=ranks,
        )
        said = estimate(config, plan, cluster, "minitrain")
        assert said.step_seconds == pytest.approx(there.step_seconds, rel=WITHIN)
        attention = there.parts["attention"]
        assert said.parts["attention"] == pytest.approx(attention, rel=0.01)


def test_a_closed_form_that_forgets_the_messages_disagrees():
    recorded = simulate(second_step, "h100:64x8", None, GPT, 1, 512, 1, check=False)
    plan = Plan(seq=512, global_batch=512, dp=512)
    said = estimate(GPT, plan, "h100:64x8", "minitrain")
    silent = said.step_seconds - said.parts["data-parallel messages"]
    assert abs(silent / recorded.step_seconds - 1) > 2 * WITHIN
