"""The programs move real tensors among real processes, and every rank is right."""

import pytest
import torch
import torch.distributed as dist

from minitrain import StallError, launch, trace
from minitrain.collectives import (
    ALGORITHMS,
    Program,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    build,
    execute,
    reduce,
    reduce_scatter,
    run,
)
from minitrain.runtime.errors import RankError

RANKS = [1, 2, 3, 4, 5, 7, 8]
ELEMENTS = [0, 1, 2, 7, 12, 41]


def shape_of(algorithm, ranks):
    """One shape of each program; the hierarchical one has hosts of two, or three."""
    hosts = next((g for g in (2, 3, ranks) if ranks % g == 0), 1)
    return {
        "hierarchical": {"ranks_per_host": hosts},
        "double_tree": {"pieces": 3},
        "chain": {"pieces": 3},
    }.get(algorithm, {})


def data(rank, elements, salt=0):
    """Whole numbers that tell ranks and places apart."""
    return (torch.arange(elements) + 1) * 10**6 + 31 * rank**2 + salt


def expect(actual, expected, *what):
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert torch.equal(actual, expected), (what, actual, expected)


def all_collectives():
    """Every algorithm, on every size, checked on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    done = 0
    for elements in ELEMENTS:
        every = [data(r, elements) for r in range(ranks)]
        total = sum(every)
        for algorithm in ALGORITHMS["all_reduce"]:
            x = every[rank].clone()
            out = all_reduce(x, algorithm=algorithm, **shape_of(algorithm, ranks))
            assert out is x
            expect(x, total, "all_reduce", algorithm)
            done += 1
        for algorithm in ALGORITHMS["reduce_scatter"]:
            x = every[rank].clone()
            mine = reduce_scatter(x, algorithm=algorithm)
            expect(mine, total.tensor_split(ranks)[rank], "reduce_scatter", algorithm)
            expect(x, every[rank], "reduce_scatter leaves its input", algorithm)
            uneven = [0] * (ranks - 1) + [elements]
            mine = reduce_scatter(x, algorithm=algorithm, sizes=uneven)
            expect(mine, total.split(uneven)[rank], "uneven reduce_scatter", algorithm)
            done += 1
        for algorithm in ALGORITHMS["all_gather"]:
            expect(all_gather(every[rank], algorithm=algorithm), torch.cat(every))
            parts = [data(r, (r * elements) % 5) for r in range(ranks)]
            uneven = [len(part) for part in parts]
            for sizes in (None, uneven):
                out = all_gather(parts[rank], algorithm=algorithm, sizes=sizes)
                expect(out, torch.cat(parts), "uneven all_gather", algorithm)
            done += 1
        for algorithm in ALGORITHMS["all_to_all"]:
            out = all_to_all(every[rank], algorithm=algorithm)
            mine = torch.cat([x.tensor_split(ranks)[rank] for x in every])
            expect(out, mine, "all_to_all", algorithm)
            done += 1
        for root in range(ranks):
            for algorithm in ALGORITHMS["broadcast"]:
                x = every[rank].clone()
                broadcast(x, root, algorithm=algorithm, **shape_of(algorithm, ranks))
                expect(x, every[root], "broadcast", algorithm, root)
                done += 1
            for algorithm in ALGORITHMS["reduce"]:
                x = every[rank].clone()
                reduce(x, root, algorithm=algorithm)
                expect(x, total if rank == root else every[rank], "reduce", algorithm)
                done += 1
    return done


@pytest.mark.parametrize("ranks", RANKS)
def test_every_algorithm_on_every_rank(ranks):
    done = launch(all_collectives, ranks)
    fixed = len(ELEMENTS) * (6 + 2 + 3 + 3)
    assert done == [fixed + len(ELEMENTS) * ranks * 3] * ranks


def shapes_and_dtypes():
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def ramp(*shape, dtype=torch.float32):
        count = torch.Size(shape).numel()
        return (torch.arange(count).view(shape) % 7 + rank).to(dtype)

    for algorithm in ALGORITHMS["all_reduce"]:
        more = shape_of(algorithm, ranks)

        def summed(x, algorithm=algorithm, more=more):
            wanted = x.clone()
            dist.all_reduce(wanted)
            expect(all_reduce(x, None, algorithm, **more), wanted, algorithm)

        summed(ramp(5, 3).t())  # not contiguous
        summed(ramp(4, 6)[:, ::2])
        summed(ramp(2, 3, 4, 5).to(memory_format=torch.channels_last))
        summed(torch.tensor(1.0 + rank))  # no dims
        summed(ramp(0, 3))
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32):
            summed(ramp(9, dtype=dtype))
        summed(ramp(9, dtype=torch.complex64))
        x = torch.nn.Parameter(ramp(6))
        summed(x.data)
        assert all_reduce(x, None, algorithm, **more).requires_grad

    x = ramp(4, 6).t()  # [6, 4], rows are not contiguous
    rows = [x - rank + r for r in range(ranks)]
    expect(all_gather(x), torch.cat(rows))
    expect(reduce_scatter(x), sum(rows).tensor_split(ranks)[rank])
    expect(all_to_all(x), torch.cat([r.tensor_split(ranks)[rank] for r in rows]))
    expect(all_gather(torch.tensor(rank)), torch.arange(ranks))
    expect(broadcast(ramp(3, 2).t(), 1), ramp(3, 2).t() - rank + 1)
    expect(all_gather(ramp(rank, 0, 2)), ramp(sum(range(ranks)), 0, 2))


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_shape_and_dtype(ranks):
    launch(shapes_and_dtypes, ranks)


SPLITS = [[3, 2, 1], [2, 2, 2], [1, 2, 3]]


def uneven_exchange(splits, width):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = [
        data(r, sum(splits[r]) * width).view(sum(splits[r]), width)
        for r in range(ranks)
    ]
    wanted = torch.cat([x.split(splits[r])[rank] for r, x in enumerate(rows)])
    for algorithm in ALGORITHMS["all_to_all"]:
        out = all_to_all(rows[rank], splits[rank], algorithm=algorithm)
        expect(out, wanted, algorithm)


@pytest.mark.parametrize(
    "splits",
    [
        SPLITS,
        [[0, 0, 0], [4, 0, 1], [0, 0, 7]],
        [[0] * 3] * 3,
        [[0, 5, 1, 2], [3, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 9]],
        [[r * d % 4 for d in range(5)] for r in range(5)],
    ],
)
def test_all_to_all_of_uneven_splits(splits):
    launch(uneven_exchange, len(splits), splits, 2)


def groups():
    """Two groups at once, one of them in reverse; and a rank outside."""
    rank = dist.get_rank()
    odd, rest = dist.new_group([3, 1]), dist.new_group([0, 2, 4])
    group, members = (odd, [1, 3]) if rank in (1, 3) else (rest, [0, 2, 4])
    total = sum(data(r, 7) for r in members)
    for algorithm in ALGORITHMS["all_reduce"]:
        more = {"ranks_per_host": 1} if algorithm == "hierarchical" else {}
        expect(all_reduce(data(rank, 7), group, algorithm, **more), total, algorithm)
    order = dist.get_process_group_ranks(group)
    expect(
        all_gather(data(rank, 2), group), torch.cat([data(r, 2) for r in order]), order
    )
    expect(broadcast(data(rank, 2), 1, group), data(order[1], 2))
    try:
        all_reduce(torch.ones(1), odd if group is rest else rest)
    except ValueError as error:
        return str(error)


def test_groups_name_their_ranks_by_position():
    for rank, text in enumerate(launch(groups, 5)):
        assert text == f"rank {rank} is not in the group it was asked to work with"


def test_without_a_group_there_is_one_rank():
    x = torch.arange(5.0)
    assert all_reduce(x) is x
    expect(all_gather(x), x)
    expect(all_to_all(x), x)
    expect(reduce_scatter(x), x)
    expect(broadcast(x.clone()), x)


# ---- what rounding does, and does not


def rounded(dtype, values):
    x = torch.tensor([values[dist.get_rank()]] * 8, dtype=dtype)
    results = {}
    for algorithm in ALGORITHMS["all_reduce"]:
        more = shape_of(algorithm, dist.get_world_size())
        results[algorithm] = all_reduce(x.clone(), None, algorithm, **more).tolist()
    wide = all_reduce(x.float()).tolist()
    return results, wide


def test_sums_round_in_their_own_dtype_and_not_when_widened():
    for outcome in launch(rounded, 2, torch.bfloat16, [256.0, 1.0]):
        assert all(values == [256.0] * 8 for values in outcome[0].values())
        assert outcome[1] == [257.0] * 8
    outcomes = launch(rounded, 4, torch.bfloat16, [256.0, 1.0, 1.0, 1.0])
    for results, wide in outcomes:
        assert all({*v} <= {256.0, 258.0, 260.0} for v in results.values())
        assert wide == [259.0] * 8
    for results, wide in launch(rounded, 4, torch.float16, [30000.0] * 4):
        assert all(values == [float("inf")] * 8 for values in results.values())
        assert wide == [120000.0] * 8


def replicas():
    """The sum of numbers that do not add up exactly, in each algorithm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    x[17] = float("nan") if rank == ranks - 1 else 0.0
    return [
        all_reduce(x.clone(), None, algorithm, **shape_of(algorithm, ranks))
        .view(torch.int32)
        .tolist()
        for algorithm in ALGORITHMS["all_reduce"]
    ]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_all_ranks_end_with_the_same_bits(ranks):
    first, *others = launch(replicas, ranks)
    assert all(other == first for other in others)
    for bits in first:
        values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        assert values.isnan().nonzero().flatten().tolist() == [17]


