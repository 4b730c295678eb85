"""All-to-all: every rank has something for every other.

What rank s has for rank d is chunk s N + d. Each rank has its own piece already.
"""

from minitrain.collectives.program import Program, Transfer


def direct_all_to_all(ranks: int) -> Program:
    """Everything at once: one step, N - 1 messages from every rank."""
    step = [
        Transfer(source, to, (source * ranks + to,), add=False)
        for source in range(ranks)
        for to in range(ranks)
        if source != to
    ]
    return Program("all_to_all", "direct", ranks, ranks**2, [step])


def pairwise_all_to_all(ranks: int) -> Program:
    """One partner in each step: k ranks ahead to send to, k behind to receive from.

    As many messages as `direct`, but no rank is flooded.
    """
    steps = []
    for ahead in range(1, ranks):
        step = []
        for rank in range(ranks):
            to = (rank + ahead) % ranks
            step.append(Transfer(rank, to, (rank * ranks + to,), add=False))
        steps.append(step)
    return Program("all_to_all", "pairwise", ranks, ranks**2, steps)


def bruck_all_to_all(ranks: int) -> Program:
    """Every piece hops by powers of two: the bits of how far it has to go.

    ceil(log2 N) messages from every rank instead of N - 1, each of some N / 2 pieces:
    fewer messages for more bytes. (Bruck et al., 1997.)
    """
    steps = []
    hop = 1
    while hop < ranks:
        step = []
        for rank in range(ranks):
            chunks = []
            for way in range(ranks):  # how far a piece has to go in all
                if way & hop:
                    source = (rank - way % hop) % ranks  # its smaller hops are done
                    chunks.append(source * ranks + (source + way) % ranks)
            step.append(Transfer(rank, (rank + hop) % ranks, tuple(chunks), add=False))
        steps.append(step)
        hop *= 2
    return Program("all_to_all", "bruck", ranks, ranks**2, steps)
