"""What each rank sends, in closed form: written from the papers, not from the programs.

The programs say the same message by message, and a trace counts it on real ranks. The
three must agree for every rank, also where the buffer does not divide.

Each form gives the sizes of the messages of one rank, in elements and in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from minitrain.collectives.cost import check_numbers
from minitrain.runtime.messages import even


class Volume(NamedTuple):
    """What one rank sends in a collective; an empty message is not sent."""

    elements: int
    messages: int


def volume(
    collective: str,
    algorithm: str,
    ranks: int,
    elements: int,
    position: int,
    **shape: int,
) -> Volume:
    """What the rank at `position` sends.

    Args:
        collective: As in `ALGORITHMS`.
        algorithm: As in `ALGORITHMS[collective]`.
        ranks: Size of the group.
        elements: Of the buffer: what is reduced, broadcast or reduce-scattered; the
            whole that is gathered; what each rank hands in to an all-to-all. It is cut
            as evenly as can be, the first pieces getting one more.
        position: Of the rank in the group.
        shape: `root`, `pieces`, `ranks_per_host`, as the algorithm takes them.

    Raises:
        ValueError: There is no such algorithm.
    """
    if (collective, algorithm) not in FORMS:
        raise ValueError(f"no closed form for {collective} by {algorithm!r}")
    check_numbers(ranks, shape)
    if not 0 <= position < ranks or elements < 0:
        raise ValueError(f"position={position} of {ranks} ranks, {elements} elements")
    if ranks == 1:
        return Volume(0, 0)
    sizes = FORMS[collective, algorithm](ranks, elements, position, **shape)
    return Volume(sum(sizes), sum(size > 0 for size in sizes))


def cut(elements: int, pieces: int) -> list[int]:
    """Sizes of the pieces of a buffer."""
    return list(even(elements, range(pieces)))


def others(pieces: Sequence[int], left_out: int) -> list[int]:
    """All the pieces but one."""
    return [size for i, size in enumerate(pieces) if i != left_out]


# Rings: a reduced piece is never sent by its owner, a gathered one never by the rank
# before its owner.


def ring_reduce_scatter(ranks: int, elements: int, position: int) -> list[int]:
    """Everything but its own piece: (N - 1) / N of the buffer."""
    return others(cut(elements, ranks), position)


def ring_all_gather(ranks: int, elements: int, position: int) -> list[int]:
    """Everything but the piece of the rank that it sends to."""
    return others(cut(elements, ranks), (position + 1) % ranks)


def ring_all_reduce(ranks: int, elements: int, position: int) -> list[int]:
    """Both: 2 (N - 1) / N of the buffer."""
    scatter = ring_reduce_scatter(ranks, elements, position)
    return scatter + ring_all_gather(ranks, elements, position)


def hierarchical(
    ranks: int, elements: int, position: int, ranks_per_host: int
) -> list[int]:
    """2 (g - 1) / g of the buffer in the host, and 2 (H - 1) / H of a g-th outside."""
    hosts = ranks // ranks_per_host
    host, place = divmod(position, ranks_per_host)
    chunks = cut(elements, ranks)
    pieces = [chunks[i : i + hosts] for i in range(0, ranks, hosts)]
    sizes = [sum(piece) for piece in pieces]
    across = others(pieces[place], host) + others(pieces[place], (host + 1) % hosts)
    inside = others(sizes, place) + others(sizes, (place + 1) % ranks_per_host)
    return inside + across


# Halving and doubling: what travels are blocks of 1, 2, 4, ... neighbouring pieces.


def blocks(
    ranks: int, elements: int, pieces: int, position: int, of_partner: bool
) -> list[int]:
    """The aligned blocks around `position`, or around its partner, up to half the core.

    Piece i belongs to position i modulo the core, the largest power of two of ranks.
    """
    core = 2 ** (ranks.bit_length() - 1)
    sizes = cut(elements, pieces)
    found = []
    width = 1
    while width < core:
        low = ((position ^ width) if of_partner else position) // width * width
        block = sizes[low : low + width]
        found.append(sum(block) + sum(sizes[core + low : core + low + width]))
        width *= 2
    return found


def recursive_doubling(ranks: int, elements: int, position: int) -> list[int]:
    """log2 N times the buffer; with a rank folded in, once more for its result."""
    core = 2 ** (ranks.bit_length() - 1)
    if position >= core:
        return [elements]
    return [elements] * (core.bit_length() - 1 + (position + core < ranks))


def halving_doubling(ranks: int, elements: int, position: int) -> list[int]:
    """2 (C - 1) / C of the buffer in a core of C ranks; all of it, if folded."""
    core = 2 ** (ranks.bit_length() - 1)
    if position >= core:
        return [elements]
    down = blocks(ranks, elements, core, position, of_partner=True)
    up = blocks(ranks, elements, core, position, of_partner=False)
    return down + up + [elements] * (position + core < ranks)


def halving_reduce_scatter(ranks: int, elements: int, position: int) -> list[int]:
    """All that the core will not keep, and its piece to the rank that was folded in."""
    core = 2 ** (ranks.bit_length() - 1)
    if position >= core:
        return [elements]
    folded = cut(elements, ranks)[core + position : core + position + 1]
    return blocks(ranks, elements, ranks, position, of_partner=True) + folded


def doubling_all_gather(ranks: int, elements: int, position: int) -> list[int]:
    """1, 2, 4, ... pieces; the whole to the rank that was folded in."""
    core = 2 ** (ranks.bit_length() - 1)
    if position >= core:
        return [cut(elements, ranks)[position]]
    own = blocks(ranks, elements, ranks, position, of_partner=False)
    return own + [elements] * (position + core < ranks)


def bruck_all_gather(ranks: int, elements: int, position: int) -> list[int]:
    """1, 2, 4, ... pieces, and in the last step the rest: N - 1 in all."""
    twice = cut(elements, ranks) * 2
    counts = [min(2**k, ranks - 2**k) for k in range((ranks - 1).bit_length())]
    return [sum(twice[position : position + count]) for count in counts]


# Trees: a rank sends to its parent on the way up, to its children on the way down.


def binomial_children(ranks: int, place: int) -> int:
    """Children of a rank in the binomial tree, counted from the root's place 0.

    They are place + 2^j for all 2^j > place, as far as there are ranks.
    """
    return max(0, (ranks - 1 - place).bit_length() - place.bit_length())


def tree_broadcast(
    ranks: int, elements: int, position: int, root: int = 0
) -> list[int]:
    """The buffer to each child."""
    return [elements] * binomial_children(ranks, (position - root) % ranks)


def tree_reduce(ranks: int, elements: int, position: int, root: int = 0) -> list[int]:
    """The buffer once, but from the root."""
    return [elements] * (position != root)


def tree_all_reduce(ranks: int, elements: int, position: int) -> list[int]:
    """Both: rank 0 sends the buffer ceil(log2 N) times, a leaf once."""
    up = tree_reduce(ranks, elements, position)
    return up + tree_broadcast(ranks, elements, position)


def chain_broadcast(
    ranks: int, elements: int, position: int, root: int = 0, pieces: int = 8
) -> list[int]:
    """The buffer, in pieces, but from the last rank."""
    last = (position - root) % ranks == ranks - 1
    return [] if last else cut(elements, pieces)


def double_tree(ranks: int, elements: int, position: int, pieces: int = 8) -> list[int]:
    """In each tree half the buffer: once up, unless the root, once down to each child.

    In the numbering of a tree, from 1, the root is the largest power of two, odd
    numbers are leaves, and only the last number, if it is even, has a single child.
    """
    halves = cut(elements, 2 * pieces)
    turned = ranks - position if ranks % 2 == 0 else (position - 1) % ranks + 1
    root = 2 ** (ranks.bit_length() - 1)
    sent = []
    for number, half in ((position + 1, halves[:pieces]), (turned, halves[pieces:])):
        children = 0 if number % 2 else 1 + (number < ranks)
        sent += half * ((number != root) + children)
    return sent


# All-to-all


def straight(ranks: int, elements: int, position: int) -> list[int]:
    """Each piece once, straight to its owner: (N - 1) / N of what is handed in."""
    return others(cut(elements, ranks), position)


def bruck_all_to_all(ranks: int, elements: int, position: int) -> list[int]:
    """In step k the pieces whose way has bit k, about half of them, whoever's they are.

    A piece that goes `way` ranks far has come `way` mod 2^k of them before step k.
    """
    pieces = cut(elements, ranks)
    return [
        sum(
            pieces[(position - way % 2**k + way) % ranks]
            for way in range(ranks)
            if way & 2**k
        )
        for k in range((ranks - 1).bit_length())
    ]


FORMS: Mapping[tuple[str, str], Callable[..., list[int]]] = MappingProxyType(
    {
        ("all_reduce", "ring"): ring_all_reduce,
        ("all_reduce", "recursive_doubling"): recursive_doubling,
        ("all_reduce", "halving_doubling"): halving_doubling,
        ("all_reduce", "tree"): tree_all_reduce,
        ("all_reduce", "double_tree"): double_tree,
        ("all_reduce", "hierarchical"): hierarchical,
        ("reduce_scatter", "ring"): ring_reduce_scatter,
        ("reduce_scatter", "halving"): halving_reduce_scatter,
        ("all_gather", "ring"): ring_all_gather,
        ("all_gather", "recursive_doubling"): doubling_all_gather,
        ("all_gather", "bruck"): bruck_all_gather,
        ("all_to_all", "direct"): straight,
        ("all_to_all", "pairwise"): straight,
        ("all_to_all", "bruck"): bruck_all_to_all,
        ("broadcast", "tree"): tree_broadcast,
        ("broadcast", "chain"): chain_broadcast,
        ("reduce", "tree"): tree_reduce,
    }
)
"""The closed form of each algorithm in `ALGORITHMS`."""
