"""Trees and chains: few steps for small buffers, pipelines for large ones."""

from collections.abc import Iterator

from minitrain.collectives.program import Program, Transfer, backwards


def tree_broadcast(ranks: int, root: int = 0) -> Program:
    """A binomial tree: in each step every rank that has the buffer gives it to one.

    ceil(log2 N) steps, the fewest in which one rank can reach all.
    """
    steps = []
    have = 1
    while have < ranks:
        step = []
        for i in range(min(have, ranks - have)):
            source, to = (root + i) % ranks, (root + i + have) % ranks
            step.append(Transfer(source, to, (0,), add=False))
        steps.append(step)
        have *= 2
    return Program("broadcast", "tree", ranks, 1, steps, root)


def tree_reduce(ranks: int, root: int = 0) -> Program:
    """The broadcast played backwards: sums grow on their way to the root."""
    steps = backwards(tree_broadcast(ranks, root).steps, add=True)
    return Program("reduce", "tree", ranks, 1, steps, root)


def tree_all_reduce(ranks: int) -> Program:
    """Reduce to rank 0, then broadcast: 2 ceil(log2 N) steps of the whole buffer."""
    steps = [*tree_reduce(ranks).steps, *tree_broadcast(ranks).steps]
    return Program("all_reduce", "tree", ranks, 1, steps)


def chain_broadcast(ranks: int, root: int = 0, pieces: int = 8) -> Program:
    """Rank after rank, in pieces: while a rank passes one on, it receives the next.

    N - 2 + `pieces` steps of M / `pieces` bytes. With many pieces the time of the
    bytes is that of one message, however many ranks there are.
    """
    chain = [(root + i) % ranks for i in range(ranks)]
    steps = [
        [
            Transfer(chain[i], chain[i + 1], (time - i,), add=False)
            for i in range(ranks - 1)
            if 0 <= time - i < pieces
        ]
        for time in range(ranks - 2 + pieces)
    ]
    return Program("broadcast", "chain", ranks, pieces, steps, root)


def double_tree_all_reduce(ranks: int, pieces: int = 8) -> Program:
    """Two binary trees, each with one half of the buffer, up and then down again.

    A leaf of a tree only receives in a broadcast, so half of the ranks would never
    send. Here no rank has children in both trees: on either way, up or down, a rank
    sends at most the buffer and receives at most the buffer. Each half is cut into
    `pieces`, which follow one another through the tree. (Sanders, Speck and Träff,
    2009; NCCL has had such trees between hosts since 2.4.)
    """
    levels = ranks.bit_length() - 1
    down = [
        [
            Transfer(parent, child, (tree * pieces + time - level,), add=False)
            for tree, level, parent, child in two_trees(ranks)
            if 0 <= time - level < pieces
        ]
        for time in range(levels - 1 + pieces)
    ]
    steps = [*backwards(down, add=True), *down]
    return Program("all_reduce", "double_tree", ranks, 2 * pieces, steps)


def two_trees(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """The edges of two binary trees such that no rank has children in both.

    The second is the first with the ranks turned around, which makes odd ranks of even
    ones; or, of an odd number of ranks, rotated by one, which does so too.

    Yields:
        Number of the tree; level of the edge, from 0 at the root; parent; child.
    """
    for level, parent, child in binary_tree(ranks):
        yield 0, level, parent, child
        if ranks % 2:
            yield 1, level, (parent + 1) % ranks, (child + 1) % ranks
        else:
            yield 1, level, ranks - 1 - parent, ranks - 1 - child


def binary_tree(ranks: int) -> Iterator[tuple[int, int, int]]:
    """A binary tree in which every other rank, 0, 2, 4, ..., is a leaf.

    Number the ranks from 1. The root is the largest power of two, the children of n
    are n - b and n + b, where b is half of the largest power of two that divides n (or
    less, on the right, where the ranks end there). Odd numbers have none.

    Yields:
        Level of the edge, from 0 at the root; parent; child.
    """

    def below(number: int, level: int) -> Iterator[tuple[int, int, int]]:
        reach = (number & -number) // 2
        children = [number - reach] if reach else []
        while number + reach > ranks:
            reach //= 2
        children += [number + reach] if reach else []
        for child in children:
            yield level, number - 1, child - 1
            yield from below(child, level + 1)

    return below(2 ** (ranks.bit_length() - 1), 0)
