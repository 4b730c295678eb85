"""The ledger's lines against sums done by hand."""

import pytest

from minitrain import ledger
from minitrain.ledger import RUN
from minitrain.workload import costs
from minitrain.workload.presets import preset


def test_the_run_is_the_model_it_says():
    assert costs.parameters(preset("llama3-8b")) == RUN.parameters


def test_a_sum_by_rank_0_carries_every_payload_in_and_out():
    assert ledger.through_rank_0_seconds(100, 5, 10.0) == (4 * 100 + 4 * 100) / 10.0
    assert ledger.through_rank_0_seconds(100, 1, 10.0) == 0


def test_chapter_1_by_hand():
    alone, shared = ledger.entries(1)
    flops = 6 * 8_030_261_248 * 4 * 2**20
    assert alone.step_seconds == pytest.approx(flops / (989e12 * 0.4))
    gather = 2 * 63 * 2 * 8_030_261_248 / 50e9
    assert shared.step_seconds == pytest.approx(flops / (64 * 989e12 * 0.4) + gather)
    assert alone.memory_bytes == shared.memory_bytes == 4 * 8_030_261_248


def test_chapter_2_adds_memory_and_attention_and_trades_one_for_the_other():
    *before, plain, recomputed = ledger.entries(2)
    assert before == ledger.entries(1)
    assert plain.memory_bytes > 16 * RUN.parameters > before[-1].memory_bytes
    assert recomputed.memory_bytes < plain.memory_bytes
    gather = ledger.through_rank_0_seconds(2 * RUN.parameters, 64, 50e9)
    work = [line.step_seconds - gather for line in (before[-1], plain, recomputed)]
    assert 1.1 < work[1] / work[0] < 1.3  # attention, less the embedding
    head = 3 * 2 * 4096 * 128256  # operations a token, computed once
    whole = 64 * 989e12 * 0.4 * work[1] / RUN.batch_tokens
    assert work[2] / work[1] == pytest.approx((4 / 3 * (whole - head) + head) / whole)
    assert plain.memory_bytes / 2**30 == pytest.approx(172.6, abs=0.05)
    assert recomputed.memory_bytes / 2**30 == pytest.approx(133.5, abs=0.05)


def test_chapter_3_sends_an_eighth_over_the_network():
    *before, summed = ledger.entries(3)
    assert before == ledger.entries(2)
    assert summed.memory_bytes == before[-1].memory_bytes
    payload = 2 * 8_030_261_248
    inside = 2 * 7 / 8 * payload / 450e9 + 14 * 3.4e-6
    across = 2 * 7 / 8 * payload / 8 / 50e9 + 14 * 14e-6
    assert ledger.all_reduce_seconds(payload) == pytest.approx(inside + across)
    gather = ledger.through_rank_0_seconds(payload, 64, 50e9)
    saved = before[-1].step_seconds - summed.step_seconds
    assert saved == pytest.approx(gather - inside - across)


def test_chapter_4_derives_what_was_assumed():
    *before, derived = ledger.entries(4)
    assert before == ledger.entries(3)
    assert derived.memory_bytes == before[-1].memory_bytes
    made = ledger.derived()
    assert sum(made.parts.values()) == pytest.approx(derived.step_seconds)
    assert made.plan.global_batch * made.plan.seq == RUN.batch_tokens
    assert 0.4 < made.hfu < 0.75  # of an H100 with recomputation


def test_chapter_5_leaves_the_embedding():
    *before, hidden = ledger.entries(5)
    assert before == ledger.entries(4)
    embedding = ledger.all_reduce_seconds(2 * 128256 * 4096)
    summed = ledger.derived().parts["data-parallel messages"]
    left = hidden.step_seconds - (before[-1].step_seconds - summed)
    assert embedding <= left < 1.2 * embedding


def test_what_is_exposed():
    exposed = ledger.exposed_seconds
    assert exposed([1, 2, 3], [0.5, 0.5, 0.5], 3) == pytest.approx(0.5)
    assert exposed([1, 2, 3], [2, 2, 2], 3) == pytest.approx(4)  # the link is behind
    assert exposed([3, 1, 2], [0.5, 0.5, 0.5], 3) == pytest.approx(1.5)  # in order
    assert exposed([1, 2], [0.1, 0.1], 5) == 0
