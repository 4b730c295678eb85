"""Memory in closed form: published formulas to the byte, and bytes counted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.simulate import footprint
from minitrain.simulate.estimate import estimate
from minitrain.simulate.hardware import cluster
from minitrain.simulate.plan import SCHEDULES, Experts, Plan
from minitrain.simulate.sizes import sizes
from minitrain.simulate.software import SOFTWARE
from minitrain.workload import costs, formulas
from minitrain.workload.config import ModelConfig
from minitrain.workload.presets import PRESETS, preset

MEGATRON = SOFTWARE["megatron-lm"]
GPTS = {n: preset(f"megatron-{n}") for n in ("22b", "175b", "530b", "1t")}
SEQ = 2048
degrees = st.sampled_from([1, 2, 4, 8])


def block(model: ModelConfig, soft=MEGATRON, **wanted) -> float:
    """What a block keeps of a micro-batch on a rank, in bytes."""
    plan = Plan(**dict(seq=SEQ, global_batch=8) | wanted)  # noqa: C408
    return float(footprint.kept_bytes(sizes(model, plan, 1), soft))


# ---- Korthikanti et al. (arXiv:2205.05198), 16 bits, h hidden, a heads ----


def paper(model: ModelConfig, b: int, t: int, sequence: bool, again: str) -> float:
    """Table 2: bytes of activations a layer."""
    s, h, a = SEQ, model.hidden, model.heads
    whole = s * b * h
    if again == "full":
        return 2 * whole / (t if sequence else 1)
    scores = 5 * a * s / h * (again == "none")
    if sequence:
        return whole / t * (34 + scores)
    return whole * (10 + 24 / t + scores / t)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(GPTS)),
    st.sampled_from([1, 2, 4]),
    degrees,
    st.booleans(),
    st.sampled_from(["none", "selective", "full"]),
)
def test_a_block_keeps_what_the_paper_counts(name, micro_batch, tp, sequence, again):
    found = block(
        GPTS[name],
        micro_batch=micro_batch,
        tp=tp,
        sequence_parallel=sequence,
        recompute=again,
    )
    assert found == pytest.approx(
        paper(GPTS[name], micro_batch, tp, sequence, again), rel=1e-12
    )


def test_equation_2_with_numbers():
    """GPT-3, tensor ranks 8: 2048 * 12288 * (10 + 3 + 5 * 96 * 2048 / (8 * 12288))."""
    assert block(GPTS["175b"], tp=8) == 2048 * 12288 * 23 == 578_813_952


def test_equation_4_with_numbers():
    """The same with sequence parallelism: 2048 * 12288 / 8 * (34 + 80)."""
    found = block(GPTS["175b"], tp=8, sequence_parallel=True)
    assert found == 2048 * 12288 * 114 // 8 == 358_612_992


@pytest.mark.parametrize(
    ("name", "pp", "chunks"), [("175b", 8, 3), ("530b", 35, 3), ("1t", 64, 1)]
)
def test_the_first_stage_holds_the_paper_s_micro_batches(name, pp, chunks):
    """Section 4.2.3: L layers of one micro-batch, (1 + (p - 1) / (p m)) interleaved."""
    model = GPTS[name]
    plan = Plan(
        seq=SEQ,
        global_batch=8 * pp,
        tp=8,
        pp=pp,
        schedule="interleaved" if chunks > 1 else "1f1b",
        interleave=chunks,
        sequence_parallel=True,
    )
    made = estimate(model, plan, f"a100:{pp}x8", MEGATRON)
    more = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1
    whole = model.layers * more * paper(model, 1, 8, True, "none")
    assert made.block_activation_bytes == pytest.approx(whole, rel=1e-12)


def test_flash_attention_keeps_sums_of_rows_and_no_matrix():
    flash = SOFTWARE["megatron-flash"]
    found = block(GPTS["22b"], flash)
    s, h, a = SEQ, 6144, 64
    assert found == s * h * (34 - 2) + s * 4 * a  # no masks of dropout


def test_a_gate_and_few_keys_are_counted():
    """Llama-3 8B: 8 h of two norms, q and o, k and v of 8 heads, three of the MLP."""
    model, flash = preset("llama3-8b"), SOFTWARE["megatron-flash"]
    s, h = SEQ, 4096
    assert block(model, flash) == s * (8 * h + 4 * h + 4 * 1024 + 6 * 14336 + 4 * 32)


def test_context_ranks_share_the_tokens():
    flash, model = SOFTWARE["megatron-flash"], preset("llama3-8b")
    assert block(model, flash, cp=4) == block(model, flash) / 4


def test_narrow_operands_are_kept_at_one_byte():
    flash, model = SOFTWARE["megatron-core"], preset("llama3-8b")
    saved = block(model, flash) - block(model, replace(flash, narrow=1.0))
    assert saved == SEQ * (2 * 4096 + 4096 + 14336)


# ---- ZeRO (arXiv:1910.02054) ----


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)]
)
def test_zero_as_in_its_first_figure(zero, gigabytes):
    """Figure 1: 7.5 billion parameters, 64 ranks, Adam: 2, 2 and 12 bytes."""
    model = preset("megatron-7.5b")
    plan = Plan(seq=SEQ, global_batch=64, dp=64, zero=zero)
    soft = replace(MEGATRON, gradient_bytes=2)
    found = footprint.rank_bytes(sizes(model, plan, 8), soft)
    assert sum(found[:3]) / 1e9 == pytest.approx(gigabytes, rel=0.02)


@settings(deadline=None)
@given(degrees, degrees, st.sampled_from([2, 16]), st.sampled_from(["22b", "175b"]))
def test_zero_divides_one_kind_more_at_each_stage(tp, pp, dp, name):
    asked = dict(seq=SEQ, global_batch=dp * 8, tp=tp, pp=pp, dp=dp)  # noqa: C408
    at = [
        [
            float(kind)
            for kind in footprint.rank_bytes(
                sizes(GPTS[name], Plan(**asked, zero=zero), 1), MEGATRON
            )
        ]
        for zero in range(4)
    ]
    divided = {1: (2,), 2: (1, 2), 3: (0, 1, 2)}
    for zero, kinds in divided.items():
        for kind in range(3):
            share = dp if kind in kinds else 1
            assert at[zero][kind] == pytest.approx(at[0][kind] / share)
        assert at[zero][3] == at[0][3]
    sums = [sum(row[:3]) for row in at]
    assert sums == sorted(sums, reverse=True)
    assert [row[4] > 0 for row in at] == [False, False, False, True]


def test_a_group_of_shards_divides_by_its_ranks():
    plan = Plan(seq=SEQ, global_batch=64, dp=64, zero=1, shard_ranks=8)
    whole = replace(plan, zero=0, shard_ranks=0)
    state, all_state = (
        footprint.rank_bytes(sizes(GPTS["22b"], p, 8), MEGATRON)[2]
        for p in (plan, whole)
    )
    assert state == pytest.approx(all_state / 8)


def test_experts_are_spread_over_their_ranks():
    """8 experts, of which a rank has one; their state on ranks with the same one."""
    model = preset("llama3-8b")
    experts = Experts(count=8, top_k=2, ffn=14336)
    soft = SOFTWARE["megatron-core"]
    plan = Plan(seq=SEQ, global_batch=64, dp=64, ep=8, zero=1)
    s = sizes(model, plan, 8, experts)
    each = 3 * 4096 * 14336
    rest = 32 * 2 * 4096 * (4096 + 1024) + 2 * 128256 * 4096
    weights, gradients, state, *_ = footprint.rank_bytes(s, soft)
    assert weights == 2 * (32 * each + rest)
    assert gradients == 4 * (32 * each + rest)
    assert state == pytest.approx(12 * (32 * each / 8 + rest / 64))


# ---- parameters ----


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_matrices_and_tables_are_all_but_vectors_of_the_parameters(name):
    """What is left out: norms, biases and learned positions."""
    model = preset(name)
    s = sizes(model, Plan(seq=128, global_batch=1), 1)
    vectors = costs.parameters(model) - s.stage_parameters
    table = model.max_seq * model.hidden if model.positions == "learned" else 0
    norm = formulas.norm_parameters(
        model.hidden, int(model.norm == "layer"), int(model.bias)
    )
    block = sum(costs.block_sizes(model)) - costs.block_matrices(model)
    norms = norm * (1 + model.embed_norm)
    assert vectors == table + norms + model.layers * block
    if model.hidden >= 4096:
        assert vectors < 2e-3 * costs.parameters(model)


@pytest.mark.parametrize("name", ["22b", "1t"])
def test_ranks_together_hold_the_model(name):
    """And the embedding once more, for the head: it is tied across stages."""
    model = GPTS[name]
    alone = sizes(model, Plan(seq=128, global_batch=1), 1).stage_parameters
    split = sizes(model, Plan(seq=128, global_batch=1, tp=8), 1).stage_parameters
    assert 8 * split == alone
    stages = 8
    plan = Plan(seq=128, global_batch=8, tp=8, pp=stages)
    first = sizes(model, plan, 1).stage_parameters
    table = model.vocab_size * model.hidden
    assert 8 * stages * first == alone - table + stages * table


# ---- what waits ----


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_holds_more_than_the_step_has(name):
    for count in (1, 4, 64):
        plan = Plan(seq=SEQ, global_batch=count, pp=8, schedule=name)
        held = footprint.waiting_micro_batches(sizes(GPTS["22b"], plan, 1))
        assert 1 <= held <= count


def test_schedules_hold_what_their_papers_say():
    def held(name, count=64, chunks=1):
        plan = Plan(seq=SEQ, global_batch=count, pp=8, schedule=name, interleave=chunks)
        return float(footprint.waiting_micro_batches(sizes(GPTS["175b"], plan, 1)))

    assert held("gpipe") == 64  # arXiv:1811.06965
    assert held("1f1b") == 8  # arXiv:2104.04473, section 2.2
    assert held("interleaved", chunks=3) == pytest.approx(8 + 7 / 3)
    assert 8 <= held("zb-h1") < 9  # arXiv:2401.10241, table 1
    assert 15 <= held("zb-h2") < 16
    assert held("vocab-1") == 10  # arXiv:2411.05288, figures 8 and 10
    assert held("vocab-2") == 9
    assert held("interlaced") == 12


def test_the_last_stage_counts_where_its_logits_are_many():
    """A small model with a large vocabulary: logits outweigh what waits in front."""
    model = ModelConfig(vocab_size=256_000, layers=4, hidden=512, heads=8, max_seq=SEQ)
    plan = Plan(seq=SEQ, global_batch=16, micro_batch=4, pp=2)
    soft = SOFTWARE["megatron-core"]
    held = estimate(model, plan, "h100:1x2", soft).memory["activations"]
    logits = 4 * SEQ * 256_000 * soft.logit_bytes
    assert logits < held < 1.2 * logits


def test_gpipe_keeps_all_micro_batches_beside_the_logits():
    """On every stage, so that the last one with its logits is the fullest."""
    soft, count = SOFTWARE["megatron-core"], 16
    plan = Plan(seq=SEQ, global_batch=count, pp=4, schedule="gpipe")
    model = preset("llama3-8b")
    held = estimate(model, plan, "h100:1x4", soft).memory["activations"]
    logits = SEQ * 128_256 * soft.logit_bytes
    kept = count * 8 * block(model, soft)
    assert held > kept + logits
    assert held < kept + logits + (count + 2) * 2 * SEQ * 4096


def test_a_folded_pipeline_has_both_ends_on_one_rank():
    """ZB-V (arXiv:2401.10241, section 6): embedding, head and logits on the first."""
    model, soft = preset("llama3-8b"), SOFTWARE["megatron-core"]
    plan = Plan(seq=SEQ, global_batch=16, pp=4)
    straight = estimate(model, plan, "h100:1x4", soft)
    folded = estimate(model, replace(plan, schedule="zb-v"), "h100:1x4", soft)
    table = 2 * 128_256 * 4096
    assert folded.memory["weights"] == straight.memory["weights"] + table
    assert folded.memory["activations"] > straight.memory["activations"]


def test_what_is_alive_in_a_backward_pass_counts():
    """On a first stage, without logits: what waits, the stream, half a block."""
    model, soft = (
        replace(preset("llama3-8b"), vocab_size=1024),
        SOFTWARE["megatron-core"],
    )
    plan = Plan(seq=SEQ, global_batch=16, pp=8)
    held = estimate(model, plan, "h100:1x8", soft).memory["activations"]
    one, stream = block(model, soft), 2 * SEQ * 4096
    assert held == pytest.approx((8 * 4 + 0.5) * one + 9 * stream)
    whole = replace(plan, recompute="full")
    held = estimate(model, whole, "h100:1x8", soft).memory["activations"]
    assert held == pytest.approx(8 * 4 * stream + one + 9 * stream)


def test_zero_3_holds_two_gathered_blocks_and_a_gradient():
    """Weights of 2 bytes of this block and the next one, a gradient of 4 bytes."""
    model, soft = preset("llama3-8b"), SOFTWARE["megatron-core"]
    plan = Plan(seq=SEQ, global_batch=8, dp=8, zero=3)
    made = estimate(model, plan, "h100:1x8", soft)
    parameters = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    assert made.memory["buffers"] == (2 * 2 + 4) * parameters


# ---- bytes that torch counted in Megatron-LM's own tests ----

GOLDEN = """
 tp pp cp dp sp v zero recompute flash dropout  vocab untied  largest
  2  2  2  1  y 1    0      none     1       0  50432      n    935253504  h100
  1  4  1  2  n 3    0      none     0       1  50304      n   4161191424  h100
  1  4  1  2  n 3    1      none     0       1  50304      n   3942493696  h100
  1  4  1  2  n 3    0      none     1       1  50304      n   2677510144  gb200
  1  4  1  2  n 1    0      none     1       1  50304      y   2205987840  a100
  1  1  1  8  n 1    0      full     1       1  50304      n   2536167424  a100
  2  2  1  2  n 1    0      none     1       1  50432      n   1409821184  a100
  1  1  1  4  n 1    1      none     0       1  50304      n   4801303040  gb200
  4  1  1  1  n 1    1      none     1       1  50688      n   1158360064  gb200
  4  1  1  2  n 1    0      none     0       1  50688      n   1649299456  a100
