"""The figure of a program shows its messages, each apart from the others."""

import re
from itertools import pairwise

import pytest

from minitrain import viz
from minitrain.collectives import ALGORITHMS, Program, Transfer, build
from minitrain.viz.programs import _arrows, _lanes


def shape(algorithm):
    return {
        "hierarchical": {"ranks_per_host": 2},
        "double_tree": {"pieces": 2},
        "chain": {"pieces": 2},
    }.get(algorithm, {})


def programs(ranks):
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            yield build(collective, algorithm, ranks, **shape(algorithm))


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_no_arrow_lies_on_another(ranks):
    for program in programs(ranks):
        for step in program.to_dict()["steps"]:
            arrows = list(_arrows(step))
            placed = list(_lanes(arrows))
            assert sorted(arrow for _, arrow in placed) == sorted(arrows)
            assert sum(a.last + 1 - a.first for a in arrows) == sum(
                len(m["chunks"]) for m in step
            )
            lines = {}
            for x, arrow in placed:
                assert arrow.first < x < arrow.last + 1  # in the columns it carries
                lines.setdefault(x, []).append(sorted((arrow.source, arrow.to)))
            for line in lines.values():
                line.sort()
                for (_, end), (start, _) in pairwise(line):
                    assert end < start


def test_the_figure_is_drawn_in_both_palettes_and_told_in_words():
    figure = viz.steps(build("all_reduce", "ring", 4))
    assert "ring all-reduce among 4 ranks, 4 chunks, 6 steps; step 0: " in figure.alt
    assert "rank 3 sends chunk 2 to rank 0, which adds it" in figure.alt
    assert "step 5: rank 0 sends chunk 2 to rank 1; rank 1" in figure.alt
    for colour in ("ink", "paper", "blue", "sky", "red"):
        assert f"var(--{colour})" in figure.svg
    text = re.sub(r"<[^>]*>", " ", figure.svg)
    for words in ("step 0", "step 5", "the end", "rank 3", "add", "copy", "complete"):
        assert words in text
    again = viz.steps(build("all_reduce", "ring", 4))
    assert again.svg == figure.svg


def test_a_few_steps_may_be_chosen():
    program = build("all_gather", "ring", 8)
    figure = viz.steps(program, [0, 6, 7])
    text = re.sub(r"<[^>]*>", " ", figure.svg)
    assert "step 6" in text and "step 1" not in text and "the end" in text
    assert "of the terms" not in text  # nothing is summed
    assert "step 0: 8 messages, the first: rank 0 sends chunk 0 to rank 1" in figure.alt
    for chosen in ([], [8], [-1]):
        with pytest.raises(ValueError, match="numbers from 0 to 7, the end"):
            viz.steps(program, chosen)


def test_what_is_only_passing_is_told_from_what_has_arrived():
    figure = viz.steps(build("all_to_all", "bruck", 4), [2])
    text = re.sub(r"<[^>]*>", " ", figure.svg)
    assert "at its owner" in text and "for another rank" in text and "from 3" in text


def test_a_message_that_carries_no_neighbours_has_several_arrows():
    step = (Transfer(0, 1, (4, 0, 1, 3), True),)
    program = Program("all_reduce", "mine", 2, 5, (step,))
    spans = [(a.first, a.last) for a in _arrows(program.to_dict()["steps"][0])]
    assert spans == [(0, 1), (3, 4)]


def test_the_figures_are_small():
    for program in programs(6):
        assert len(viz.steps(program).svg) < 500_000, program
