"""What a collective takes on a cluster: closed forms of bytes and ranks.

A group of `ranks` has `inside` ranks in each scale-up domain (NVLink), so it spans
`ranks / inside` domains. Inside a domain a library switches between protocols: one of
low latency and low bandwidth for small messages, one of full bandwidth for large ones;
the faster of the two is taken. Across domains each rank's network card carries its
share of a ring; both parts of the ring run at once, and the slower one decides.

`payload_bytes` is the size that nccl-tests prints: the buffer that is reduced or
broadcast, the whole that is gathered or scattered, what one rank hands in to an
all-to-all. Sizes are numbers or arrays; a group of one takes no time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitrain.simulate.hardware import Cluster

Number = Any
"""A number, or an array of numbers."""


class Wires(NamedTuple):
    """The links of a cluster, of one rank: numbers only.

    Attributes:
        domain_ranks: Ranks of a scale-up domain.
        inside_bytes_per_second: Out of a rank into its domain, one direction.
        inside_base_seconds: Of any collective inside a domain, small messages.
        inside_step_seconds: Of one step of a ring inside a domain, small messages.
        inside_low_share: Of the bandwidth, by the protocol of low latency.
        inside_start_seconds: What the protocol of full bandwidth starts later.
        inside_share: Of the bandwidth, by the protocol of full bandwidth.
        nvls_ranks: From so many ranks switches add (NVLS); a large number if never.
        nvls_share: Of the bandwidth, by an all-reduce with NVLS.
        all_to_all_share: Of the bandwidth, by an all-to-all.
        across_bytes_per_second: Of a rank's share of the network, one direction.
        across_base_seconds: Of any collective across domains.
        across_step_seconds: Of one step across domains.
        across_share: Of the network's bandwidth, by large messages.
        across_half_bytes: A card's bytes at which half of that is reached.
    """

    domain_ranks: float
    inside_bytes_per_second: float
    inside_base_seconds: float
    inside_step_seconds: float
    inside_low_share: float
    inside_start_seconds: float
    inside_share: float
    nvls_ranks: float
    nvls_share: float
    all_to_all_share: float
    across_bytes_per_second: float
    across_base_seconds: float
    across_step_seconds: float
    across_share: float
    across_half_bytes: float


def wires(cluster: Cluster) -> Wires:
    """The record of a cluster's links."""
    nvls = cluster.accelerator.family in ("H100", "H200", "B200", "B300", "GB200")
    return Wires(
        domain_ranks=cluster.domain_ranks,
        inside_bytes_per_second=cluster.inside.bytes_per_second,
        inside_base_seconds=5e-6,
        inside_step_seconds=cluster.inside.latency_seconds,
        inside_low_share=0.2,
        inside_start_seconds=15e-6,
        inside_share=0.74,
        nvls_ranks=5 if nvls else 1e9,
        nvls_share=1.0,
        all_to_all_share=0.70,
        across_bytes_per_second=cluster.across.bytes_per_second,
        across_base_seconds=15e-6,
        across_step_seconds=cluster.across.latency_seconds,
        across_share=0.75,
        across_half_bytes=4e6,
    )


def _inside_seconds(w: Wires, moved: Number, steps: Number, share: Number) -> Number:
    """Of a ring inside a domain: each rank moves so many bytes in so many steps."""
    rate = w.inside_bytes_per_second
    low = moved / (rate * w.inside_low_share)
    full = w.inside_start_seconds + moved / (rate * share)
    start = w.inside_base_seconds + steps * w.inside_step_seconds
    return np.where(steps > 0, start + np.minimum(low, full), 0.0)


def _across_seconds(w: Wires, moved: Number, steps: Number) -> Number:
    """Of a ring across domains: each card moves so many bytes in so many steps."""
    rate = w.across_bytes_per_second * w.across_share
    start = w.across_base_seconds + steps * w.across_step_seconds
    filled = np.minimum(moved, w.across_half_bytes)
    return np.where(steps > 0, start + (moved + filled) / rate, 0.0)


def _ring_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number, share: Number
) -> Number:
    """Of one pass around: a reduce-scatter or an all-gather."""
    domains = ranks / inside
    within = _inside_seconds(
        w, payload_bytes * (ranks - 1) / ranks, (inside - 1), share
    )
    within = np.where(inside > 1, within, 0.0)
    card = payload_bytes / inside * (domains - 1) / domains
    between = _across_seconds(w, card, domains - 1)
    return np.maximum(within, between)


def all_gather_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each of the ranks gets all of `payload_bytes`."""
    return _ring_seconds(w, payload_bytes, ranks, inside, w.inside_share)


def reduce_scatter_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each of the ranks gets its part of a sum of `payload_bytes`."""
    return _ring_seconds(w, payload_bytes, ranks, inside, w.inside_share)


def all_reduce_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each of the ranks gets a sum of `payload_bytes`."""
    domains = ranks / inside
    share = np.where(inside >= w.nvls_ranks, w.nvls_share, w.inside_share)
    moved = 2 * payload_bytes * (ranks - 1) / ranks
    within = _inside_seconds(w, moved, 2 * (inside - 1), share)
    card = 2 * payload_bytes / inside * (domains - 1) / domains
    between = _across_seconds(w, card, 2 * (domains - 1))
    return np.maximum(within, between)


def all_to_all_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which each rank sends a part of `payload_bytes` to every other."""
    within = _inside_seconds(
        w, payload_bytes * (inside - 1) / ranks, (inside - 1), w.all_to_all_share
    )
    card = payload_bytes * (ranks - inside) / ranks
    between = _across_seconds(w, card, ranks / inside - 1)
    return np.maximum(within, between)


def broadcast_seconds(
    w: Wires, payload_bytes: Number, ranks: Number, inside: Number
) -> Number:
    """Seconds in which all ranks get the `payload_bytes` of one of them."""
    within = _inside_seconds(w, payload_bytes, inside - 1, w.inside_share)
    domains = ranks / inside
    card = np.where(domains > 1, payload_bytes / inside, 0.0)
    return np.maximum(within, _across_seconds(w, card, domains - 1))


def send_seconds(w: Wires, payload_bytes: Number, inside: Number) -> Number:
    """Seconds of a message from rank to rank.

    Args:
        w: The cluster's links.
        payload_bytes: Of the message.
        inside: 1 if both ranks are in one scale-up domain, else 0.
    """
    near = _inside_seconds(w, payload_bytes, 1.0, w.all_to_all_share)
    far = _across_seconds(w, payload_bytes, 1.0)
    return np.where(inside, near, far)
