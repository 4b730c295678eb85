"""Chapter 3's exercises: a right answer for each, and the usual wrong ones."""

import math

import torch
import torch.distributed as dist


def ring_sent(elements, ranks, rank):
    if ranks == 1:
        return 0
    sizes = [elements // ranks + (chunk < elements % ranks) for chunk in range(ranks)]
    return 2 * elements - sizes[rank] - sizes[(rank + 1) % ranks]


def ring_sent_even(elements, ranks, rank):
    """As if the size divided."""
    return 2 * (ranks - 1) * (elements // ranks)


def ring_sent_of_another(elements, ranks, rank):
    """Right for the rank before."""
    return ring_sent(elements, ranks, (rank - 1) % ranks)


def crossover(ranks, latency, bandwidth, tree_steps=None):
    ring, tree = 2 * (ranks - 1), tree_steps or 2 * math.ceil(math.log2(ranks))
    return (ring - tree) * latency * bandwidth / (tree - ring / ranks)


def crossover_of_a_broadcast(ranks, latency, bandwidth):
    """The tree goes up, and never down."""
    return crossover(ranks, latency, bandwidth, math.ceil(math.log2(ranks)))


def crossover_of_latencies(ranks, latency, bandwidth):
    """Forgets that the ring's bytes take time too."""
    return (
        (2 * (ranks - 1) / (2 * math.ceil(math.log2(ranks))) - 1) * latency * bandwidth
    )


def broadcast(ranks):
    steps, have = [], 1
    while have < ranks:
        steps.append([(r, r + have) for r in range(min(have, ranks - have))])
        have *= 2
    return steps


def broadcast_chain(ranks):
    return [[(r, r + 1)] for r in range(ranks - 1)]


def broadcast_star(ranks):
    """All at once: more than a rank may send in a step."""
    return [[(0, r) for r in range(1, ranks)]] if ranks > 1 else []


def broadcast_power_of_two(ranks):
    """Sends to ranks that are not there."""
    steps, have = [], 1
    while have < ranks:
        steps.append([(r, r + have) for r in range(have)])
        have *= 2
    return steps


def broadcast_half(ranks):
    """Forgets the last step."""
    return broadcast(ranks)[:-1]


def halving(ranks):
    owned = {rank: list(range(ranks)) for rank in range(ranks)}
    steps, bit = [], ranks // 2
    while bit:
        steps.append(
            [
                (r, r ^ bit, [c for c in owned[r] if c & bit != r & bit], True)
                for r in range(ranks)
            ]
        )
        for r in range(ranks):
            owned[r] = [c for c in owned[r] if c & bit == r & bit]
        bit //= 2
    back = [[(to, r, chunks, False) for r, to, chunks, _ in step] for step in steps]
    return steps + back[::-1]


def recursive_doubling(ranks):
    """Half the steps, and far more bytes."""
    steps, bit = [], 1
    while bit < ranks:
        everything = list(range(ranks))
        steps.append([(r, r ^ bit, everything, True) for r in range(ranks)])
        bit *= 2
    return steps


def ring(ranks):
    """As few bytes, and more steps."""
    return [
        [
            (r, (r + 1) % ranks, (r - 1 - step) % ranks, step < ranks - 1)
            for r in range(ranks)
        ]
        for step in range(2 * (ranks - 1))
    ]


def halving_that_adds(ranks):
    """Adds on the way back too."""
    return [[(r, to, chunks, True) for r, to, chunks, _ in s] for s in halving(ranks)]


def all_gather(x, sizes):
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = list(x.new_empty(sum(sizes)).split(sizes))
    shards[rank] = x
    for step in range(size - 1):
        mine, theirs = shards[(rank - step) % size], shards[(rank - 1 - step) % size]
        sending = dist.isend(mine, (rank + 1) % size)
        dist.recv(theirs, (rank - 1) % size)
        sending.wait()
    return torch.cat(shards)


def all_gather_built_in(x, sizes):
    shards = [x.new_empty(size) for size in sizes]
    dist.all_gather_object(shards, x)
    return torch.cat(shards)


def all_gather_to_all(x, sizes):
    """Everything to everybody, from everybody: more than a ring sends."""
    whole = torch.zeros(sum(sizes), dtype=x.dtype)
    start = sum(sizes[: dist.get_rank()])
    whole[start : start + len(x)] = x
    rank, size = dist.get_rank(), dist.get_world_size()
    total, travelling = whole.clone(), whole
    for _ in range(size - 1):
        received = torch.empty_like(whole)
        sending = dist.isend(travelling, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        total, travelling = total + received, received
    return total


def all_gather_rotated(x, sizes):
    """The shards in the order in which they came."""
    rank, whole = dist.get_rank(), all_gather(x, sizes)
    shards = whole.split(sizes)
    return torch.cat([shards[(rank - i) % len(sizes)] for i in range(len(sizes))])


def sum_any(x):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def sum_in_place(x):
    """The published bug."""
    dist.all_reduce(x)
    return x


def sum_of_flat(x):
    """Right numbers in the wrong shape."""
    total = x.flatten().clone()
    dist.all_reduce(total)
    return total


def gather_gradient(gradient, sizes):
    dist.all_reduce(gradient)
    return gradient.split(sizes)[dist.get_rank()]


def own_part(gradient, sizes):
    """Right only if all ranks computed the same loss."""
    return gradient.split(sizes)[dist.get_rank()]


def averaged(gradient, sizes):
    return gather_gradient(gradient, sizes) / len(sizes)


ANSWERS = {
    "tree_steps": (
        lambda n: (n - 1).bit_length(),
        [lambda n: n - 1, lambda n: n.bit_length(), lambda n: int(math.log2(n))],
    ),
    "ring_sent_elements": (ring_sent, [ring_sent_even, ring_sent_of_another]),
    "crossover_bytes": (crossover, [crossover_of_a_broadcast, crossover_of_latencies]),
    "broadcast_program": (
        broadcast,
        [
            broadcast_chain,
            broadcast_star,
            broadcast_power_of_two,
            broadcast_half,
            lambda ranks: 7,
        ],
    ),
    "halving_program": (halving, [recursive_doubling, ring, halving_that_adds]),
    "all_gather": (
        all_gather,
        [all_gather_built_in, all_gather_to_all, all_gather_rotated, lambda x, s: x],
    ),
    "sum_any": (sum_any, [sum_in_place, sum_of_flat, lambda x: x]),
    "gather_gradient": (gather_gradient, [own_part, averaged]),
}
