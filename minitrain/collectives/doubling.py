"""Halving and doubling: the partner is twice, or half, as far away in each step.

Ranks pair up by one bit of their number, so the steps are as many as it has bits. Where
the number of ranks is no power of two, a core of 2^k ranks does the work: each rank
beyond it first folds its part into a rank of the core, and gets its result at the end.
"""

from minitrain.collectives.program import Program, Transfer, backwards


def recursive_doubling_all_reduce(ranks: int) -> Program:
    """Partners exchange all they have, and both add: log2 N steps of the whole buffer.

    Fewest steps, and the most bytes: for small buffers.
    """
    core = core_of(ranks)
    fold = folded(ranks, chunks=1)
    exchange = [
        [Transfer(rank, rank ^ 2**k, (0,), add=True) for rank in range(core)]
        for k in range(core.bit_length() - 1)
    ]
    steps = [fold, *exchange, *backwards([fold], add=False)]
    return Program("all_reduce", "recursive_doubling", ranks, 1, steps)


def halving_doubling_all_reduce(ranks: int) -> Program:
    """Halving reduce-scatter, then played backwards (Rabenseifner, 2004).

    2 log2 N steps, and of a power of two of ranks no more bytes than the ring.
    """
    core = core_of(ranks)
    down = [folded(ranks, chunks=core), *halving(core, chunks=core)]
    steps = [*down, *backwards(down, add=False)]
    return Program("all_reduce", "halving_doubling", ranks, core, steps)


def halving_reduce_scatter(ranks: int) -> Program:
    """Half of what is left goes to the partner, half is kept: log2 N steps."""
    core = core_of(ranks)
    out = [
        Transfer(rank - core, rank, (rank,), add=False) for rank in range(core, ranks)
    ]
    steps = [folded(ranks, chunks=ranks), *halving(core, chunks=ranks), out]
    return Program("reduce_scatter", "halving", ranks, ranks, steps)


def recursive_doubling_all_gather(ranks: int) -> Program:
    """Halving played backwards: what a rank has doubles each step."""
    steps = backwards(halving_reduce_scatter(ranks).steps, add=False)
    return Program("all_gather", "recursive_doubling", ranks, ranks, steps)


def bruck_all_gather(ranks: int) -> Program:
    """What a rank has doubles each step, for any number of ranks (Bruck et al., 1997).

    In step k rank r sends all it has, chunks r, r + 1, ..., to rank r - 2^k; in the
    last step only what that one still lacks. ceil(log2 N) steps, (N - 1) / N of the
    buffer: of steps and of bytes the fewest.
    """
    steps = []
    have = 1
    while have < ranks:
        step = []
        for rank in range(ranks):
            missing = range(rank, rank + min(have, ranks - have))
            chunks = tuple(chunk % ranks for chunk in missing)
            step.append(Transfer(rank, (rank - have) % ranks, chunks, add=False))
        steps.append(step)
        have *= 2
    return Program("all_gather", "bruck", ranks, ranks, steps)


def core_of(ranks: int) -> int:
    """The largest power of two that is not more than `ranks`."""
    return 2 ** (ranks.bit_length() - 1)


def folded(ranks: int, chunks: int) -> list[Transfer]:
    """The step in which each rank beyond the core adds all it has to a rank of it."""
    core, everything = core_of(ranks), tuple(range(chunks))
    return [
        Transfer(rank, rank - core, everything, add=True) for rank in range(core, ranks)
    ]


def halving(core: int, chunks: int) -> list[list[Transfer]]:
    """Recursive halving among `core` ranks, from the partner farthest away.

    Rank r will own the chunks c with c = r (mod `core`). Once ranks have paired up by
    a bit, each keeps the chunks that agree with its number in that bit too, and has
    sent the partner those that agree with the partner's.
    """
    steps = []
    bit, settled = core // 2, 0
    while bit:
        settled |= bit
        step = []
        for rank in range(core):
            partner = rank ^ bit
            theirs = tuple(
                c for c in range(chunks) if c % core & settled == partner & settled
            )
            step.append(Transfer(rank, partner, theirs, add=True))
        steps.append(step)
        bit //= 2
    return steps
