"""Closed forms equal the programs they stand for, and crossings are where they say."""

import math
import random

import numpy as np
import pytest

from minitrain.collectives import ALGORITHMS, build
from minitrain.collectives.cost import (
    TERMS,
    Link,
    best_pieces,
    crossover_bytes,
    fastest,
    fit,
    hierarchical_seconds,
    program_seconds,
    seconds,
    step_seconds,
    terms,
)
from minitrain.collectives.program import Transfer
from minitrain.collectives.volumes import volume

LINK = Link(latency_seconds=5e-6, bytes_per_second=20e9)
LATENCY, BANDWIDTH = Link(1.0, math.inf), Link(0.0, 1.0)


def shapes(algorithm, ranks):
    if algorithm == "hierarchical":
        return [{"ranks_per_host": g} for g in range(1, ranks + 1) if ranks % g == 0]
    pipelined = algorithm in ("double_tree", "chain")
    return [{"pieces": p} for p in (1, 2, 8)] if pipelined else [{}]


def test_every_algorithm_has_its_closed_form():
    known = {(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms}
    assert known == set(TERMS)


@pytest.mark.parametrize("ranks", range(1, 18))
def test_closed_forms_equal_the_programs(ranks):
    for collective, algorithm in TERMS:
        for shape in shapes(algorithm, ranks):
            program = build(collective, algorithm, ranks, **shape)
            for link in (LINK, LATENCY, BANDWIDTH):
                for payload in (0, 1, 1 << 20):
                    said = seconds(collective, algorithm, ranks, payload, link, **shape)
                    went = program_seconds(program, payload, link)
                    assert said == pytest.approx(went, rel=1e-12), (program, payload)


def test_the_textbook_forms():
    ring = seconds("all_reduce", "ring", 8, 1e6, LINK)
    assert ring == pytest.approx(14 * 5e-6 + 2 * 7 / 8 * 1e6 / 20e9)
    assert terms("all_reduce", "halving_doubling", 8) == (6, 1.75)
    assert terms("all_reduce", "tree", 5) == (6, 6)
    assert terms("all_to_all", "bruck", 8) == (3, 1.5)
    assert terms("all_reduce", "ring", 1) == (0, 0)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_time_grows_with_ranks_latency_and_bytes(collective):
    algorithm = "pairwise" if collective == "all_to_all" else "ring"
    more = [seconds(collective, algorithm, n, 1e6, LINK) for n in range(1, 9)]
    assert more == sorted(set(more))
    slower = Link(6e-6, 20e9), Link(5e-6, 19e9)
    for algorithm in ALGORITHMS[collective]:
        shape = {"ranks_per_host": 2} if algorithm == "hierarchical" else {}
        base = seconds(collective, algorithm, 4, 1e6, LINK, **shape)
        for link in slower:
            assert seconds(collective, algorithm, 4, 1e6, link, **shape) > base


def test_a_port_sends_and_receives_at_once_but_one_message_after_the_other():
    one = Transfer(0, 1, (0,), False)
    back, further = Transfer(1, 0, (0,), False), Transfer(0, 2, (0, 1), False)
    assert step_seconds((), 10, BANDWIDTH) == 0
    assert step_seconds((one,), 10, BANDWIDTH) == 10
    assert step_seconds((one, back), 10, BANDWIDTH) == 10  # full duplex
    assert step_seconds((one, further), 10, BANDWIDTH) == 30  # one port
    assert step_seconds((one, further), 10, LATENCY) == 1


def test_links_may_differ():
    inside, across = Link(1e-6, 300e9), Link(5e-6, 25e9)

    def network(source, to):
        return inside if source // 4 == to // 4 else across

    program = build("all_reduce", "hierarchical", 16, ranks_per_host=4)
    went = program_seconds(program, 1 << 30, network)
    assert went == pytest.approx(hierarchical_seconds(4, 4, 1 << 30, inside, across))
    flat = program_seconds(build("all_reduce", "ring", 16), 1 << 30, network)
    assert flat == pytest.approx(30 * across.seconds(2**30 / 16))
    assert flat > 3 * went
    same = hierarchical_seconds(4, 4, 1e6, LINK, LINK)
    assert same == seconds(
        "all_reduce", "hierarchical", 16, 1e6, LINK, ranks_per_host=4
    )


def test_an_array_of_payloads_gives_an_array_of_seconds():
    payloads = np.array([0.0, 1e3, 1e6])
    for collective, algorithm in TERMS:
        shape = {"ranks_per_host": 2} if algorithm == "hierarchical" else {}
        together = seconds(collective, algorithm, 6, payloads, LINK, **shape)
        single = [seconds(collective, algorithm, 6, p, LINK, **shape) for p in payloads]
        assert together.tolist() == single


# ---- crossings


@pytest.mark.parametrize("ranks", [3, 4, 8, 12, 64])
@pytest.mark.parametrize(
    ("collective", "low", "high"),
    [
        ("all_reduce", "recursive_doubling", "ring"),
        ("all_reduce", "tree", "ring"),
        ("all_reduce", "tree", "double_tree"),
        ("all_to_all", "bruck", "pairwise"),
        ("broadcast", "tree", "chain"),
    ],
)
def test_below_the_crossover_one_wins_and_above_it_the_other(
    collective, low, high, ranks
):
    shapes = {"double_tree": {"pieces": 16}, "chain": {"pieces": 16}}

    def time(algorithm, payload):
        shape = shapes.get(algorithm, {})
        return seconds(collective, algorithm, ranks, payload, LINK, **shape)

    at = crossover_bytes(collective, low, high, ranks, LINK, shapes)
    assert at == crossover_bytes(collective, high, low, ranks, LINK, shapes)
    if at is None:
        assert (time(low, 0) - time(high, 0)) * (
            time(low, 1e12) - time(high, 1e12)
        ) >= 0
        assert ranks == 3  # so few that one algorithm is always as good
    else:
        assert time(low, at) == pytest.approx(time(high, at))
        assert time(low, at * 0.99) < time(high, at * 0.99)
        assert time(low, at * 1.01) > time(high, at * 1.01)


def test_where_one_is_never_slower_there_is_no_crossover():
    assert crossover_bytes("all_reduce", "halving_doubling", "ring", 8, LINK) is None
    assert crossover_bytes("all_reduce", "ring", "ring", 8, LINK) is None
    assert crossover_bytes("all_gather", "bruck", "ring", 7, LINK) is None


def test_the_fastest_changes_with_the_payload():
    assert fastest("all_reduce", 8, 8, LINK) == "recursive_doubling"
    assert fastest("all_reduce", 7, 1 << 30, LINK) == "ring"
    assert fastest("all_reduce", 8, 1 << 30, LINK) == "halving_doubling"
    pieces = best_pieces("all_reduce", "double_tree", 63, 1 << 23, LINK)
    shapes = {"double_tree": {"pieces": pieces}}
    assert 1 < pieces < 1024
    assert fastest("all_reduce", 63, 1 << 23, LINK, shapes) == "double_tree"


def test_pieces_balance_latency_and_pipeline():
    for payload in (1e3, 1e6, 1e9):
        best = best_pieces("broadcast", "chain", 16, payload, LINK, most=5000)
        ideal = math.sqrt(14 * payload / 20e9 / 5e-6)  # where the derivative is zero
        assert abs(best - max(1, ideal)) <= 1


# ---- fits


def test_a_fit_finds_the_link_that_made_the_times():
    sizes = [2**k for k in range(3, 26)]
    found = fit([(s, LINK.seconds(s)) for s in sizes])
    assert found.latency_seconds == pytest.approx(5e-6)
    assert found.bytes_per_second == pytest.approx(20e9)
    rng = random.Random(0)
    noisy = fit([(s, LINK.seconds(s) * rng.uniform(0.9, 1.1)) for s in sizes * 5])
    assert noisy.latency_seconds == pytest.approx(5e-6, rel=0.05)
    assert noisy.bytes_per_second == pytest.approx(20e9, rel=0.05)


def test_a_fit_minds_the_relative_error():
    """One slow large message does not move the latency of the small ones."""
    sizes = [2**k for k in range(3, 26)]
    points = [(s, LINK.seconds(s)) for s in sizes[:-1]]
    found = fit([*points, (sizes[-1], 1.3 * LINK.seconds(sizes[-1]))])
    assert found.latency_seconds == pytest.approx(5e-6, rel=0.05)


def test_a_fit_is_never_negative():
    steeper = fit([(1, 1e-9), (1e6, 1e-3), (2e6, 4e-3)])
    assert steeper.latency_seconds == 0 and steeper.bytes_per_second > 0
    falling = fit([(1, 2e-6), (100, 1e-6)])
    assert falling.bytes_per_second == math.inf and falling.latency_seconds > 0


@pytest.mark.parametrize(
    "points", [[], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 1.0), (2, 0.0)]]
)
def test_a_fit_needs_two_sizes(points):
    with pytest.raises(ValueError, match="two sizes"):
        fit(points)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="not negative"):
        Link(-1.0, 1.0)
    with pytest.raises(ValueError, match="more than 0"):
        Link(0.0, 0.0)
    with pytest.raises(ValueError, match="no closed form for reduce by 'ring'"):
        seconds("reduce", "ring", 4, 10, LINK)


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [(0, {}), (-3, {}), (7, {"ranks_per_host": 2}), (4, {"pieces": 0})],
)
def test_numbers_that_no_program_has_are_refused(ranks, shape):
    name = "hierarchical" if "ranks_per_host" in shape else "double_tree"
    with pytest.raises(ValueError, match=r"at least 1|do not fill"):
        terms("all_reduce", name, ranks, **shape)
    with pytest.raises(ValueError, match=r"at least 1|do not fill"):
        volume("all_reduce", name, ranks, 10, 0, **shape)


def test_a_position_outside_of_the_group_is_refused():
    with pytest.raises(ValueError, match="position=9 of 4"):
        volume("all_reduce", "ring", 4, 10, 9)
    with pytest.raises(ValueError, match="not negative"):
        Link(math.nan, 1.0)
