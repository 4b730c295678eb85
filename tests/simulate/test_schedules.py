"""Schedules as data: complete, in an order that can be kept, as large as published."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as peer

from minitrain.simulate.pipeline import check
from minitrain.simulate.schedules import ALIASES, SCHEDULES, Schedule, Task, in_flight
from minitrain.simulate.schedules import schedule as make

SMALL = 12


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.integers(1, SMALL),
    micro_batches=st.integers(1, 3 * SMALL),
    chunks=st.integers(1, 4),
)
def test_a_schedule_of_any_size_can_be_run(name, stages, micro_batches, chunks):
    """Complete, each pass after what it needs, and no rank waits for ever."""
    if name != "interleaved":
        chunks = 0
    plan = make(name, stages, micro_batches, chunks)
    check(plan)
    kinds = 2 if name in ("gpipe", "1f1b", "interleaved") else 3
    assert len(plan.tasks) == stages
    assert {len(row) for row in plan.tasks} == {micro_batches * plan.chunks * kinds}


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(2, 4), st.integers(1, 45))
def test_groups_of_micro_batches_run_or_are_refused(stages, micro, chunks, group):
    last = micro % group if group < micro else 0
    if group < micro and (group < stages or 0 < last < stages):
        with pytest.raises(ValueError, match=f"groups of {group}"):
            make("interleaved", stages, micro, chunks, group)
    else:
        check(make("interleaved", stages, micro, chunks, group))


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "chunks", "held"),
    [
        ("gpipe", 4, 8, 1, [8, 8, 8, 8]),
        ("1f1b", 8, 16, 1, [8, 7, 6, 5, 4, 3, 2, 1]),  # min(m, p - s)
        ("1f1b", 4, 2, 1, [2, 2, 2, 1]),
        ("interleaved", 4, 8, 2, [11, 9, 7, 5]),  # 2(p-1-r) + (v-1)p + 1
        ("interleaved", 8, 16, 2, [23, 21, 19, 17, 15, 13, 11, 9]),
        ("zb-h1", 8, 24, 1, [8] * 8),  # p on each rank
        ("zb-h2", 8, 24, 1, [15] * 8),  # 2p - 1
        ("zb-v", 8, 24, 2, [16] * 8),  # p, in chunks
        ("v-half", 4, 12, 2, [6] * 4),  # (p + 2) // 2 of two chunks
        ("v-half", 8, 64, 2, [10] * 8),
        ("v-half", 9, 27, 2, [10] * 9),
    ],
)
def test_activations_in_flight_are_those_published(
    name, stages, micro_batches, chunks, held
):
    assert in_flight(make(name, stages, micro_batches, chunks)) == held


def test_larger_groups_hold_more():
    plain = in_flight(make("interleaved", 4, 16, 2))
    assert in_flight(make("interleaved", 4, 16, 2, group=8))[0] == plain[0] + 4
    assert in_flight(make("interleaved", 4, 9, 2))[0] == plain[0] + 1  # groups of 4, 5


def order(tasks: tuple[Task, ...], plan: Schedule, rank: int) -> list[str]:
    return [f"{plan.place(rank, c)}{kind}{micro}" for kind, micro, c in tasks]


def of_torch(kind: type, stages: int, micro_batches: int, chunks: int) -> list:
    """The orders that torch's pipelines use, without a process group."""
    made = object.__new__(kind)
    made.pp_group_size, made.n_local_stages = stages, chunks
    made._n_microbatches, made.num_stages = micro_batches, stages * chunks
    made.microbatches_per_round = stages
    words = {"FORWARD": "F", "FULL_BACKWARD": "BW"}
    words |= {"BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [
        [
            f"{a.stage_index}{words[a.computation_type.name]}{a.microbatch_index}"
            for a in made._calculate_single_rank_operations(rank)
            if a is not None
        ]
        for rank in range(stages)
    ]


@pytest.mark.parametrize(
    ("name", "kind", "stages", "micro_batches", "chunks"),
    [
        ("interleaved", peer.ScheduleInterleaved1F1B, 4, 8, 2),
        ("interleaved", peer.ScheduleInterleaved1F1B, 3, 12, 4),
        ("zb-v", peer.ScheduleZBVZeroBubble, 4, 8, 2),
        ("zb-v", peer.ScheduleZBVZeroBubble, 5, 17, 2),
    ],
)
def test_the_order_is_the_one_of_torch(name, kind, stages, micro_batches, chunks):
    plan = make(name, stages, micro_batches, chunks)
    ours = [order(row, plan, rank) for rank, row in enumerate(plan.tasks)]
    assert ours == of_torch(kind, stages, micro_batches, chunks)


def test_a_schedule_is_printed_rank_by_rank():
    text = str(make("1f1b", 2, 3))
    assert text == "rank 0: F0 F1 BW0 F2 BW1 BW2\nrank 1: F0 BW0 F1 BW1 F2 BW2"
    assert "F1.1" in str(make("zb-v", 2, 4))
    assert repr(make("1f1b", 2, 3)).startswith("<1f1b: 2 ranks, 3 micro-batches")


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_a_published_name_is_another_word(name):
    chunks = 2 if ALIASES[name] == "interleaved" else 0
    assert make(name, 4, 8, chunks) == make(ALIASES[name], 4, 8, chunks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 4, 8), "no pipeline schedule is called '2f2b'; there is gpipe"),
        (("1f1b", 0, 8), "0 stages, 8 micro-batches"),
        (("1f1b", 4, 8, 2), "1f1b takes 1 chunks on a rank, not 2"),
        (("zb-v", 4, 8, 3), "zb-v takes 2 chunks on a rank, not 3"),
        (("1f1b", 4, 8, 1, 4), "only interleaved has groups"),
        (("interleaved", 4, 8, 2, 2), "groups of 2, the last of 2"),
        (("interleaved", 4, 9, 2, 4), "9 micro-batches in groups of 4, the last of 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(*arguments)
