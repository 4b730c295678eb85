"""Two levels: fast links inside a host, slow ones between hosts."""

from collections.abc import Iterable

from minitrain.collectives.program import Program, Step, play
from minitrain.collectives.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)


def hierarchical_all_reduce(ranks: int, ranks_per_host: int) -> Program:
    """Reduce-scatter in each host, all-reduce between hosts, all-gather in each host.

    Between hosts a rank reduces only its piece, one `ranks_per_host`-th of the buffer,
    with the ranks that hold the same piece of other hosts. Ranks are numbered host by
    host. (The 2-D torus of Mikami et al., 2018.)

    Raises:
        ValueError: `ranks` is not a multiple of `ranks_per_host`.
    """
    if ranks_per_host < 1 or ranks % ranks_per_host:
        raise ValueError(f"{ranks} ranks do not fill hosts of {ranks_per_host} ranks")
    hosts = ranks // ranks_per_host
    inside = [range(h * ranks_per_host, (h + 1) * ranks_per_host) for h in range(hosts)]
    across = [range(i, ranks, ranks_per_host) for i in range(ranks_per_host)]
    pieces = [range(i * hosts, (i + 1) * hosts) for i in range(ranks_per_host)]

    scatter = ring_reduce_scatter(ranks_per_host).steps
    reduce = ring_all_reduce(hosts).steps
    gather = ring_all_gather(ranks_per_host).steps
    steps = [
        *at_once(play(scatter, host, pieces) for host in inside),
        *at_once(
            play(reduce, rail, [(chunk,) for chunk in piece])
            for rail, piece in zip(across, pieces, strict=True)
        ),
        *at_once(play(gather, host, pieces) for host in inside),
    ]
    return Program("all_reduce", "hierarchical", ranks, ranks, steps)


def at_once(parts: Iterable[Iterable[Step]]) -> list[Step]:
    """Several sequences of steps, equally long, played at the same time."""
    return [
        [transfer for step in steps for transfer in step]
        for steps in zip(*parts, strict=True)
    ]
