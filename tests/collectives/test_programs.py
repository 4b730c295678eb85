"""Every algorithm is proven for every number of ranks, and the proof is put to test.

The proof follows sets of ranks. Beside it a brute force computes with whole numbers:
rank r's term is 8^r, so that the digits of a sum, in base 8, count each rank's terms.
The two know nothing of each other, and must agree on thousands of programs that were
broken in one place.
"""

import json
import pickle
import random
from dataclasses import replace

import pytest

from minitrain.collectives import (
    ALGORITHMS,
    Program,
    Transfer,
    build,
    contributions,
    validate,
)
from minitrain.collectives.program import backwards, play
from minitrain.collectives.tree import binary_tree, two_trees


def shapes(algorithm, collective, ranks):
    """What shapes the program besides the number of ranks, in all telling ways."""
    if algorithm == "hierarchical":
        return [{"ranks_per_host": g} for g in range(1, ranks + 1) if ranks % g == 0]
    if algorithm == "double_tree":
        return [{"pieces": p} for p in (1, 2, 5)]
    roots = [{"root": r} for r in range(ranks)]
    if algorithm == "chain":
        return [r | {"pieces": p} for r in roots for p in (1, 2, 5)]
    return roots if collective in ("broadcast", "reduce") else [{}]


def programs(ranks):
    """Every program for so many ranks."""
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            for shape in shapes(algorithm, collective, ranks):
                yield build(collective, algorithm, ranks, **shape)


# ---- the algorithms


@pytest.mark.parametrize("ranks", range(1, 18))
def test_every_program_is_proven_right(ranks):
    found = list(programs(ranks))
    assert len(found) >= 17
    for program in found:
        assert validate(program) is program
        assert brute_force(program)


@pytest.mark.parametrize("ranks", range(1, 18))
def test_each_takes_the_steps_it_says(ranks):
    log = (ranks - 1).bit_length()  # ceil(log2)
    floor = ranks.bit_length() - 1
    folds = 2 * (ranks != 2**floor)

    def steps(collective, algorithm, **shape):
        return len(build(collective, algorithm, ranks, **shape).steps)

    assert steps("all_reduce", "ring") == 2 * (ranks - 1)
    assert steps("all_reduce", "recursive_doubling") == floor + folds
    assert steps("all_reduce", "halving_doubling") == 2 * floor + folds
    assert steps("all_reduce", "tree") == 2 * log
    assert steps("reduce_scatter", "ring") == ranks - 1
    assert steps("reduce_scatter", "halving") == floor + folds
    assert steps("all_gather", "bruck") == steps("all_to_all", "bruck") == log
    assert steps("all_to_all", "direct") == (ranks > 1)
    assert steps("all_to_all", "pairwise") == ranks - 1
    assert steps("broadcast", "tree") == steps("reduce", "tree") == log
    if ranks > 1:
        assert steps("broadcast", "chain", pieces=5) == ranks - 2 + 5
        assert steps("all_reduce", "double_tree", pieces=5) == 2 * (floor + 5 - 1)


@pytest.mark.parametrize("ranks", range(1, 18))
def test_nobody_has_children_in_both_trees(ranks):
    edges = list(two_trees(ranks))
    parents = [{p for tree, _, p, _ in edges if tree == which} for which in (0, 1)]
    assert not parents[0] & parents[1]
    for which in (0, 1):
        children = [c for tree, _, _, c in edges if tree == which]
        assert len(set(children)) == len(children) == ranks - 1  # one parent each
        assert len({*range(ranks)} - {*children}) == 1  # but the root
    sent = [max(map(len, by_parent(edges, which))) for which in (0, 1) if edges]
    assert all(count <= 2 for count in sent)
    assert all(child % 2 for _, parent, child in binary_tree(ranks) if child % 2)
    assert all(parent % 2 for _, parent, _ in binary_tree(ranks))


def by_parent(edges, which):
    """The children of each parent of one tree."""
    found = {}
    for tree, _, parent, child in edges:
        if tree == which:
            found.setdefault(parent, []).append(child)
    return found.values()


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_in_the_ring_each_rank_knows_only_its_neighbours(ranks):
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for step in build(collective, "ring", ranks).steps:
            assert all(t.to == (t.source + 1) % ranks for t in step)


def test_between_hosts_only_the_piece_travels():
    program = build("all_reduce", "hierarchical", 8, ranks_per_host=4)
    across = [
        len(t.chunks)
        for step in program.steps
        for t in step
        if t.source // 4 != t.to // 4
    ]
    within = sum(len(t.chunks) for step in program.steps for t in step) - sum(across)
    assert sum(across) == 8 * 2  # per rank 2 (H - 1) / H of M / 4: 2 of the 8 chunks
    assert within == 8 * 2 * 3 * 2  # 2 (g - 1) / g of M: 12 of them
    assert all(t.source % 4 == t.to % 4 for t in program.steps[4])


# ---- wrong programs, each a mistake that somebody made


