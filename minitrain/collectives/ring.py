"""Around the ring: each rank only ever sends to the next (Patarasuk and Yuan, 2009).

No algorithm sends fewer bytes. The price is a number of steps that grows with the ring.
"""

from minitrain.collectives.program import Program, Transfer


def ring_reduce_scatter(ranks: int) -> Program:
    """Each chunk goes once around the ring and collects the terms, to end at its rank.

    `ranks` - 1 steps of one chunk. Chunk c starts at rank c + 1, so that rank c is the
    last to add to it: in step k rank r sends chunk r - 1 - k.
    """
    steps = [
        [
            Transfer(rank, (rank + 1) % ranks, ((rank - 1 - k) % ranks,), add=True)
            for rank in range(ranks)
        ]
        for k in range(ranks - 1)
    ]
    return Program("reduce_scatter", "ring", ranks, ranks, steps)


def ring_all_gather(ranks: int) -> Program:
    """Each chunk goes once around the ring, and every rank keeps a copy.

    `ranks` - 1 steps of one chunk. Chunk c starts at rank c: in step k rank r sends
    chunk r - k, the one that it has just received.
    """
    steps = [
        [
            Transfer(rank, (rank + 1) % ranks, ((rank - k) % ranks,), add=False)
            for rank in range(ranks)
        ]
        for k in range(ranks - 1)
    ]
    return Program("all_gather", "ring", ranks, ranks, steps)


def ring_all_reduce(ranks: int) -> Program:
    """Reduce-scatter, then all-gather: 2 (N - 1) / N of the buffer from every rank.

    Where ranks do the adding, no algorithm lets every rank send less (Patarasuk and
    Yuan, 2009). Each chunk is
    summed in one order and then copied, so all ranks end with the same bits.
    """
    steps = [*ring_reduce_scatter(ranks).steps, *ring_all_gather(ranks).steps]
    return Program("all_reduce", "ring", ranks, ranks, steps)