"""
"""NVIDIA/Megatron-LM, tests/functional_tests/test_cases/gpt: `mem-max-allocated-bytes`
of the golden values of gpt3_mcore_te_ tp2_pp2_cp2, tp1_pp4_vp1,
tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_overlap_optimizer,
tp1_pp4_vp1_resume_torch_decoupled_lr,
tp1_pp4_resume_torch_dist_untie_embeddings_and_outputs,
tp1_pp1_resume_torch_dist_uniform_full_recompute,
tp2_pp2_resume_torch_dist_ddp_average_in_collective,
tp1_pp1_dist_optimizer_fim_dataset_1node,
tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce and
tp4_pp1_qk_layernorm_test_mode. All: 12 blocks of 512, 8 heads, 1,024 tokens, 4
sequences in a micro-batch and 32 in a step; vocabularies padded to 128 * tp."""


@pytest.mark.parametrize("line", GOLDEN.strip().splitlines()[1:])
def test_the_largest_allocation_is_predicted(line):
    tp, pp, cp, dp, sp, v, zero, again, flash, dropout, vocab, untied, seen, device = (
        line.split()
    )
    model = ModelConfig(
        vocab_size=int(vocab),
        layers=12,
        hidden=512,
        heads=8,
        max_seq=1024,
        norm="layer",
        positions="learned",
        activation="gelu",
        tie_embeddings=untied == "n",
        bias=True,
    )
    chunks = int(v)
    plan = Plan(
        seq=1024,
        global_batch=32,
        micro_batch=4,
        tp=int(tp),
        pp=int(pp),
        cp=int(cp),
        dp=int(dp),
        sequence_parallel=sp == "y",
        schedule="interleaved" if chunks > 1 else "1f1b",
        interleave=chunks,
        zero=int(zero),
        recompute=again,
    )
    soft = replace(
        SOFTWARE["megatron-core"], flash=float(flash), dropout=float(dropout)
    )
    made = estimate(model, plan, cluster(f"{device}:1x{plan.world_size}"), soft)
    assert made.memory_bytes == pytest.approx(int(seen), rel=0.05)


def test_the_largest_allocation_of_a_model_of_7_billion_is_predicted():
    """The same tests, gpt3_7b_tp1_pp4_memory_speed on H100: 8 chunks of one block."""
    model = ModelConfig(
        vocab_size=131_200,
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=16_384,
        max_seq=8192,
        norm="layer",
        positions="learned",
        activation="gelu",
        tie_embeddings=False,
        bias=True,
    )
    plan = Plan(
        seq=8192,
        global_batch=8,
        pp=4,
        dp=2,
        schedule="interleaved",
        interleave=8,
        zero=1,
    )
    soft = replace(SOFTWARE["megatron-core"], dropout=1.0)
    made = estimate(model, plan, "h100:1x8", soft)
    assert made.memory_bytes == pytest.approx(60_720_852_992, rel=0.05)
