"""Closed forms of a step's memory against its trace, to the byte."""

import random
from functools import partial

import pytest
import torch
from test_costs import some_configs
from torch.utils.checkpoint import checkpoint

from minitrain import trace
from minitrain.runtime.memory import running
from minitrain.workload import formulas, memory
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.presets import PRESETS
from minitrain.workload.step import Batch, TokenLoss, accumulate

GPT = ModelConfig(
    vocab_size=512,
    layers=2,
    hidden=64,
    heads=4,
    ffn=128,
    max_seq=64,
    norm="layer",
    positions="learned",
    activation="gelu",
    tie_embeddings=True,
    bias=True,
)


def traced_step(
    config, batch, seq, precision="float32", recompute=False, foreach=False, parts=1
):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = Transformer(config, dtype=dtype)
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if precision == "autocast":
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

    def step():
        accumulate(model, batches, TokenLoss(parts * batch * seq))
        optimizer.step()

    sequences = torch.randint(0, config.vocab_size, (parts * batch, seq + 1))
    batches = [Batch.from_sequences(part) for part in sequences.split(batch)]
    step()  # the optimizer makes its state
    optimizer.zero_grad()
    with trace() as t:
        step()
    return t


def assert_kinds(t, expected):
    assert t.peak_bytes["parameters"] == expected.parameters
    assert t.peak_bytes["gradients"] == expected.gradients
    assert t.peak_bytes["optimizer state"] == expected.optimizer_state
    assert t.peak_bytes["activations"] == expected.activations


def cases(count):
    draw = random.Random(2)
    for config in some_configs(count, seed=3):
        batch, seq = draw.choice([1, 2, 3]), draw.choice([1, 5, 16, 31])
        precision = draw.choice(["float32", "autocast"])
        yield config, batch, seq, precision, draw.random() < 0.5, draw.random() < 0.5


@pytest.mark.parametrize("number", range(40))
def test_every_kind_is_that_of_the_trace(number):
    config, batch, seq, precision, recompute, foreach = [*cases(40)][number]
    t = traced_step(config, batch, seq, precision, recompute, foreach)
    expected = memory.step_memory(
        config, batch, seq, precision, recompute, foreach=foreach
    )
    assert_kinds(t, expected)
    passed = {tuple(live.items()) for _, live in running(t.memory)}
    for name, moment in expected.moments.items():
        live = dict.fromkeys(t.peak_bytes, 0) | moment
        assert tuple(live.items()) in passed, name
    assert expected.peak_bytes <= t.peak_total_bytes <= 1.05 * expected.peak_bytes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("name", ["tiny", "laptop", "laptop-gpt2"])
def test_the_peak_of_the_presets_is_exact(name, precision, recompute):
    t = traced_step(PRESETS[name], 2, 64, precision, recompute)
    expected = memory.step_memory(PRESETS[name], 2, 64, precision, recompute)
    assert_kinds(t, expected)
    assert t.peak_total_bytes == expected.peak_bytes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("name", ["tiny", "laptop", "laptop-gpt2"])
def test_accumulation_keeps_every_gradient_through_the_step(name, precision, recompute):
    config, batch, seq, parts = PRESETS[name], 2, 64, 3
    t = traced_step(config, batch, seq, precision, recompute, parts=parts)
    expected = memory.step_memory(
        config, batch, seq, precision, recompute, accumulating=True
    )
    assert t.at_peak["gradients"] == expected.gradients
    other_parts = (parts - 1) * (8 * batch * (seq + 1) + 8 * seq)  # their data
    sums = 0 if expected.highest == "update" else 4 + 8  # of losses, of tokens
    assert t.peak_total_bytes == expected.peak_bytes + other_parts + sums
    single = memory.step_memory(config, batch, seq, precision, recompute)
    assert expected.peak_bytes - single.peak_bytes > 0.9 * (
        expected.gradients - single.at_peak["gradients"]
    )


def test_sixteen_bits_are_as_counted_but_for_the_norms_statistics():
    """On the CPU these are bfloat16, on GPUs float32: four bytes more in each norm."""
    t = traced_step(GPT, 2, 32, "bfloat16")
    expected = memory.step_memory(GPT, 2, 32, "bfloat16", fused=True)
    norms, tokens = 2 * GPT.layers + 1, 2 * 32
    assert t.peak_bytes["activations"] == expected.activations - 4 * norms * tokens


def test_sixteen_bits_agree_with_korthikanti():
    """34 s b h + 5 a s^2 b bytes a layer, less dropout, with attention's row sums."""
    hidden, heads = 12288, 96
    block = formulas.block_saved_bytes(
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        kept=2,
        readers=2,
        norms=2,
        norm=formulas.norm_saved_bytes(hidden, 1, 2, 1),
        copied=0,
        matmul_bytes=2,
        residual_bytes=2,
    )
    assert block == 32 * hidden + 2 * 8 + 4 * heads


def test_sixteen_bytes_a_parameter():
    for precision, (weight, gradient, state) in memory.STATE.items():
        assert weight + gradient + state == 16, precision
        assert formulas.state_bytes(7, weight, gradient, state) == 7 * 16


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("readers_of_norms", lambda gated, parallel, casts: 1 if parallel else 2),
        ("norm_saved_bytes", lambda hidden, centred, width, fused: 8 if centred else 4),
        ("logits_bytes", lambda tokens, vocab: 2 * tokens * vocab),
        ("attention_in_float32", None),
    ],
)
def test_wrong_forms_are_noticed(monkeypatch, name, wrong):
    if wrong:
        monkeypatch.setattr(formulas, name, wrong)
    else:  # statistics forgotten
        right = formulas.block_saved_bytes
        monkeypatch.setattr(
            formulas,
            "block_saved_bytes",
            lambda h, a, *rest: right(h, a, *rest) - 4 * a,
        )
    config = PRESETS["tiny"]
    t = traced_step(config, 2, 16, "autocast")
    expected = memory.step_memory(config, 2, 16, "autocast")
    assert t.peak_bytes["activations"] != expected.activations


def test_scratch_of_adamw():
    assert memory.adamw_scratch_bytes([[5, 100, 7], [90]]) == 4 * (5 + 200)
    assert memory.adamw_scratch_bytes([[100, 7], [5]], foreach=True) == 4 * 107
