"""Timelines worked out by hand, and what must hold of all of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.simulate.events import (
    Compute,
    DeadlockError,
    Need,
    Post,
    Sharing,
    Span,
    Transfer,
    Wait,
    replay,
)

APART = Sharing(0.0, 0.0)  # messages and computing do not disturb each other


def collective(seconds, *ranks, stream="group", **more):
    return Transfer(ranks or (0,), seconds, stream, **more)


def test_a_message_hides_behind_computing():
    track = [Compute(1), Post(0), Compute(3), Need(0), Compute(1)]
    line = replay([track], [collective(2)], APART)
    assert line.seconds == 5
    assert (line.begins, line.ends) == ([1], [3])
    assert line.waits == [[]]


def test_what_is_left_of_a_message_is_waited_for():
    track = [Compute(1), Post(0), Compute(3, "backward"), Need(0), Compute(1)]
    line = replay([track], [collective(5)], APART)
    assert line.seconds == 7
    assert line.waits == [[Wait(4, 6, 0)]]
    assert line.transfer_seconds(0) == 2 and line.idle_seconds(0) == 0
    assert line.computing[0][1] == Span(1, 4, "backward")


def test_messages_of_one_group_follow_each_other_and_of_two_share_a_link():
    track = [Post(0), Post(1), Need(1)]
    one = replay([track], [collective(2), collective(3)], APART)
    assert (one.begins, one.ends) == ([0, 2], [2, 5])
    two = [collective(2), collective(3, stream="other")]
    # At half speed until the first is there at 4; the second then has 1 to go.
    assert replay([track], two, APART).ends == pytest.approx([4, 5])
    two = [collective(2), collective(3, stream="other", link="across")]
    assert replay([track], two, APART).ends == [2, 3]


def test_a_collective_and_computing_disturb_each_other():
    track = [Post(0), Compute(10), Need(0)]
    line = replay([track], [collective(4)], Sharing(compute=0.25, transfer=0.5))
    # Until 8 the message has done 4 and the computing 6 of 10.
    assert line.ends == [8]
    assert line.seconds == 12


def test_a_send_takes_nothing_from_computing():
    send = Transfer((0, 1), 4, "send", send=True)
    tracks = [[Post(0), Compute(10)], [Post(0), Compute(10)]]
    assert replay(tracks, [send], Sharing(0.5, 0.5)).seconds == 10


def test_a_collective_begins_when_the_last_rank_is_ready():
    tracks = [
        [Compute(1), Post(0), Need(0), Compute(1)],
        [Compute(4), Post(0), Need(0)],
    ]
    line = replay(tracks, [collective(2, 0, 1)], APART)
    assert line.begins == [4] and line.finished == [7, 6]
    assert (line.idle_seconds(0), line.transfer_seconds(0)) == (3, 2)
    assert (line.idle_seconds(1), line.transfer_seconds(1)) == (1, 2)


def test_both_ends_of_a_send_may_be_steps_of_one_track():
    """A ring of ranks that run one program: each sends to the next."""
    ring = Transfer((0, 0), 2, "ring", send=True)
    track = [Compute(1), Post(0), Compute(2), Post(0), Need(0)]
    line = replay([track], [ring], APART)
    assert line.begins == [3], "it moves once the receive is there too"
    assert line.seconds == 5


def test_sends_both_ways_do_not_share_a_link():
    there = Transfer((0, 1), 3, "there", send=True)
    back = Transfer((1, 0), 3, "back", send=True)
    tracks = [[Post(0), Post(1), Need(0), Need(1)]] * 2
    assert replay(tracks, [there, back], APART).seconds == 3
    same = [there, there._replace(stream="other")]
    assert replay(tracks, same, APART).seconds == 6


def test_a_pipeline_of_two_stages():
    """GPipe, two micro-batches: forward 1, backward 2, a send takes half."""

    def send(a, b, number):
        return Transfer((a, b), 0.5, (a, b), send=True)

    first = [Compute(1), Post(0), Compute(1), Post(1)]
    first += [Post(2), Need(2), Compute(2), Post(3), Need(3), Compute(2)]
    last = [Post(0), Need(0), Compute(1), Post(1), Need(1), Compute(1)]
    last += [Compute(2), Post(2), Compute(2), Post(3)]
    sends = [send(0, 1, 0), send(0, 1, 1), send(1, 0, 2), send(1, 0, 3)]
    line = replay([first, last], sends, APART)
    # A send moves once it is received: the second at 2.5, to 3. The last stage goes
    # forward to 2.5 and 4, backward to 6 and 8; the first, backward from 6.5 and 9.
    assert line.begins == [1, 2.5, 6, 8.5]
    assert line.computing[1][-1].end == 8
    assert line.seconds == 11
    assert line.busy_seconds(0) == 6 and line.busy_seconds(1) == 6


@pytest.mark.parametrize(
    ("tracks", "words"),
    [
        ([[Post(0), Need(0)], []], "rank 0 waits for message, which rank 1 never"),
        (
            [[Post(0), Need(0), Post(1)], [Post(1), Need(1), Post(0)]],
            "rank 0 waits for .*rank 1 never.*; rank 1 waits for .*rank 0 never",
        ),
    ],
)
def test_who_waits_for_ever_is_named(tracks, words):
    transfers = [collective(1, 0, 1), collective(1, 0, 1, stream="other")]
    with pytest.raises(DeadlockError, match=words):
        replay(tracks, transfers)


def test_streams_that_ranks_use_in_another_order_stand_still():
    tracks = [[Post(0), Need(0), Post(1), Need(1)], [Post(1), Need(1), Post(0)]]
    transfers = [collective(1, 0, 1), collective(1, 0, 1)]
    with pytest.raises(DeadlockError, match="rank 1 waits"):
        replay(tracks, transfers)


# ---- what holds of all of them

seconds = st.floats(0.0, 5.0)


@st.composite
def programs(draw):
    """A few ranks that compute, and make the same collectives in the same order."""
    ranks = draw(st.integers(1, 3))
    count = draw(st.integers(0, 6))
    streams = ["a", "b"]
    transfers = [
        Transfer(
            tuple(range(ranks)),
            draw(seconds),
            draw(st.sampled_from(streams)),
            draw(st.sampled_from(["inside", "across"])),
        )
        for _ in range(count)
    ]
    tracks = []
    for _ in range(ranks):
        track, owed = [], []
        for number in range(count):
            track += [Compute(draw(seconds)), Post(number)]
            owed.append(number)
            if draw(st.booleans()):
                track += map(Need, owed)
                owed = []
        tracks.append([*track, Compute(draw(seconds)), *map(Need, owed)])
    return tracks, transfers


def scaled(transfers, factor):
    return [t._replace(seconds=t.seconds * factor) for t in transfers]


@settings(deadline=None, max_examples=60)
@given(programs(), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_physics(program, taken, lost):
    tracks, transfers = program
    sharing = Sharing(taken, lost)
    line = replay(tracks, transfers, sharing)
    whole = line.seconds
    assert replay(tracks, transfers, sharing) == line, "it is the same each time"
    for rank, track in enumerate(tracks):
        alone = sum(s.seconds for s in track if isinstance(s, Compute))
        busy = line.busy_seconds(rank)
        assert alone - 1e-9 <= busy <= alone / (1 - taken) + 1e-9
        waited = line.transfer_seconds(rank) + line.idle_seconds(rank)
        assert busy + waited == pytest.approx(whole)
    for number, transfer in enumerate(transfers):
        posted = [line.posted[rank, number] for rank in transfer.ranks]
        assert line.begins[number] >= max(posted)
        assert line.ends[number] >= line.begins[number] + transfer.seconds - 1e-9
    double = [
        [s._replace(seconds=2 * s.seconds) if isinstance(s, Compute) else s for s in t]
        for t in tracks
    ]
    twice = replay(double, scaled(transfers, 2), sharing).seconds
    assert twice == pytest.approx(2 * whole)


@settings(deadline=None, max_examples=60)
@given(programs(), st.floats(1.0, 3.0))
def test_faster_links_never_make_a_step_slower(program, factor):
    tracks, transfers = program
    before = replay(tracks, transfers, APART).seconds
    assert replay(tracks, scaled(transfers, 1 / factor), APART).seconds <= before + 1e-9