# ---- the messages themselves


def ring_messages(elements):
    with trace() as t:
        all_reduce(torch.ones(elements))
    return [(m.op, m.peer, m.wire_bytes, m.wire) for m in t.messages]


def test_a_trace_counts_the_messages_of_a_ring():
    for rank, messages in enumerate(launch(ring_messages, 3, 7)):
        sent = [m for m in messages if m[0] == "send"]
        assert {peer for _, peer, _, _ in sent} == {(rank + 1) % 3}
        assert {m[1] for m in messages if m[0] == "recv"} == {(rank - 1) % 3}
        sizes = [12, 8, 8]  # 7 elements are 3 + 2 + 2
        order = [(rank - 1) % 3, (rank - 2) % 3, rank, (rank - 1) % 3]
        assert [m[2] for m in sent] == [sizes[c] for c in order]
        assert {m[3] for m in sent} == {"counted"}
    for rank, messages in enumerate(launch(ring_messages, 3, 1)):
        assert sum(m[0] == "send" for m in messages) == [1, 2, 1][rank]


def swapped(elements, times):
    """Both overwrite in one step what they send in it: who gets a mixture?"""
    rank, mixed = dist.get_rank(), 0
    swap = [Transfer(r, 1 - r, (0,), False) for r in range(2)]
    for _ in range(times):
        x = torch.full((elements,), float(rank))
        run(Program("broadcast", "swap", 2, 1, [swap]), [x])
        mixed += not torch.equal(x, torch.full((elements,), 1.0 - rank))
    return mixed


