"""What is asked and answered: intervals, utilization, operations, errors in words."""

from dataclasses import replace

import numpy as np
import pytest

from minitrain.simulate import estimate as predicting
from minitrain.simulate.estimate import (
    EXPERTS_WIDER,
    GUARD,
    HALF_WIDTH,
    SPARSE,
    UNKNOWN_WIDER,
    Estimate,
    estimate,
    evaluate,
    flops,
    interval,
    sweep,
)
from minitrain.simulate.footprint import KINDS
from minitrain.simulate.hardware import cluster
from minitrain.simulate.plan import Experts, Plan
from minitrain.simulate.sizes import Sizes, sizes, stack
from minitrain.simulate.software import SOFTWARE
from minitrain.simulate.step import PARTS
from minitrain.workload import costs
from minitrain.workload.config import ModelConfig
from minitrain.workload.presets import preset

LLAMA = preset("llama3-8b")
GPT = preset("megatron-175b")
PLAN = Plan(seq=8192, global_batch=64, tp=8, dp=2, sequence_parallel=True, zero=1)
MADE = estimate(LLAMA, PLAN, "h100:2x8")


# ---- what is answered ----


def test_an_estimate_hangs_together():
    assert list(MADE.parts) == list(PARTS) and list(MADE.memory) == list(KINDS)
    assert MADE.step_seconds == pytest.approx(sum(MADE.parts.values()))
    assert MADE.memory_bytes == pytest.approx(sum(MADE.memory.values()))
    assert MADE.tokens_per_second == 64 * 8192 / MADE.step_seconds
    assert MADE.tokens_per_second_per_device == MADE.tokens_per_second / 16
    assert MADE.model_flops == costs.model_flops(LLAMA, 64, 8192)
    done = MADE.step_seconds * 16 * 989.4e12
    assert MADE.mfu == pytest.approx(MADE.model_flops / done) == MADE.hfu
    assert MADE.mfu == costs.mfu(LLAMA, 64, 8192, MADE.step_seconds, 989.4e12, 16)
    assert isinstance(MADE, Estimate) and MADE.cluster.world_size == 16


def test_utilization_is_of_the_16_bit_units_whatever_the_precision():
    eight = estimate(LLAMA, replace(PLAN, precision="fp8"), "h100:2x8")
    done = eight.step_seconds * 16 * 989.4e12
    assert eight.mfu == pytest.approx(eight.model_flops / done)
    assert eight.step_seconds < MADE.step_seconds
    volta = Plan(seq=1024, global_batch=1, precision="fp16")
    old = estimate(preset("gpt2"), volta, "v100:1x1")
    assert old.mfu == pytest.approx(old.model_flops / old.step_seconds / 125e12)


def test_a_cluster_and_software_may_be_named_or_given():
    rules = predicting.find_software("megatron-core", "H100", "bf16")
    given = estimate(LLAMA, PLAN, cluster("h100:2x8"), rules)
    assert given.step_seconds == MADE.step_seconds
    plain = estimate(LLAMA, PLAN, "h100:2x8", SOFTWARE["megatron-core"])
    assert plain.step_seconds != MADE.step_seconds  # without what was fitted


def test_a_plan_fits_with_a_guard_to_spare():
    def of(memory_bytes: float) -> Estimate:
        return replace(MADE, memory={"weights": memory_bytes})

    whole = MADE.cluster.accelerator.memory_bytes
    assert GUARD == 0.05
    assert of(0.95 * whole).fits and not of(0.951 * whole).fits
    big = estimate(GPT, Plan(seq=2048, global_batch=8, tp=8), "h100:1x8")
    assert not big.fits and big.memory_bytes > whole
    assert MADE.fits


# ---- intervals ----


def width(made: Estimate) -> float:
    low, high = made.interval
    middle = (low + high) / 2
    assert middle == pytest.approx(made.step_seconds)
    return (high - low) / 2 / middle


