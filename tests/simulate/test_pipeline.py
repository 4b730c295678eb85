"""Schedules replayed with times: published bubbles, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.simulate.pipeline import check, replay_pipeline
from minitrain.simulate.schedules import SCHEDULES, Schedule, Task
from minitrain.simulate.schedules import schedule as make


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "chunks", "times", "bubble", "span"),
    [
        ("gpipe", 4, 8, 1, (1, 1, 1), 9, 9),  # (p-1)(F+B+W)
        ("1f1b", 4, 8, 1, (1, 1, 1), 9, 9),
        ("1f1b", 8, 16, 1, (1, 1, 1), 21, 21),
        ("interleaved", 4, 8, 2, (0.5, 0.5, 0.5), 4.5, 4.5),  # / v
        ("interleaved", 8, 16, 2, (0.5, 0.5, 0.5), 10.5, 10.5),
        ("zb-h1", 4, 8, 1, (1, 1, 1), 3, 3),  # (p-1)(F+B-W)
        ("zb-h1", 8, 24, 1, (1, 1.2, 0.8), 9.8, 9.8),
        ("zb-h2", 4, 8, 1, (1, 1, 1), 3, 0),  # (p-1)(F+B-2W)
        ("zb-h2", 8, 24, 1, (1, 1.2, 0.8), 7, 4.2),
        ("zb-v", 4, 12, 2, (1, 1, 1), 3, 0),
        ("zb-v", 8, 24, 2, (1, 1, 1), 7, 0),
        ("v-half", 4, 12, 2, (1, 1, 1), 9, 9),  # half of 1F1B's 3 * 6
        ("v-half", 8, 64, 2, (1, 1, 1), 21, 21),
    ],
)
def test_bubbles_are_those_published(
    name, stages, micro_batches, chunks, times, bubble, span
):
    run = replay_pipeline(make(name, stages, micro_batches, chunks), *times)
    work = micro_batches * chunks * sum(times)
    assert run.busy_seconds == pytest.approx([work] * stages)
    assert max(run.bubble_seconds) == pytest.approx(bubble)
    assert max(run.span_bubble_seconds) == pytest.approx(span)
    assert run.seconds == pytest.approx(work + bubble)


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.integers(1, 6),
    micro_batches=st.integers(1, 14),
    times=st.lists(st.floats(0, 3), min_size=36, max_size=36),
    send=st.floats(0, 2),
)
def test_no_pass_begins_before_what_it_needs(name, stages, micro_batches, times, send):
    plan = make(name, stages, micro_batches, 2 if name == "interleaved" else 0)
    places = stages * plan.chunks
    rows = [times[i * places : (i + 1) * places] for i in range(3)]
    run = replay_pipeline(plan, *rows, send)
    done, owner, free = {}, {}, [0.0] * stages
    for rank, (kind, micro, chunk), start, end in run.timeline():
        at = plan.place(rank, chunk)
        owner[at] = rank
        assert start >= free[rank] - 1e-12
        free[rank] = end
        for part in kind if kind == "BW" else (kind,):
            done[part, at, micro] = start, end
        needed = sum(rows["FBW".index(part)][at] for part in kind)
        assert end - start == pytest.approx(needed)
    assert len(done) == 3 * places * micro_batches
    for (kind, at, _micro), (start, _) in done.items():
        other = {"F": ("F", at - 1), "B": ("B", at + 1), "W": ("B", at)}[kind]
        if (*other, _micro) in done and not (kind == "W" and plan.chunks == 1):
            came = done[(*other, _micro)][kind != "W"]
            delay = send * (owner[other[1]] != owner[at]) if kind != "W" else 0
            assert start >= came + delay - 1e-9
        if kind == "B":
            assert start >= done["F", at, _micro][1] - 1e-12


def test_more_time_for_messages_never_makes_a_step_shorter():
    for name in SCHEDULES:
        plan = make(name, 4, 8)
        spans = [replay_pipeline(plan, 1, 1, 1, send).seconds for send in (0, 0.1, 1)]
        assert spans == sorted(spans)
        assert spans[0] < spans[1]


def test_a_message_within_a_rank_takes_no_time():
    alone = replay_pipeline(make("interleaved", 1, 3, 4), 1, 1, 1, send_seconds=5)
    assert alone.seconds == 3 * 4 * 3
    fold = replay_pipeline(make("zb-v", 2, 1), 1, 1, 0, send_seconds=5)
    assert fold.seconds == 8 + 4 * 5  # two boundaries, there and back; none at the turn


def test_a_hand_made_timeline():
    """Two stages, the second twice as slow: it never waits once it has begun."""
    run = replay_pipeline(make("1f1b", 2, 2), [1, 2], [1, 2], [1, 2], send_seconds=0.5)
    assert run.starts == [[0, 1, 8, 14], [1.5, 3.5, 7.5, 9.5]]
    assert run.ends[1] == [3.5, 7.5, 9.5, 13.5]
    assert run.seconds == 16


def broken(change) -> Schedule:
    plan = make("zb-h1", 2, 2)
    rows = [list(row) for row in plan.tasks]
    change(rows)
    return replace(plan, tasks=tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[0].pop(), "1 passes are missing; the first is the weight"),
        (lambda rows: rows[1].append(Task("F", 0)), "rank 1: F0 twice"),
        (lambda rows: rows[1].reverse(), "rank 1: W1 is before the backward pass"),
        (lambda rows: rows[0].insert(0, Task("F", 2)), "rank 0: there is no F2"),
        (lambda rows: rows[0].insert(0, Task("F", 0, 1)), "there is no F0.1"),
        (lambda rows: rows[1].insert(0, Task("B", 0)), "B0 is before the forward"),
        (
            lambda rows: rows[0].insert(0, rows[0].pop(2)),
            "rank 0 waits before B0 for the backward pass of micro-batch 0 through"
            r" piece 1 \(rank 1\); rank 1 waits before F0 for the forward pass",
        ),
    ],
)
def test_a_wrong_schedule_is_refused_in_words(change, words):
    with pytest.raises(ValueError, match=words):
        check(broken(change))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (([1, 2, 3], 1), "3 times for 2 chunks"),
        ((1, -1), "the least of them -1"),
        ((1, 1, 1, -1), "send_seconds -1 is negative"),
        (([1, float("nan")], 1), "none negative"),
    ],
)
def test_wrong_times_are_refused(times, words):
    with pytest.raises(ValueError, match=words):
        replay_pipeline(make("1f1b", 2, 2), *times)


def test_trace_events_hold_every_task():
    run = replay_pipeline(make("zb-v", 3, 6), 1e-3, 2e-3, 3e-3)
    tasks = [e for e in run.events() if e["ph"] == "X"]
    assert len(tasks) == sum(map(len, run.schedule.tasks))
    assert {e["tid"] for e in tasks} == {0, 1, 2}
    ends = max(e["ts"] + e["dur"] for e in tasks)
    assert ends == pytest.approx(run.seconds * 1e6)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_is_drawn(name):
    """Every pass is a box, and the bubble is said in words."""
    plan = make(name, 4, 6, 2 if name == "interleaved" else 0)
    run = replay_pipeline(plan, 1, 1, 1)
    figure = run.figure(seconds=200, unit="slots")
    assert figure.alt.startswith(f"{name} with 4 stages and 6 micro-batches")
    idle = sum(run.bubble_seconds) / run.seconds / 4
    assert f"of which stages wait {idle:.0%}" in figure.alt
    assert figure.svg.count('id="PolyCollection') == sum(map(len, plan.tasks))
    assert "backward" in figure.svg and "stage 3" in figure.svg
    assert ("chunk 1" in figure.svg) == (plan.chunks > 1)
