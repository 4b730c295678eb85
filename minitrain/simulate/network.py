"""What a collective takes on a cluster: closed forms of bytes and ranks.

A group of `ranks` has `inside` ranks in each scale-up domain (NVLink), so it spans
`ranks / inside` domains. A library switches between protocols: one of low latency and
low bandwidth for small messages, one of full bandwidth for large ones, one in between;
the fastest is taken (NCCL's LL, Simple and LL128). Where switches can add, an
all-reduce sends its buffer once instead of nearly twice (NVLS).

Across domains a ring crosses each network card with its share of the bytes, while
every link inside carries all of them; both go on at once, and the slower one decides.
An all-reduce of small messages takes a tree across domains if that is faster.

`payload_bytes` is the size that nccl-tests prints: the buffer that is reduced or
broadcast, the whole that is gathered or scattered, what one rank hands in to an
all-to-all. Sizes are numbers or arrays; a group of one takes no time. Without losses,
see `ideal`, these are the ring's formulas of `minitrain.collectives.cost`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitrain.simulate.families import ADDING, MESH, protocols_of
from minitrain.simulate.hardware import (
    INSIDE_LATENCY_SECONDS,
    NETWORK_LATENCY_SECONDS,
    Cluster,
)

Number = Any
"""A number, or an array of numbers."""

NEVER = 1e9
"""More ranks than there are."""
FEW = 1e-9
"""So that a group of one, which sends nothing, has a link that is not zero."""


class Wires(NamedTuple):
    """The links of a cluster, of one rank: numbers only.

    Attributes:
        domain_ranks: Ranks of a scale-up domain.
        inside_bytes_per_second: Out of a rank into its domain, one direction.
        mesh: 1 where ranks of a domain have a link to each other, and no switch.
        across_bytes_per_second: Of a rank's share of the network, one direction.
        across_step_seconds: Of one step of a ring from host to host.
        across_share: Of the network's bandwidth, by large messages.
        across_rails: Cards of a domain that one collective uses at most.
        tree_share: Of the ring's bandwidth across domains, by a tree. The least known.
        low_share: Of the full protocol's bandwidth, by the one of low latency.
        middle_share: The same, by the protocol between the two.
        middle_start: Of what the full protocol starts later, by that one.
        lone: Share of a rank's links that a group loses, times its ranks.
        lone_all_to_all: The same, of an all-to-all.
        all_reduce_base_seconds: Of an all-reduce inside a domain, before its first
            step.
        all_reduce_step_seconds: Of a step of its ring inside a domain.
        all_reduce_start_seconds: What its full protocol starts later.
        all_reduce_share: Of the bandwidth inside a domain, by its full protocol.
        all_gather_base_seconds: Of an all-gather inside a domain, before its first
            step.
        all_gather_step_seconds: Of a step of its ring inside a domain.
        all_gather_start_seconds: What its full protocol starts later.
        all_gather_share: Of the bandwidth inside a domain, by its full protocol.
        reduce_scatter_base_seconds: Of a reduce-scatter inside a domain, before its
            first step.
        reduce_scatter_step_seconds: Of a step of its ring inside a domain.
        reduce_scatter_start_seconds: What its full protocol starts later.
        reduce_scatter_share: Of the bandwidth inside a domain, by its full protocol.
        all_to_all_base_seconds: Of an all-to-all inside a domain, before its first
            step.
        all_to_all_step_seconds: Of a step of its ring inside a domain.
        all_to_all_start_seconds: What its full protocol starts later.
        all_to_all_share: Of the bandwidth inside a domain, by its full protocol.
        nvls_ranks: Ranks of a domain from which switches add; a large number if never.
        nvls_start_seconds: What an all-reduce by switches starts later.
        nvls_share: Of the bandwidth, by an all-reduce by switches.
        measured: 1 where collectives were measured on the family, 0 where assumed.
    """

    domain_ranks: float
    inside_bytes_per_second: float
    mesh: float
    across_bytes_per_second: float
    across_step_seconds: float
    across_share: float
    across_rails: float
    tree_share: float
    low_share: float
    middle_share: float
    middle_start: float
    lone: float
    lone_all_to_all: float
    all_reduce_base_seconds: float
    all_reduce_step_seconds: float
    all_reduce_start_seconds: float
    all_reduce_share: float
    all_gather_base_seconds: float
    all_gather_step_seconds: float
    all_gather_start_seconds: float
    all_gather_share: float
    reduce_scatter_base_seconds: float
    reduce_scatter_step_seconds: float
    reduce_scatter_start_seconds: float
    reduce_scatter_share: float
    all_to_all_base_seconds: float
    all_to_all_step_seconds: float
    all_to_all_start_seconds: float
    all_to_all_share: float
    nvls_ranks: float
    nvls_start_seconds: float
    nvls_share: float
    measured: float


def wires(cluster: Cluster) -> Wires:
    """The record of a cluster's links.

    The cluster's latencies scale the measured ones, which were taken at the usual.
    """
    family = cluster.accelerator.family
    fitted, measured = protocols_of(family)
    near = cluster.inside.latency_seconds / INSIDE_LATENCY_SECONDS
    far = cluster.across.latency_seconds / NETWORK_LATENCY_SECONDS
    scaled = {n: v * near for n, v in fitted.items() if n.endswith("_step_seconds")}
    scaled["across_step_seconds"] = fitted["across_step_seconds"] * far
    return Wires(
        domain_ranks=cluster.domain_ranks,
        inside_bytes_per_second=cluster.inside.bytes_per_second,
        mesh=float(family in MESH),
        across_bytes_per_second=cluster.across.bytes_per_second,
        nvls_ranks=5.0 if family in ADDING else NEVER,
        measured=measured,
        **{**fitted, **scaled},
    )


def ideal(w: Wires, step_seconds: float, across_step_seconds: float) -> Wires:
    """The same links without losses: every step takes its latency, then all bytes."""
    values = dict.fromkeys(Wires._fields, 0.0)
    values |= {n: 1.0 for n in Wires._fields if n.endswith("_share")}
    values |= {n: step_seconds for n in Wires._fields if n.endswith("_step_seconds")}
    kept = ("domain_ranks", "inside_bytes_per_second", "across_bytes_per_second")
    values |= {name: getattr(w, name) for name in kept}
    return w._replace(
        **{
            **values,
            "across_step_seconds": across_step_seconds,
            "across_rails": NEVER,
            "nvls_ranks": NEVER,
            "tree_share": 1 / NEVER,
        }
    )


def inside_rate(w: Wires, inside: Number, lone: Number) -> Number:
    """Bytes per second out of a rank to its group's other ranks in the domain.

    In a mesh they have only the links between them. Behind a switch a small group does
    not fill its links either.
    """
    links = (inside - 1 + FEW) / (w.domain_ranks - 1 + FEW)
    return w.inside_bytes_per_second * (
        (1 - w.mesh + w.mesh * links) * (1 - lone / inside)
    )


def protocol_seconds(
    w: Wires, moved: Number, rate: Number, start: Number, share: Number
) -> Number:
    """Seconds in which a rank sends so many bytes, by the fastest protocol."""
    full = moved / (rate * share)
    middle = w.middle_start * start + full / w.middle_share
    return np.minimum(np.minimum(full / w.low_share, middle), start + full)


def spread_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which a ring takes a buffer across the network once."""
    cards = np.minimum(inside, w.across_rails)
    card_bytes = payload_bytes / cards * (1 - inside / ranks)
    return card_bytes / (w.across_bytes_per_second * w.across_share)


