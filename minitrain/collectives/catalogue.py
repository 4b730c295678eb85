"""Every algorithm that we know, by collective and by name."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from minitrain.collectives import doubling, exchange, hierarchical, ring, tree
from minitrain.collectives.program import Program

ALGORITHMS: Mapping[str, Mapping[str, Callable[..., Program]]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {
                "ring": ring.ring_all_reduce,
                "recursive_doubling": doubling.recursive_doubling_all_reduce,
                "halving_doubling": doubling.halving_doubling_all_reduce,
                "tree": tree.tree_all_reduce,
                "double_tree": tree.double_tree_all_reduce,
                "hierarchical": hierarchical.hierarchical_all_reduce,
            }
        ),
        "reduce_scatter": MappingProxyType(
            {
                "ring": ring.ring_reduce_scatter,
                "halving": doubling.halving_reduce_scatter,
            }
        ),
        "all_gather": MappingProxyType(
            {
                "ring": ring.ring_all_gather,
                "recursive_doubling": doubling.recursive_doubling_all_gather,
                "bruck": doubling.bruck_all_gather,
            }
        ),
        "all_to_all": MappingProxyType(
            {
                "direct": exchange.direct_all_to_all,
                "pairwise": exchange.pairwise_all_to_all,
                "bruck": exchange.bruck_all_to_all,
            }
        ),
        "broadcast": MappingProxyType(
            {"tree": tree.tree_broadcast, "chain": tree.chain_broadcast}
        ),
        "reduce": MappingProxyType({"tree": tree.tree_reduce}),
    }
)
"""`ALGORITHMS[collective][name](ranks, **shape)` makes the program."""


@lru_cache(maxsize=256)  # programs are values: the same arguments, the same program
def build(collective: str, algorithm: str, ranks: int, **shape: int) -> Program:
    """The program of an algorithm for so many ranks.

    Args:
        collective: A key of `ALGORITHMS`.
        algorithm: A key of `ALGORITHMS[collective]`.
        ranks: Size of the group.
        shape: What else shapes it: `root`, `pieces`, `ranks_per_host`.

    Raises:
        ValueError: There is no such algorithm, or the numbers do not fit it.
    """
    if collective not in ALGORITHMS:
        raise ValueError(
            f"no collective {collective!r}: one of {', '.join(ALGORITHMS)}"
        )
    known = ALGORITHMS[collective]
    if algorithm not in known:
        names = ", ".join(known)
        raise ValueError(f"no {collective} by {algorithm!r}: one of {names}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a group has at least one")
    if shape.get("pieces", 1) < 1:
        raise ValueError(f"pieces={shape['pieces']}: at least one")
    try:
        return known[algorithm](ranks, **shape)
    except TypeError as error:
        raise ValueError(f"{collective} by {algorithm}: {error}") from None
