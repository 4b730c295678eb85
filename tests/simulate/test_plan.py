"""Plans: what is refused, in numbers, and how blocks are shared among stages."""

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.simulate.plan import SCHEDULES, Experts, Plan, balanced_stages
from minitrain.workload.config import ModelConfig
from minitrain.workload.presets import preset

GPT = preset("megatron-175b")
LLAMA = preset("llama3-8b")
MOE = Experts(count=8, top_k=2, ffn=1024)


def plan(**wanted) -> Plan:
    return Plan(**dict(seq=2048, global_batch=64) | wanted)  # noqa: C408


# ---- what cannot be said ----


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"seq": 0}, "seq=0: at least 1"),
        ({"global_batch": 0}, "global_batch=0: at least 1"),
        ({"micro_batch": -1}, "micro_batch=-1: at least 1"),
        ({"interleave": 0}, "interleave=0: at least 1"),
        ({"schedule": "2f2b"}, "schedule='2f2b': one of gpipe, 1f1b, interleaved"),
        ({"recompute": "some"}, "recompute='some': one of none, selective, full"),
        ({"precision": "int8"}, "precision='int8': one of fp32, fp16, bf16, fp8, fp4"),
        ({"zero": 4}, "zero=4: one of 0, 1, 2, 3"),
        ({"tp": 0}, "tp=0"),
        ({"dp": -2}, "dp=-2"),
        ({"cp": 0}, "cp=0"),
        ({"ep": 0}, "ep=0"),
        (
            {"dp": 4, "zero": 1, "shard_ranks": 3},
            "shard_ranks=3 does not divide dp*cp=4",
        ),
        ({"shard_ranks": -1}, "shard_ranks=-1 does not divide dp*cp=1"),
        (
            {"pp": 2, "interleave": 3},
            "interleave=3 needs schedule='interleaved', not '1f1b'",
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_at_once(wanted, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(**wanted)


@pytest.mark.parametrize(
    "sizes",
    [
        {"count": 0, "top_k": 1, "ffn": 64},
        {"count": 4, "top_k": 5, "ffn": 64},
        {"count": 4, "top_k": 0, "ffn": 64},
        {"count": 4, "top_k": 1, "ffn": 0},
    ],
)
def test_experts_that_cannot_be_are_refused(sizes):
    named = [f"{name}={sizes[name]}" for name in ("top_k", "ffn")]
    with pytest.raises(ValueError, match=", ".join(named)):
        Experts(**sizes)


# ---- what a model or a cluster does not allow ----


@pytest.mark.parametrize(
    ("model", "wanted", "experts", "said"),
    [
        (GPT, {"tp": 5}, None, "tp=5 does not divide heads=96"),
        (GPT, {"tp": 5}, None, "tp=5 does not divide ffn=49152"),
        (
            ModelConfig(vocab_size=512, layers=2, hidden=96, heads=12, kv_heads=6),
            {"tp": 4},
            None,
            "tp=4 and kv_heads=6 do not divide one another",
        ),
        (GPT, {"cp": 4, "seq": 2044}, None, "seq=2044 is not a multiple of 2*cp=8"),
        (
            GPT,
            {"pp": 2, "stage_layers": (48, 47)},
            None,
            "stages (48, 47) do not make pp=2 of 96",
        ),
        (
            GPT,
            {"pp": 2, "stage_layers": (96,)},
            None,
            "stages (96,) do not make pp=2 of 96",
        ),
        (
            GPT,
            {"pp": 2, "stage_layers": (97, -1)},
            None,
            "stages (97, -1) do not make pp=2 of 96",
        ),
        (GPT, {"pp": 128}, None, "pp=128 stages of 96 layers"),
        (
            GPT,
            {"schedule": "interleaved", "interleave": 2},
            None,
            "interleave=2 needs more than one stage",
        ),
        (
            GPT,
            {"pp": 48, "schedule": "interleaved", "interleave": 4},
            None,
            "interleave=4 chunks of 2 layers",
        ),
        (LLAMA, {"ep": 2, "dp": 2}, None, "ep=2, and the model has no experts"),
        (LLAMA, {"ep": 3, "dp": 3}, MOE, "ep=3 does not divide experts=8"),
        (LLAMA, {"ep": 4, "dp": 2}, MOE, "ep=4 does not divide dp*cp*tp=2"),
        (GPT, {"dp": 24}, None, "global_batch=64 is not a multiple of dp*micro_batch"),
    ],
)
def test_what_the_model_does_not_allow_is_refused(model, wanted, experts, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(**wanted).check(model, None, experts)


def test_devices_are_compared_with_the_product_of_the_degrees():
    asked = plan(tp=8, pp=4, cp=2, dp=3, global_batch=48)
    said = "tp*pp*cp*dp = 8*4*2*3 = 192 devices, and the cluster has 200"
    with pytest.raises(ValueError, match=re.escape(said)):
        asked.check(GPT, 200)
    asked.check(GPT, 192)


def test_all_reasons_are_given_at_once():
    with pytest.raises(ValueError, match=r"heads=96.*ffn=49152.*pp=128"):
        plan(tp=5, pp=128).check(GPT)


def test_tensor_ranks_may_outnumber_keys():
    plan(tp=16, dp=1).check(LLAMA)  # 8 heads of keys: copied twice


# ---- sums ----


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 200))
def test_stages_share_all_blocks_evenly(stages, layers):
    shares = plan(pp=stages).layers_of_stages(layers)
    assert len(shares) == stages and sum(shares) == layers
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@settings(deadline=None)
@given(*[st.sampled_from([1, 2, 4])] * 4, st.integers(1, 4), st.integers(1, 4))
def test_degrees_multiply_and_micro_batches_share(dp, tp, pp, cp, each, count):
    asked = plan(
        dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=each, global_batch=dp * each * count
    )
    assert asked.world_size == dp * tp * pp * cp == asked.layout.world_size
    assert asked.micro_batches == count


def test_schedules_have_numbers_of_their_own():
    assert len(set(SCHEDULES)) == len(SCHEDULES)


# ---- blocks moved away from the head ----

VOCABULARY = {
    256_000: (4, 4, 4, 5, 5, 5, 5, 0),
    128_000: (4, 4, 4, 4, 4, 5, 5, 2),
    64_000: (4, 4, 4, 4, 4, 4, 5, 3),
}
"""Blocks of each stage in the artifact of arXiv:2411.05288: 32 blocks of 3072."""


def gpt(vocab: int, layers: int = 32, hidden: int = 3072) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        layers=layers,
        hidden=hidden,
        heads=24,
        max_seq=2048,
        activation="gelu",
        norm="layer",
        positions="learned",
    )


@pytest.mark.parametrize("vocab", VOCABULARY)
def test_blocks_move_away_from_the_head_as_published(vocab):
    assert balanced_stages(gpt(vocab), 2048, 8) == VOCABULARY[vocab]


@pytest.mark.parametrize(
    ("vocab", "layers", "stages"),
    list(product((1000, 32_000, 256_000), (8, 24, 47), (2, 4, 8))),
)
def test_moved_blocks_stay_all_there(vocab, layers, stages):
    split = balanced_stages(gpt(vocab, layers), 2048, stages)
    assert len(split) == stages and sum(split) == layers
    assert max(split[:-1]) - min(split[:-1]) <= 1 and split[-1] <= max(split)


def test_one_stage_has_all_blocks():
    assert balanced_stages(gpt(32_000), 2048, 1) == (32,)
