"""Closed forms of parameters and operations against what is counted."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minitrain.workload import costs, formulas
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.presets import PRESETS
from minitrain.workload.step import Batch, TokenLoss, accumulate


def some_configs(count, seed=0):
    """Small models with odd sizes and every option."""
    draw = random.Random(seed)
    for _ in range(count):
        heads = draw.choice([1, 2, 4, 6])
        yield ModelConfig(
            vocab_size=draw.choice([33, 101, 300]),
            layers=draw.choice([1, 2, 3]),
            hidden=draw.choice([12, 24, 40]),
            heads=heads,
            kv_heads=draw.choice([k for k in (1, 2, 3, 6) if heads % k == 0]),
            head_dim=draw.choice([4, 6, 8]),
            ffn=draw.choice([20, 33, 96]),
            max_seq=32,
            norm=draw.choice(["rms", "layer"]),
            positions=draw.choice(["rope", "learned", "none"]),
            activation=draw.choice(["swiglu", "gelu", "relu"]),
            tie_embeddings=draw.random() < 0.5,
            bias=draw.random() < 0.5,
            embed_norm=draw.random() < 0.3,
            parallel_block=draw.random() < 0.3,
        )


CONFIGS = [*some_configs(25), *PRESETS.values()]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_parameters_are_those_of_the_model(config):
    few = replace(config, layers=min(config.layers, 3))  # a block is like the next
    model = Transformer(few, device="meta")
    sizes = [p.numel() for p in model.parameters()]
    assert costs.parameter_sizes(few) == sizes
    assert costs.parameters(few) == sum(sizes)
    assert costs.parameters(config) == sum(costs.parameter_sizes(config))


def test_published_parameter_counts():
    assert costs.parameters(PRESETS["gpt2"]) == 124_439_808
    assert costs.parameters(PRESETS["llama3-8b"]) == 8_030_261_248


def counted(config, batch, seq, recompute):
    model = Transformer(config)
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    tokens = torch.zeros(batch, seq + 1, dtype=torch.long)
    step = partial(accumulate, model, [Batch.from_sequences(tokens)], TokenLoss(1))
    with torch.no_grad():
        positions = torch.arange(seq).expand(batch, seq)
        forward = costs.count_flops(lambda: model(tokens[:, :-1], positions))
    return forward, costs.count_flops(step)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("number", range(8))
def test_operations_are_those_counted(number, recompute):
    config = [*some_configs(8, seed=1)][number]
    batch, seq = 1 + number % 3, (1, 7, 16)[number % 3]
    forward, step = counted(config, batch, seq, recompute)
    assert costs.forward_flops(config, batch, seq) == forward
    # Early-stopping recomputation leaves out the last product of each block.
    last = formulas.matmul_flops(batch * seq, config.hidden * config.ffn)
    saved = config.layers * last if recompute else 0
    assert costs.step_flops(config, batch, seq, recompute) - saved == step


def test_model_operations_are_six_per_parameter_and_token_plus_attention():
    config = ModelConfig(vocab_size=64, layers=2, hidden=16, heads=2, norm="rms")
    matrices = (
        sum(p.numel() for p in Transformer(config, "meta").parameters() if p.ndim == 2)
        - config.vocab_size * config.hidden
    )
    batch, seq = 3, 8
    linear = 6 * batch * seq * matrices
    attention = 12 * config.layers * batch * config.hidden * seq**2  # PaLM, appendix B
    assert costs.model_flops(config, batch, seq) == linear + attention


def test_utilization():
    config = PRESETS["llama3-8b"]
    needed, done = costs.model_flops(config, 1, 8192), costs.step_flops(config, 1, 8192)
    assert costs.mfu(config, 1, 8192, 2.0, needed, 4) == 1 / 8
    assert costs.hfu(config, 1, 8192, 2.0, done) == 1 / 2
    again = costs.hfu(config, 1, 8192, 1.0, needed, recompute=True)
    assert 4 / 3 < again < 3 / 2  # a fourth forward, and attention's own


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_biases", lambda *_: 0),
        ("norm_parameters", lambda hidden, centred, bias: hidden * (1 + centred)),
        (
            "block_matrices",
            lambda h, a, k, d, f, gated: 4 * h * h + (2 + gated) * h * f,
        ),
    ],
)
def test_wrong_parameter_counts_are_noticed(monkeypatch, name, wrong):
    monkeypatch.setattr(formulas, name, wrong)
    configs = [*some_configs(25)]
    models = [
        sum(p.numel() for p in Transformer(c, "meta").parameters()) for c in configs
    ]
    assert any(costs.parameters(c) != n for c, n in zip(configs, models, strict=True))