def test_an_interval_is_wider_where_less_is_known():
    experts = Experts(count=8, top_k=2, ffn=14336)
    assert width(MADE) == pytest.approx(HALF_WIDTH)
    routed = estimate(LLAMA, PLAN, "h100:2x8", "megatron-core", experts)
    assert width(routed) == pytest.approx(HALF_WIDTH * EXPERTS_WIDER)
    unknown = estimate(LLAMA, PLAN, "mi300x:2x8")  # neither the chip nor its software
    assert width(unknown) == pytest.approx(HALF_WIDTH * UNKNOWN_WIDER**2)
    borrowed = estimate(LLAMA, PLAN, "a100:2x8")
    assert width(borrowed) == pytest.approx(HALF_WIDTH * UNKNOWN_WIDER)
    sparse = estimate(LLAMA, PLAN, "h100:2x8", "fsdp")
    assert width(sparse) == pytest.approx(HALF_WIDTH * UNKNOWN_WIDER)
    all_of_it = estimate(LLAMA, PLAN, "mi300x:2x8", "fsdp", experts)
    widest = HALF_WIDTH * EXPERTS_WIDER * UNKNOWN_WIDER**2
    assert width(all_of_it) == pytest.approx(widest) and widest < 1
    assert set(SPARSE) <= set(SOFTWARE)


def test_an_interval_scales_with_the_step():
    low, high = interval(
        10.0, cluster("h100:2x8"), PLAN, None, SOFTWARE["megatron-core"]
    )
    assert (low, high) == pytest.approx((10 * (1 - HALF_WIDTH), 10 * (1 + HALF_WIDTH)))


# ---- operations, by hand ----


def test_operations_of_gpt_are_those_of_the_paper():
    """Narayanan et al. (arXiv:2104.04473), equation 3: 96 B s l h^2 (1 + s/6h + ..)."""
    b, s, layers, h, v = 64, 2048, 96, 12288, 51200
    paper = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    plan = Plan(seq=s, global_batch=b, recompute="full")
    again = flops(GPT, None, plan, hardware=True)
    assert again == pytest.approx(paper, rel=1e-12)
    plain = flops(GPT, None, plan)
    blocks = paper - 6 * b * s * h * v  # of which a fourth is done again
    assert again - plain == pytest.approx(blocks / 4)


def test_selective_recomputation_does_the_core_again():
    """4 b s^2 h a layer (arXiv:2205.05198, appendix A)."""
    plan = Plan(seq=2048, global_batch=64, recompute="selective")
    more = flops(GPT, None, plan, hardware=True) - flops(GPT, None, plan)
    assert more == 96 * 4 * 64 * 2048**2 * 12288
    none = replace(plan, recompute="none")
    assert flops(GPT, None, none, hardware=True) == flops(GPT, None, none)


def test_experts_count_as_often_as_a_token_passes_them():
    """32 blocks of 4096: attention, two of eight experts and a shared one; the head."""
    experts = Experts(count=8, top_k=2, ffn=1000, shared_ffn=500)
    plan = Plan(seq=128, global_batch=2)
    tokens = 256
    attention = 2 * 4096 * (32 + 8) * 128
    passed = 3 * 4096 * (2 * 1000 + 500)
    matrices = 32 * (attention + passed) + 4096 * 128256
    core = 32 * 4 * 2 * 32 * 128**2 * 128
    assert flops(LLAMA, experts, plan) == 3 * (2 * tokens * matrices + core)


def test_dense_blocks_and_a_latent_count_as_they_are():
    """3 of 32 blocks keep their MLP of 14336; attention's matrices are 0.4 as large."""
    experts = Experts(count=8, top_k=2, ffn=1000, dense_layers=3, latent=0.4)
    plan = Plan(seq=128, global_batch=1)
    attention = 0.4 * 2 * 4096 * (32 + 8) * 128
    mlps = 29 * 3 * 4096 * 2 * 1000 + 3 * 3 * 4096 * 14336
    matrices = 32 * attention + mlps + 4096 * 128256
    core = 32 * 4 * 32 * 128**2 * 128
    assert flops(LLAMA, experts, plan) == pytest.approx(3 * (256 * matrices + core))