def ring(ranks, phase1=-1, phase2=0, add2=False):
    """The ring all-reduce with its parts open to mistakes."""

    def steps(offset, add):
        return tuple(
            tuple(
                Transfer(r, (r + 1) % ranks, ((r + offset - k) % ranks,), add)
                for r in range(ranks)
            )
            for k in range(ranks - 1)
        )

    both = steps(phase1, True) + steps(phase2, add2)
    return Program("all_reduce", "ring", ranks, ranks, both)


def without_rank(program, rank):
    steps = tuple(
        tuple(t for t in step if rank not in (t.source, t.to)) for step in program.steps
    )
    return replace(program, steps=steps)


def one_step(*transfers, collective="all_reduce", ranks=2, chunks=1):
    return Program(collective, "broken", ranks, chunks, (tuple(transfers),))


def swapped(program, a, b):
    steps = list(program.steps)
    steps[a], steps[b] = steps[b], steps[a]
    return replace(program, steps=tuple(steps))


WRONG = {
    "off by one chunk in phase 2": (ring(4, phase2=1), "at the end rank 0 holds"),
    "adds in both phases": (ring(4, add2=True), "in step 3, .*chunk 0: would count"),
    "a rank left out": (without_rank(ring(4), 2), "at the end|does not hold|twice"),
    "a step left out": (replace(ring(4), steps=ring(4).steps[:-1]), "at the end"),
    "a step twice": (
        replace(ring(3), steps=ring(3).steps[:1] + ring(3).steps),
        "in step 1, rank 0 to rank 1, chunk 2: would count the term of rank 0",
    ),
    "steps in the wrong order": (
        swapped(build("all_to_all", "bruck", 4), 0, 1),
        "step 0, .* the sender does not hold it",
    ),
    "reads within the step what another message brings": (
        one_step(
            Transfer(0, 1, (0,), False),
            Transfer(1, 2, (0,), False),
            collective="broadcast",
            ranks=3,
        ),
        "step 0, rank 1 to rank 2, chunk 0: the sender does not hold it",
    ),
    "overwrites its own term": (
        one_step(Transfer(0, 1, (0,), False), Transfer(1, 0, (0,), False)),
        "at the end rank 0 holds of chunk 0 the term of rank 1",
    ),
    "two write to one place": (
        one_step(
            Transfer(0, 2, (0,), True), Transfer(1, 2, (0,), False), ranks=3, chunks=1
        ),
        "rank 1 to rank 2, chunk 0: another message",
    ),
    "a copy, then an addition, to one place": (
        one_step(Transfer(0, 2, (0,), False), Transfer(1, 2, (0,), True), ranks=3),
        "rank 1 to rank 2, chunk 0: another message",
    ),
    "adds where nothing is": (
        one_step(Transfer(0, 1, (0,), True), collective="broadcast"),
        "rank 0 to rank 1, chunk 0: the receiver holds nothing",
    ),
    "sends to itself": (one_step(Transfer(0, 0, (0,), True)), "sends to itself"),
    "no such rank": (one_step(Transfer(0, 2, (0,), True)), "the ranks are 0 to 1"),
    "no such chunk": (one_step(Transfer(0, 1, (-1,), True)), "the chunks are 0 to 0"),
    "does nothing": (Program("all_reduce", "none", 2, 1, ()), "at the end rank 0"),
    "the wrong owner": (
        Program(
            "reduce_scatter",
            "turned",
            3,
            3,
            tuple(play(ring(3).steps[:2], [1, 2, 0], [[0], [1], [2]])),
        ),
        "at the end rank 0 holds of chunk 0",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_program_is_rejected_in_words(mistake):
    program, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        validate(program)
    assert not brute_force(program)


def test_the_open_ring_is_right_when_nothing_is_wrong():
    validate(ring(5))
    assert ring(5).steps == build("all_reduce", "ring", 5).steps


# ---- the proof, beside brute force


def brute_force(program):
    """Whether the program is right, by whole numbers; no sets, no exceptions."""
    ranks, chunks = program.ranks, program.chunks
    kind, root = program.collective, program.root

    def origin(c):
        return {"all_gather": c, "all_to_all": c // ranks, "broadcast": root}.get(kind)

    buffers = [
        [8**r if origin(c) in (None, r) else 0 for c in range(chunks)]
        for r in range(ranks)
    ]
    for step in program.steps:
        before = [list(row) for row in buffers]
        writers = {}
        for t in step:
            if not {t.source, t.to} <= {*range(ranks)} or t.source == t.to:
                return False
            for c in t.chunks:
                if not 0 <= c < chunks or not before[t.source][c]:
                    return False
                if t.add and not buffers[t.to][c]:
                    return False
                writers.setdefault((t.to, c), []).append(t.add)
                buffers[t.to][c] = before[t.source][c] + t.add * buffers[t.to][c]
        if any(len(adds) > 1 and not all(adds) for adds in writers.values()):
            return False
        if any(d >= "2" for row in buffers for v in row for d in oct(v)[2:]):
            return False
    total = sum(8**r for r in range(ranks))
    for r, row in enumerate(buffers):
        for c, value in enumerate(row):
            wanted = total if origin(c) is None else 8 ** origin(c)
            promised = {
                "reduce": r == root,
                "reduce_scatter": r == c,
                "all_to_all": r == c % ranks,
            }.get(kind, True)
            if promised and value != wanted:
                return False
    return True


def broken(program, rng):
    """The program with one random change."""
    steps = [list(step) for step in program.steps]
    s = rng.randrange(len(steps))
    i = rng.randrange(len(steps[s]))
    t = steps[s][i]
    kind = rng.randrange(8)
    if kind == 0:
        steps[s][i] = replace(t, add=not t.add)
    elif kind == 1:
        steps[s][i] = replace(t, to=rng.randrange(program.ranks))
    elif kind == 2:
        steps[s][i] = replace(t, source=rng.randrange(program.ranks))
    elif kind == 3 and t.chunks:
        chunks = list(t.chunks)
        chunks[rng.randrange(len(chunks))] = rng.randrange(-1, program.chunks + 1)
        steps[s][i] = replace(t, chunks=tuple(chunks))
    elif kind == 4:
        steps[s].pop(i)
    elif kind == 5:
        steps.insert(rng.randrange(len(steps) + 1), [t])
    elif kind == 6:
        other = rng.randrange(len(steps))
        steps[s], steps[other] = steps[other], steps[s]
    else:
        moved = steps[s].pop(i)
        steps[rng.randrange(len(steps))].append(moved)
    return replace(program, steps=tuple(map(tuple, steps)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_proof_and_brute_force_agree_on_broken_programs(ranks):
    rng = random.Random(ranks)
    verdicts = {True: 0, False: 0}
    for program in programs(ranks):
        for _ in range(25):
            mutant = broken(program, rng)
            if rng.random() < 0.3 and any(mutant.steps):
                mutant = broken(
                    replace(mutant, steps=tuple(filter(None, mutant.steps))), rng
                )
            right = brute_force(mutant)
            verdicts[right] += 1
            try:
                validate(mutant)
            except ValueError:
                assert not right, f"rejected, and is right:\n{mutant!s}"
            else:
                assert right, f"accepted, and is wrong:\n{mutant!s}"
    assert min(verdicts.values()) > 50  # both are put to test


# ---- programs are values


def test_a_program_prints_as_its_messages():
    program = build("all_reduce", "ring", 3)
    assert repr(program) == "<ring all_reduce: 3 ranks, 3 chunks, 4 steps>"
    lines = str(program).split("\n")
    assert lines[1] == "  0:  0→1 +2  1→2 +0  2→0 +1"
    assert lines[3] == "  2:  0→1 =0  1→2 =1  2→0 =2"
    assert str(build("all_gather", "bruck", 3)).endswith("0→1 =0  1→2 =1  2→0 =2")


def test_a_program_travels():
    for program in programs(4):
        assert pickle.loads(pickle.dumps(program)) == program
        as_json = json.loads(json.dumps(program.to_dict()))
        assert as_json["ranks"] == 4 and len(as_json["steps"]) == len(program.steps)
        held = [
            [[frozenset(terms) for terms in row] for row in state]
            for state in as_json["held"]
        ]
        assert held == list(contributions(program))
    with pytest.raises(AttributeError):
        program.ranks = 5
    with pytest.raises(TypeError):
        ALGORITHMS["all_reduce"]["mine"] = None


def test_an_all_gather_is_a_reduce_scatter_played_backwards():
    steps = build("reduce_scatter", "ring", 5).steps
    validate(Program("all_gather", "ring", 5, 5, backwards(steps, add=False)))
    with pytest.raises(ValueError, match="nothing to add"):
        validate(Program("all_gather", "ring", 5, 5, backwards(steps, add=True)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "rings", 4), "no all_reduce by 'rings': one of ring, "),
        (("all_sum", "ring", 4), "no collective 'all_sum'"),
        (("all_reduce", "ring", 0), "ranks=0"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"ranks_per_host": 3}, "4 ranks do not fill hosts of 3"),
        ({"ranks_per_host": 0}, "hosts of 0"),
        ({}, "hierarchical: .*ranks_per_host"),
        ({"ranks_per_host": 2, "pieces": 2}, "pieces"),
    ],
)
def test_what_does_not_fit_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        build("all_reduce", "hierarchical", 4, **shape)


def test_a_program_must_make_sense():
    with pytest.raises(ValueError, match="root=4"):
        build("broadcast", "tree", 4, root=4)
    with pytest.raises(ValueError, match="pieces=0"):
        build("all_reduce", "double_tree", 4, pieces=0)
    with pytest.raises(ValueError, match="16 chunks, not 4"):
        Program("all_to_all", "mine", 4, 4, ())
    with pytest.raises(ValueError, match="no collective 'sum'"):
        Program("sum", "mine", 4, 4, ())