def ring_seconds(
    w: Wires,
    payload_bytes: Number,
    ranks: Number,
    inside: Number,
    base: Number,
    step: Number,
    start: Number,
    share: Number,
) -> Number:
    """Seconds of one way around: a reduce-scatter or an all-gather.

    Of its `ranks - 1` steps one for each further domain crosses the network.
    """
    domains = ranks / inside
    steps = (ranks - domains) * step + (domains - 1) * w.across_step_seconds
    several = np.minimum(inside - 1, 1)
    moved = several * payload_bytes * (ranks - 1) / ranks
    near = protocol_seconds(w, moved, inside_rate(w, inside, w.lone), start, share)
    far = spread_seconds(w, payload_bytes, ranks, inside)
    return several * base + steps + np.maximum(near, far)


def all_gather_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each rank gets all of `payload_bytes`, of which it had a part.

    Args:
        w: The cluster's links.
        payload_bytes: Of the whole.
        ranks: Of the group.
        inside: Ranks of the group in one scale-up domain, as many in each.
    """
    return ring_seconds(
        w,
        payload_bytes,
        ranks,
        inside,
        w.all_gather_base_seconds,
        w.all_gather_step_seconds,
        w.all_gather_start_seconds,
        w.all_gather_share,
    )


def reduce_scatter_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each rank gets its part of a sum of `payload_bytes`.

    Arguments as of `all_gather_seconds`.
    """
    return ring_seconds(
        w,
        payload_bytes,
        ranks,
        inside,
        w.reduce_scatter_base_seconds,
        w.reduce_scatter_step_seconds,
        w.reduce_scatter_start_seconds,
        w.reduce_scatter_share,
    )


