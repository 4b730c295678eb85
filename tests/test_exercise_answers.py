"""Each chapter's checks accept a right answer and reject the usual wrong ones."""

import math

import answers_03
import answers_04
import answers_05
import answers_16
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from minitrain.exercises import find, judge
from minitrain.exercises.framework import CHAPTERS


def shift(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return x
    received = torch.empty_like(x)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    return received


def shift_backwards(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return x
    received = torch.empty_like(x)
    work = dist.isend(x, (rank - 1) % size)
    dist.recv(received, (rank + 1) % size)
    work.wait()
    return received


def shift_deadlock(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    dist.send(x, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    return received


def ring(x, always_add=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(x.clone().tensor_split(size))
    for step in range(2 * (size - 1)):
        outgoing = (rank - step) % size
        incoming = (outgoing - 1) % size
        received = torch.empty_like(chunks[incoming])
        work = dist.isend(chunks[outgoing], (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        work.wait()
        add = always_add or step < size - 1
        chunks[incoming] = chunks[incoming] + received if add else received
    return torch.cat(chunks)


def wrong_ring(x):
    """Sums in both passes."""
    return ring(x, always_add=True)


def whole_ring(x):
    """Right sums, but each message is the whole tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, travelling = x.clone(), x.clone()
    for _ in range(size - 1):
        received = torch.empty_like(x)
        work = dist.isend(travelling, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        work.wait()
        total, travelling = total + received, received
    return total


def built_in(x):
    dist.all_reduce(x)
    return x


def star(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.empty_like(x)
    for peer in range(1, size) if rank == 0 else ():
        dist.recv(part, peer)
        x += part
    for peer in range(1, size) if rank == 0 else ():
        dist.send(x, peer)
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
    return x


def finishes(programs):
    left, moved = [list(p) for p in programs], True
    while moved:
        moved = False
        for rank, program in enumerate(left):
            if program and program[0][0] == "send":
                peer = program[0][1]
                if left[peer] and left[peer][0] == ("recv", rank):
                    del program[0], left[peer][0]
                    moved = True
    return not any(left)


def counts_only(programs):
    """Every send has a receive: necessary, and not enough."""
    sends = sorted(
        (r, to) for r, p in enumerate(programs) for k, to in p if k == "send"
    )
    recvs = sorted((s, r) for r, p in enumerate(programs) for k, s in p if k == "recv")
    return sends == recvs


def accumulate(model, micro_batches):
    total = sum((y != -100).sum() for _, y in micro_batches)
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x), y, reduction="sum") / max(total, 1)
        loss.backward()


def mean_of_means(model, micro_batches):
    for x, y in micro_batches:
        (F.cross_entropy(model(x), y) / len(micro_batches)).backward()


def forgets_the_mask(model, micro_batches):
    total = sum(len(y) for _, y in micro_batches)
    for x, y in micro_batches:
        (F.cross_entropy(model(x), y, reduction="sum") / total).backward()


def global_mean(sums, tokens):
    count = sum(map(sum, tokens))
    return sum(map(sum, sums)) / count if count else 0.0


def mean_of_rank_means(sums, tokens):
    pairs = zip(sums, tokens, strict=True)
    return sum(sum(s) / max(sum(n), 1) for s, n in pairs) / len(sums)


def coordinates(rank, sizes):
    place = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.insert(0, index)
    return place


ANSWERS = {
    "star_wire_bytes": (lambda s, n: (n - 1) * s, [lambda s, n: n * s, lambda s, n: s]),
    "ring_wire_bytes": (
        lambda s, n: 2 * (n - 1) * s // n,
        [lambda s, n: (n - 1) * s // n, lambda s, n: 2 * s, lambda s, n: s],
    ),
    "coordinates": (coordinates, [lambda r, sizes: coordinates(r, sizes[::-1])[::-1]]),
    "finishes": (finishes, [counts_only, lambda programs: True]),
    "shift": (shift, [shift_backwards, shift_deadlock, lambda x: x]),
    "ring_all_reduce": (ring, [built_in, star, wrong_ring, whole_ring, lambda x: x]),
    "block_parameters": (
        lambda h, a, k, f: 2 * h * h + 2 * h * k * (h // a) + 3 * h * f + 2 * h,
        [
            lambda h, a, k, f: 4 * h * h + 3 * h * f + 2 * h,
            lambda h, a, k, f: 2 * h * h + 2 * h * k * (h // a) + 2 * h * f + 2 * h,
            lambda h, a, k, f: 2 * h * h + 2 * h * k * (h // a) + 3 * h * f,
        ],
    ),
    "state_bytes": (
        lambda n, o, p: n * (8 + 8 * (o == "adamw")),
        [lambda n, o, p: n * (8 + 8 * (o == "adamw") - 4 * (p == "bf16"))],
    ),
    "mfu": (
        lambda t, n, layers, a, d, s, p: t * (6 * n + 12 * layers * a * d * s) / p,
        [
            lambda t, n, layers, a, d, s, p: t * 6 * n / p,
            lambda t, n, layers, a, d, s, p: t * (6 * n + 6 * layers * a * d * s) / p,
        ],
    ),
    "global_mean": (global_mean, [mean_of_rank_means]),
    "accumulate": (accumulate, [mean_of_means, forgets_the_mask]),
    "largest_batch": (
        lambda c, f, s: max(0, (c - f) // s),
        [lambda c, f, s: (c - f) // s, lambda c, f, s: max(0, round((c - f) / s))],
    ),
    "clip_scale": (
        lambda n, m: min(1.0, m / max(math.hypot(*n), 1e-30)),
        [
            lambda n, m: min(1.0, m / max(sum(n), 1e-30)),
            lambda n, m: m / math.hypot(*n),
        ],
    ),
    **answers_03.ANSWERS,
    **answers_04.ANSWERS,
    **answers_05.ANSWERS,
    **answers_16.ANSWERS,
}


def test_every_exercise_has_answers_here():
    names = set()
    for path in CHAPTERS.glob("chapter_*.py"):
        module = __import__(f"minitrain.exercises.{path.stem}", fromlist=["EXERCISES"])
        names |= {exercise.name for exercise in module.EXERCISES}
    assert names == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_right_answer_is_accepted(name):
    verdict = judge(find(name), ANSWERS[name][0])
    assert verdict.solved, verdict.text


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n, (_, w) in ANSWERS.items() for i in range(len(w))]
)
def test_a_wrong_answer_is_rejected(name, number):
    verdict = judge(find(name), ANSWERS[name][1][number])
    assert not verdict.solved
    assert verdict.text != "not solved yet"