def test_experts_as_wide_as_the_mlp_are_the_mlp():
    """One expert of its width: as many operations, parameters and bytes."""
    alone = Experts(count=1, top_k=1, ffn=LLAMA.ffn)
    plan = Plan(seq=1024, global_batch=4)
    assert flops(LLAMA, alone, plan) == flops(LLAMA, None, plan)
    routed, dense = sizes(LLAMA, plan, 1, alone), sizes(LLAMA, plan, 1)
    assert routed.block_parameters == dense.block_parameters
    slow = estimate(LLAMA, plan, "h100:1x1", experts=alone)
    assert slow.memory["weights"] == pytest.approx(
        estimate(LLAMA, plan, "h100:1x1").memory["weights"]
    )


def test_experts_take_no_more_of_a_step_than_their_operations_allow():
    experts = Experts(count=8, top_k=2, ffn=14336)
    made = estimate(LLAMA, replace(PLAN, ep=8), "h100:2x8", experts=experts)
    assert made.hfu < 1
    assert made.step_seconds > MADE.step_seconds
    twice = estimate(
        LLAMA, replace(PLAN, ep=8), "h100:2x8", experts=replace(experts, imbalance=2.0)
    )
    assert twice.step_seconds > made.step_seconds


# ---- a layer, as papers print it ----


def test_a_layer_is_what_its_parts_sum_to():
    plan = Plan(seq=2048, global_batch=4, micro_batch=4, tp=8)
    for again in ("none", "selective", "full"):
        made = estimate(
            preset("megatron-22b"),
            replace(plan, recompute=again),
            "a100:1x8",
            "megatron-lm",
        )
        names = PARTS[:4] + PARTS[5:7]
        blocks = sum(made.parts[name] for name in names)
        each = made.forward_seconds + made.block_backward_seconds
        assert blocks == pytest.approx(48 * each)


def test_the_state_of_a_block_is_18_bytes_a_parameter():
    """2 + 4 + 12; GPT 22B, 8 tensor ranks: 12 h^2 a block."""
    plan = Plan(seq=2048, global_batch=4, tp=8)
    made = estimate(preset("megatron-22b"), plan, "a100:1x8", "megatron-lm")
    assert made.block_state_bytes == 48 * 18 * 12 * 6144**2 / 8