def test_a_step_reads_what_was_there_before_it():
    assert launch(swapped, 2, 2_000_000, 10) == [0, 0]


def blocking(step, rank, chunks, group):
    """An executor that waits for each send before it receives."""
    for t in step:
        if t.source == rank:
            dist.send(chunks[t.chunks[0]], t.to)
    for t in step:
        if t.to == rank:
            dist.recv(torch.empty(1), t.source)


def ring_by(play):
    execute._play = play
    all_reduce(torch.ones(3))


def test_messages_must_be_posted_before_any_is_waited_for():
    with pytest.raises(StallError):
        launch(ring_by, 3, blocking, timeout=1)


# ---- what is refused


def refused(case):
    rank = dist.get_rank()
    x = torch.zeros(6, 2)
    calls = {
        "splits": lambda: all_to_all(x, [3, 2, 2]),
        "negative": lambda: all_to_all(x, [7, -1, 0]),
        "count": lambda: all_to_all(x, [3, 3]),
        "sizes": lambda: reduce_scatter(x, sizes=[2, 2, 3]),
        "rows": lambda: all_gather(x, sizes=[5, 5, 5]),
        "widths": lambda: all_gather(torch.zeros(2, 3 + (rank == 1))),
        "dtypes": lambda: all_to_all(x.half() if rank < 2 else x),
        "kinds": lambda: all_gather(x if rank else x.int()),
        "program": lambda: run(build("all_reduce", "ring", 4), x.view(-1).split(3)),
        "algorithm": lambda: all_reduce(x, algorithm="gossip"),
        "root": lambda: broadcast(x, root=3),
        "hosts": lambda: all_reduce(x, algorithm="hierarchical", ranks_per_host=2),
    }
    try:
        calls[case]()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("splits", "splits=[3, 2, 2]: 3 numbers that are not negative and add up to"),
        ("negative", "splits=[7, -1, 0]"),
        ("count", "splits=[3, 3]"),
        ("sizes", "sizes=[2, 2, 3]: 3 numbers that are not negative and add up to"),
        ("rows", " has 6 rows, and sizes [5, 5, 5] say 5"),
        ("widths", "on rank 0, 4 elements of torch.float32 on rank 1"),
        ("dtypes", "of torch.float16 on rank 1, 2 elements of torch.float32 on rank 2"),
        ("kinds", "of torch.int32 on rank 0, 2 elements of torch.float32 on rank 1"),
        ("program", "<ring all_reduce: 4 ranks, 4 chunks, 6 steps> cannot be run by a"),
        ("algorithm", "no all_reduce by 'gossip'"),
        ("root", "root=3"),
        ("hosts", "3 ranks do not fill hosts of 2"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(case, message):
    for text in launch(refused, 3, case):
        assert message in text


def test_a_rank_that_is_wrong_alone_is_named():
    def work():
        splits = [2, 2, 2 + (dist.get_rank() == 1)]
        all_to_all(torch.zeros(6), splits)

    with pytest.raises(RankError, match=r"rank 1 of 3 raised ValueError: splits="):
        launch(work, 3, timeout=5)