def all_reduce_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each rank gets a sum of `payload_bytes`.

    The fastest of a ring, the domain's switches and a tree across domains. Arguments as
    of `all_gather_seconds`.
    """
    domains = ranks / inside
    several = np.minimum(inside - 1, 1)
    moved = several * 2 * payload_bytes * (ranks - 1) / ranks
    rate = inside_rate(w, inside, w.lone)
    near = protocol_seconds(
        w, moved, rate, w.all_reduce_start_seconds, w.all_reduce_share
    )
    switched = payload_bytes / (w.inside_bytes_per_second * w.nvls_share)
    switched = np.minimum(near, w.nvls_start_seconds + switched)
    near = np.where(inside >= w.nvls_ranks, switched, near)
    far = 2 * spread_seconds(w, payload_bytes, ranks, inside)
    step = w.all_reduce_step_seconds
    around = (ranks - domains) * step + (domains - 1) * w.across_step_seconds
    up = (inside - 1) * step + np.log2(domains) * w.across_step_seconds
    ring = 2 * around + np.maximum(near, far)
    tree = 2 * up + np.maximum(near, far / w.tree_share)
    return several * w.all_reduce_base_seconds + np.minimum(ring, tree)


def all_to_all_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each rank sends a part of its `payload_bytes` to every other.

    Messages to other domains start together. Arguments as of `all_gather_seconds`.
    """
    near = protocol_seconds(
        w,
        payload_bytes * (inside - 1) / ranks,
        inside_rate(w, inside, w.lone_all_to_all),
        w.all_to_all_start_seconds,
        w.all_to_all_share,
    )
    card_bytes = payload_bytes * (1 - inside / ranks)
    far = card_bytes / (w.across_bytes_per_second * w.across_share)
    crossing = np.minimum(ranks / inside - 1, 1) * w.across_step_seconds
    steps = (ranks - 1) * w.all_to_all_step_seconds + crossing
    base = np.minimum(inside - 1, 1) * w.all_to_all_base_seconds
    return base + steps + np.maximum(near, far)


def broadcast_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which all ranks get one's `payload_bytes`, in pieces along a ring.

    Not measured: with the constants of an all-gather of many ranks. Arguments as of
    `all_gather_seconds`.
    """
    domains, several = ranks / inside, np.minimum(inside - 1, 1)
    near = protocol_seconds(
        w,
        several * payload_bytes,
        inside_rate(w, inside, 0.0),
        w.all_gather_start_seconds,
        w.all_gather_share,
    )
    cards = np.minimum(inside, w.across_rails)
    crossing = payload_bytes / cards * np.minimum(domains - 1, 1)
    far = crossing / (w.across_bytes_per_second * w.across_share)
    near_steps = (ranks - domains) * w.all_gather_step_seconds
    steps = near_steps + (domains - 1) * w.across_step_seconds
    return several * w.all_gather_base_seconds + steps + np.maximum(near, far)


def send_seconds(w: Wires, payload_bytes: Number, inside: Number) -> Number:
    """Seconds of a message from rank to rank.

    Inside a domain as an all-to-all of two, which sends a half: nothing else was
    measured of single messages.

    Args:
        w: The cluster's links.
        payload_bytes: Of the message.
        inside: 1 if both ranks are in one scale-up domain, else 0.
    """
    near = all_to_all_seconds(w, 2 * payload_bytes, 2, 2)
    rate = w.across_bytes_per_second * w.across_share
    far = w.across_step_seconds + payload_bytes / rate
    return np.where(inside, near, far)
