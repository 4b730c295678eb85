"""Chapter 5's exercises: a right answer for each, and the usual wrong ones."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from minitrain.testing import Parts
from minitrain.workload.step import accumulate


def wire_bytes(parameters, size, ranks, micro_batches, each):
    return (micro_batches if each else 1) * 2 * (ranks - 1) * parameters * size // ranks


def buckets(sizes, limit):
    made = []
    for index in reversed(range(len(sizes))):
        if not made or sum(sizes[i] for i in made[-1]) >= limit:
            made.append([])
        made[-1].append(index)
    return made


def buckets_forwards(sizes, limit):
    last = len(sizes) - 1
    return [[last - i for i in bucket] for bucket in buckets(sizes[::-1], limit)]


def buckets_closed_early(sizes, limit):
    """Closes a bucket before it would be over the limit."""
    made = []
    for index in reversed(range(len(sizes))):
        held = sum(sizes[i] for i in made[-1]) if made else 0
        if not made or held + sizes[index] > limit:
            made.append([])
        made[-1].append(index)
    return made


def exposed(ready, messages, backward):
    free = 0.0
    for at, seconds in zip(ready, messages, strict=True):
        free = max(free, at) + seconds
    return max(0.0, free - backward)


def exposed_last_only(ready, messages, backward):
    """As if the link were always free."""
    return max(0.0, max(r + m for r, m in zip(ready, messages, strict=True)) - backward)


def exposed_out_of_order(ready, messages, backward):
    """Sends what is ready first."""
    pairs = sorted(zip(ready, messages, strict=True))
    return exposed([r for r, _ in pairs], [m for _, m in pairs], backward)


def negative(ready, messages, backward):
    free = 0.0
    for at, seconds in zip(ready, messages, strict=True):
        free = max(free, at) + seconds
    return free - backward


def agreed(reports):
    waiting, schedule = {}, []
    for cycle in reports:
        for rank, names in enumerate(cycle):
            for name in names:
                waiting.setdefault(name, set()).add(rank)
        ready = sorted(n for n, ranks in waiting.items() if len(ranks) == len(cycle))
        for name in ready:
            del waiting[name]
        schedule.append(ready)
    return schedule


def agreed_within_a_cycle(reports):
    """Forgets what was reported before."""
    return [sorted(set.intersection(*map(set, cycle))) for cycle in reports]


def never_forgets(reports):
    """Schedules a name again in every later cycle."""
    waiting, schedule = {}, []
    for cycle in reports:
        for rank, names in enumerate(cycle):
            for name in names:
                waiting.setdefault(name, set()).add(rank)
        schedule.append(sorted(n for n, r in waiting.items() if len(r) == len(cycle)))
    return schedule


def in_order_of_arrival(reports):
    """What rank 0 reported first comes first: not the same on other ranks."""
    order = [n for cycle in reports for rank in cycle for n in rank]
    return [sorted(names, key=order.index) for names in agreed(reports)]


def sum_gradients(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def sum_what_is_there(model):
    """Ranks make different calls."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def average(model):
    sum_gradients(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


def sum_frozen_too(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def rank_loss(logits, targets):
    count = (targets != -100).sum()
    dist.all_reduce(count)
    total = F.cross_entropy(logits, targets, reduction="sum")
    return total / count.clamp(min=1)


def own_mean(logits, targets):
    """Every rank's mean, averaged: the published bug."""
    count = (targets != -100).sum().clamp(min=1)
    total = F.cross_entropy(logits, targets, reduction="sum")
    return total / count / dist.get_world_size()


def all_tokens(logits, targets):
    """Counts the tokens that do not count."""
    total = F.cross_entropy(logits, targets, reduction="sum")
    return total / (len(targets) * dist.get_world_size())


def sum_of_means(logits, targets):
    """Every rank's own mean, and the sum over the ranks as it is."""
    count = (targets != -100).sum().clamp(min=1)
    return F.cross_entropy(logits, targets, reduction="sum") / count


def once(model, inputs):
    for x in inputs:
        model(x).square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def each_time(model, inputs):
    """Sums sums again."""
    for x in inputs:
        model(x).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def each_by_itself(model, inputs):
    """The right sum, with a round for every micro-batch."""
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for x in inputs:
        model.zero_grad()
        model(x).square().sum().backward()
        for parameter, total in zip(model.parameters(), totals, strict=True):
            dist.all_reduce(parameter.grad)
            total += parameter.grad
    for parameter, total in zip(model.parameters(), totals, strict=True):
        parameter.grad = total


def last_only(model, inputs):
    for x in inputs:
        model.zero_grad()
        model(x).square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def technique(model, mesh, broadcast=True, zeros=True):
    group = mesh.get_group("dp")
    for tensor in model.parameters() if broadcast else ():
        dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward_backward(model, micro_batches, loss_fn):
        loss = accumulate(model, micro_batches, loss_fn)
        for parameter in model.parameters():
            if parameter.grad is None and zeros:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
        return loss

    return Parts(model, forward_backward=forward_backward)


def technique_alone(model, mesh):
    return model


def technique_without_broadcast(model, mesh):
    return technique(model, mesh, broadcast=False)


def technique_without_zeros(model, mesh):
    return technique(model, mesh, zeros=False)


ANSWERS = {
    "step_wire_bytes": (
        wire_bytes,
        [
            lambda p, s, n, m, each: wire_bytes(p, s, n, m, True),
            lambda p, s, n, m, each: wire_bytes(p, s, n, m, each) // 2,
            lambda p, s, n, m, each: wire_bytes(p, 4, n, m, each),
        ],
    ),
    "buckets": (buckets, [buckets_forwards, buckets_closed_early, lambda s, n: [s]]),
    "exposed_seconds": (
        exposed,
        [exposed_last_only, exposed_out_of_order, negative],
    ),
    "agreed": (agreed, [agreed_within_a_cycle, never_forgets, in_order_of_arrival]),
    "sum_gradients": (sum_gradients, [sum_what_is_there, average, sum_frozen_too]),
    "rank_loss": (rank_loss, [own_mean, all_tokens, sum_of_means]),
    "accumulate_once": (once, [each_time, each_by_itself, last_only]),
    "technique": (
        technique,
        [technique_alone, technique_without_broadcast, technique_without_zeros],
    ),
}