# ---- errors in words ----


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            (LLAMA, PLAN, "h100:1x8"),
            r"tp\*pp\*cp\*dp = 8\*1\*1\*2 = 16 devices, and the cluster has 8",
        ),
        ((LLAMA, PLAN, "abacus:2x8"), "no accelerator 'abacus'"),
        ((LLAMA, PLAN, "h100"), "NAME:HOSTSxPER_HOST"),
        ((LLAMA, PLAN, "h100:2x8", "abacus"), "no software 'abacus': there is"),
        (
            (LLAMA, replace(PLAN, precision="fp8"), "a100:2x8"),
            "A100 has no fp8; it has fp32",
        ),
        (
            (LLAMA, replace(PLAN, tp=5, dp=1), "h100:1x5"),
            "tp=5 does not divide heads=32",
        ),
        (
            (LLAMA, replace(PLAN, global_batch=63), "h100:2x8"),
            "global_batch=63 is not a multiple",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(asked, said):
    with pytest.raises(ValueError, match=said):
        estimate(*asked)


# ---- many ----


def test_a_sweep_has_an_axis_of_plans_even_where_all_agree():
    for plans in ([PLAN], [PLAN, PLAN], [PLAN, replace(PLAN, zero=2)]):
        found = sweep(LLAMA, plans, "h100:2x8")
        count = len(plans)
        assert found["step_seconds"].shape == found["memory_bytes"].shape == (count,)
        assert found["parts"].shape == (len(PARTS), count)
        assert found["kinds"].shape == (len(KINDS), count)
        assert found["step_seconds"][0] == pytest.approx(MADE.step_seconds)


def test_a_sweep_refuses_what_it_cannot_price_together():
    with pytest.raises(ValueError, match="there is no plan"):
        sweep(LLAMA, [], "h100:2x8")
    eight = replace(PLAN, precision="fp8")
    with pytest.raises(ValueError, match="one precision: bf16, fp8"):
        sweep(LLAMA, [PLAN, eight], "h100:2x8")
    with pytest.raises(ValueError, match="devices, and the cluster has 8"):
        sweep(LLAMA, [PLAN], "h100:1x8")


def test_records_stack_into_columns_where_they_differ():
    rows = [sizes(LLAMA, replace(PLAN, zero=zero), 2) for zero in (0, 1)]
    table = stack(rows)
    assert isinstance(table, Sizes) and table.hidden == 4096.0
    assert table.zero.tolist() == [0, 1] and table.zero.flags["C_CONTIGUOUS"]


def test_sizes_are_those_of_the_plan():
    tall = ModelConfig(vocab_size=1000, layers=10, hidden=64, heads=4, kv_heads=2)
    plan = Plan(seq=128, global_batch=12, pp=4, dp=3, zero=1, stage_layers=(2, 3, 4, 1))
    s = sizes(tall, plan, 5)
    assert (s.first_layers, s.last_layers, s.stage_layers) == (2, 1, 4)
    assert (s.shard_ranks, s.hosts, s.micro_batches) == (3, 5, 4)
    block = 2 * 64 * (4 + 2) * 16 + 3 * 64 * tall.ffn
    assert s.block_parameters == block
    assert s.stage_parameters == 4 * block + 1000 * 64
    assert (s.moe, s.experts, s.latent, s.rope, s.gated) == (0, 1, 1, 1, 1)


def test_a_slower_machine_is_slower():
    """Power and losses of links reach the records that are priced."""
    limited = replace(cluster("h100:2x8"), power_derate=0.5)
    weak = estimate(LLAMA, PLAN, limited)
    for name, least in (("matrix products", 1.8), ("attention", 1.5)):
        assert least < weak.parts[name] / MADE.parts[name] <= 2
    assert weak.step_seconds > MADE.step_seconds
    soft = replace(MADE.software, inside_share=0.5)
    slow = estimate(LLAMA, PLAN, "h100:2x8", soft)
    name = "tensor, context and expert messages"
    assert 1.5 < slow.parts[name] / MADE.parts[name] < 2.1
    rails = replace(MADE.software, rails=1, data_hidden=0, gather_hidden=0)
    wide = replace(rails, rails=8)
    plan = replace(PLAN, tp=1, dp=16, sequence_parallel=False)
    one, all_cards = (
        estimate(LLAMA, plan, "h100:2x8", soft).parts["data-parallel messages"]
        for soft in (rails, wide)
    )
    assert one > 3 * all_cards


def test_hosts_cost_a_share_each_time_they_double():
    def lost(hosts: int) -> float:
        plan = replace(PLAN, dp=hosts, global_batch=32 * hosts)
        made = estimate(LLAMA, plan, f"h100:{hosts}x8")
        part = made.parts["losses of the software"] - made.software.fixed_seconds
        return part / (made.step_seconds - part) / made.software.jitter

    assert [lost(n) for n in (1, 2, 16)] == pytest.approx([0, 1, 4])
    assert np.isfinite(lost(1024))


def test_threads_give_what_one_gives(monkeypatch):
    """Chunks that do not divide the plans, and an axis on which all agree."""
    plans = [replace(PLAN, micro_batch=b) for b in (1, 2, 1, 1, 2, 2, 1)]
    s = stack([sizes(LLAMA, plan, 2) for plan in plans])
    whole = evaluate(s, cluster("h100:2x8"), "bf16", "megatron-core")
    monkeypatch.setattr(predicting, "CHUNK", 3)
    parts = evaluate(s, cluster("h100:2x8"), "bf16", "megatron-core")
    for name, values in whole.items():
        wide = np.broadcast_to(values, parts[name].shape)
        assert parts[name] == pytest.approx(wide, rel=1e-12)
        assert parts[name].shape[-1] == 7
