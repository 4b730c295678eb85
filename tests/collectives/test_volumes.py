"""Closed form, program and trace say the same, on every rank and at every size."""

import pytest
import torch
import torch.distributed as dist

from minitrain import launch, trace
from minitrain.collectives import ALGORITHMS, build
from minitrain.collectives import execute as collectives
from minitrain.collectives.volumes import FORMS, Volume, binomial_children, volume
from minitrain.runtime.messages import even, sent_elements

ELEMENTS = [0, 1, 2, 3, 5, 13, 64, 101]


def shapes(algorithm, ranks):
    """Shapes for which the real ranks run an algorithm."""
    if algorithm == "hierarchical":
        return [{"ranks_per_host": g} for g in range(1, ranks + 1) if ranks % g == 0]
    if algorithm in ("double_tree", "chain"):
        return [{"pieces": p} for p in (1, 3)]
    return [{}]


def cases(ranks):
    for collective, algorithm in FORMS:
        for shape in shapes(algorithm, ranks):
            roots = collective in ("broadcast", "reduce")
            for root in {0, ranks - 1} if roots else [None]:
                yield collective, algorithm, shape | ({"root": root} if roots else {})


def test_every_algorithm_has_its_closed_form():
    known = {(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms}
    assert known == set(FORMS)


# ---- real ranks, traced


def sent_by(call):
    """Elements and messages that this rank sends in a call, counted."""
    with trace() as t:
        call()
    sends = [m for m in t.messages if m.op == "send"]
    assert all(m.wire == "counted" and m.wire_bytes for m in sends)
    assert sum(m.wire_bytes for m in sends) % 8 == 0
    return Volume(sum(m.wire_bytes for m in sends) // 8, len(sends))


def call(collective, algorithm, elements, shape):
    """The call of a function of ours, on so many elements of 8 bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.ones(elements, dtype=torch.float64)
    function = getattr(collectives, collective)
    if collective == "all_gather":
        sizes = list(even(elements, range(ranks)))
        return lambda: function(x[: sizes[rank]], None, algorithm, sizes)
    return lambda: function(x, algorithm=algorithm, **shape)


def measured_and_said():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    differing, count = [], 0
    for elements in ELEMENTS:
        for collective, algorithm, shape in cases(ranks):
            counted = sent_by(call(collective, algorithm, elements, shape))
            said = volume(collective, algorithm, ranks, elements, rank, **shape)
            count += 1
            if counted != said:
                differing.append(
                    (algorithm, collective, elements, shape, counted, said)
                )
    return differing, count


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_what_real_ranks_send_is_the_closed_form(ranks):
    for differing, count in launch(measured_and_said, ranks):
        assert differing == []
        assert count >= len(ELEMENTS) * 19


# ---- programs of many ranks, counted without running them


def sent_in(program, position, elements):
    """What a rank sends in a program, message by message."""
    per_rank = program.ranks if program.collective == "all_to_all" else program.chunks
    sizes = even(elements, range(per_rank))
    messages = [
        sum(sizes[chunk % per_rank] for chunk in t.chunks)
        for step in program.steps
        for t in step
        if t.source == position
    ]
    return Volume(sum(messages), sum(map(bool, messages)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 9, 12, 16, 17])
def test_what_a_program_sends_is_the_closed_form(ranks):
    for collective, algorithm, shape in cases(ranks):
        program = build(collective, algorithm, ranks, **shape)
        for elements in (0, 1, ranks - 1, ranks, 29, 1000):
            for position in range(ranks):
                said = volume(collective, algorithm, ranks, elements, position, **shape)
                assert said == sent_in(program, position, elements), program


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_the_ring_is_what_the_trace_says_of_built_in_collectives(ranks):
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for elements in ELEMENTS:
            pieces = even(elements, range(ranks))
            for position in range(ranks):
                said = volume(collective, "ring", ranks, elements, position)
                assert said.elements == sent_elements(collective, pieces, position)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_forms_of_the_papers(ranks):
    elements, log = 240 * ranks, ranks.bit_length() - 1

    def sent(collective, algorithm, position=0, **shape):
        return volume(collective, algorithm, ranks, elements, position, **shape)

    optimal = 2 * (ranks - 1) * elements // ranks
    assert sent("all_reduce", "ring") == (optimal, 2 * (ranks - 1))
    assert sent("all_reduce", "halving_doubling") == (optimal, 2 * log)
    assert sent("all_reduce", "recursive_doubling") == (log * elements, log)
    assert sent("all_reduce", "tree") == (log * elements, log)
    assert sent("all_reduce", "tree", ranks - 1) == (elements, 1)
    assert sent("all_to_all", "bruck") == (log * elements // 2, log)
    assert sent("all_gather", "bruck") == (optimal // 2, log)
    for position in range(ranks):  # up and down, at most the buffer each
        assert sent("all_reduce", "double_tree", position).elements <= 2 * elements
    if ranks >= 4:
        inside, hosts = 2 * 3 * elements // 4, ranks // 4
        across = 2 * (hosts - 1) * elements // (4 * hosts)
        hierarchical = sent("all_reduce", "hierarchical", ranks_per_host=4)
        assert hierarchical.elements == inside + across == optimal


def test_children_in_the_binomial_tree():
    assert [binomial_children(6, place) for place in range(6)] == [3, 2, 0, 0, 0, 0]
    assert [binomial_children(8, place) for place in range(8)] == [3, 2, 1, 1] + [0] * 4


def test_a_form_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no closed form for reduce by 'ring'"):
        volume("reduce", "ring", 4, 10, 0)
