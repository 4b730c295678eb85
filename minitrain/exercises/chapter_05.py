"""Exercises of chapter 5: gradients that agree, in few messages, unseen."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from minitrain import launch, trace
from minitrain.exercises.framework import Case, Exercise, RefusedError, is_stub
from minitrain.testing import PROBLEMS, check_equal

# ---- pure functions


def step_wire_bytes(
    parameters: int, element_bytes: int, ranks: int, micro_batches: int, each: bool
) -> int:
    """Bytes a rank sends in a step, in a ring whose chunks divide.

    Args:
        each: whether gradients are summed after each micro-batch, or once.
    """
    times = micro_batches if each else 1
    return times * 2 * (ranks - 1) * parameters * element_bytes // ranks


def _steps(draw: random.Random) -> Iterator[Case]:
    yield 1024, 4, 2, 1, True
    yield 1024, 4, 8, 4, True
    yield 1024, 2, 8, 4, False
    yield 1024, 4, 1, 4, True  # alone
    for _ in range(14):
        ranks = draw.randint(2, 64)
        parameters = ranks * draw.randint(1, 10**8)
        micro = draw.randint(1, 16)
        yield parameters, draw.choice([2, 4]), ranks, micro, draw.random() < 0.5


def buckets(sizes_bytes: list[int], limit_bytes: int) -> list[list[int]]:
    """Parameters by bucket, in the order in which backward finishes them.

    Backward runs from the last parameter to the first. A bucket is closed as soon as
    it has `limit_bytes`; the last one may have less.
    """
    made: list[list[int]] = []
    held = limit_bytes
    for index in reversed(range(len(sizes_bytes))):
        if held >= limit_bytes:
            made.append([])
            held = 0
        made[-1].append(index)
        held += sizes_bytes[index]
    return made


def _models(draw: random.Random) -> Iterator[Case]:
    yield [4, 4, 4, 4], 8
    yield [1, 2, 3, 4, 5], 6
    yield [3, 20, 3], 8  # one larger than a bucket
    yield [], 8
    yield [20], 8
    yield [5, 0, 5, 0], 5  # parameters without elements
    for _ in range(14):
        sizes = [draw.randint(1, 60) for _ in range(draw.randint(1, 20))]
        yield sizes, draw.randint(20, 100)


def exposed_seconds(
    ready_seconds: list[float], message_seconds: list[float], backward_seconds: float
) -> float:
    """How long after backward the last sum ends, when sums follow one another.

    Bucket i is ready at ``ready_seconds[i]`` and its sum takes
    ``message_seconds[i]``. Sums go over one link, in the order of the buckets: a
    bucket that is ready early waits for those before it.
    """
    free = 0.0
    for ready, length in zip(ready_seconds, message_seconds, strict=True):
        free = max(free, ready) + length
    return max(0.0, free - backward_seconds)


def _timelines(draw: random.Random) -> Iterator[Case]:
    yield [1.0, 2.0, 3.0], [0.5, 0.5, 0.5], 3.0
    yield [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 3.0  # the link is behind
    yield [3.0, 1.0, 2.0], [0.5, 0.5, 0.5], 3.0  # the first bucket is ready last
    yield [1.0, 2.0], [0.1, 0.1], 5.0  # all hidden
    for _ in range(16):
        count = draw.randint(1, 8)
        backward = draw.uniform(1, 5)
        ready = [draw.uniform(0, backward) for _ in range(count)]
        yield ready, [draw.uniform(0, 1.5) for _ in range(count)], backward


Reports = list[list[list[str]]]


def agreed(reports: Reports) -> list[list[str]]:
    """What Horovod's coordinator schedules in each cycle.

    ``reports[cycle][rank]`` lists the tensors that became ready on a rank. A tensor is
    scheduled in the cycle in which the last rank has reported it; those of one cycle
    in alphabetical order, so that the order is the same everywhere.
    """
    ranks = len(reports[0]) if reports else 0
    waiting: dict[str, set[int]] = {}
    schedule = []
    for cycle in reports:
        for rank, names in enumerate(cycle):
            for name in names:
                waiting.setdefault(name, set()).add(rank)
        ready = sorted(name for name, who in waiting.items() if len(who) == ranks)
        for name in ready:
            del waiting[name]
        schedule.append(ready)
    return schedule


def _cycles(draw: random.Random) -> Iterator[Case]:
    yield ([[["a"], ["a"]]],)
    yield ([[["a", "b"], ["b"]], [[], ["a"]]],)  # opposite orders
    yield ([[["b"], ["a"]], [["a"], ["b"]]],)
    yield ([[["a"], []], [[], []], [[], ["a"]]],)  # a cycle without anything
    yield ([[["a"], ["a"]], [["a"], ["a"]]],)  # the next step's gradient again
    for _ in range(12):
        ranks, names = draw.randint(1, 4), "abcdef"[: draw.randint(1, 6)]
        cycles = draw.randint(1, 4)
        reports: Reports = [[[] for _ in range(ranks)] for _ in range(cycles)]
        for rank in range(ranks):
            for name in draw.sample(names, len(names)):
                reports[draw.randrange(cycles)][rank].append(name)
        yield (reports,)


# ---- on ranks


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    return nn.Sequential(*layers).double()


def _examples(rank: int, valid: list[int]) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets; only the first `valid[rank]` targets count."""
    generator = torch.Generator().manual_seed(10 + rank)
    inputs = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    targets = torch.randint(3, (6,), generator=generator)
    targets[valid[rank] :] = -100
    return inputs, targets


def _flat_gradient(model: nn.Module) -> Tensor:
    grads = (
        torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
    )
    return torch.cat([grad.flatten() for grad in grads])


def gradient_of_the_mean(valid: list[int]) -> list[Tensor]:
    """On every rank: the gradient of the mean over all valid tokens of all ranks."""
    model = _model()
    examples = [_examples(rank, valid) for rank in range(len(valid))]
    inputs = torch.cat([x for x, _ in examples])
    targets = torch.cat([y for _, y in examples])
    total = F.cross_entropy(model(inputs), targets, reduction="sum")
    (total / max(sum(valid), 1)).backward()
    return [_flat_gradient(model)] * len(valid)


def _token_counts(draw: random.Random) -> Iterator[Case]:
    yield ([6, 6],)
    yield ([6, 1],)  # the published case: few valid tokens on one rank
    yield ([5, 0, 3],)  # a rank without any
    yield ([0, 0],)
    yield ([4],)


def _run_loss(answer: Callable[..., Any], case: Case) -> list[Any]:
    (valid,) = case
    return launch(_loss_on_rank, len(valid), answer, valid, timeout=5.0)


def _loss_on_rank(answer: Callable[..., Any], valid: list[int]) -> Any:
    """The reader's loss, then backward and a plain sum over the ranks."""
    model = _model()
    inputs, targets = _examples(dist.get_rank(), valid)
    loss = answer(model(inputs), targets)
    if loss is None or loss is ...:
        return loss
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise RefusedError("return a scalar tensor that backward can start from")
    if not loss.isfinite().all():
        raise RefusedError(f"the loss is {loss.item()} with {valid} valid targets")
    loss.backward()
    gradient = _flat_gradient(model)
    dist.all_reduce(gradient)
    return gradient


def summed_gradients(used: list[list[int]]) -> list[Tensor]:
    """On every rank: the sum of all ranks' gradients, zero for an unused layer."""
    models = [_used_layers(rank, used) for rank in range(len(used))]
    total = torch.stack([_with_zeros(model) for model in models]).sum(0)
    return [total] * len(used)


def _used_layers(rank: int, used: list[list[int]]) -> nn.Module:
    """Three layers after a backward that went through those in `used[rank]` only."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]).double()
    model[0].bias.requires_grad_(False)
    generator = torch.Generator().manual_seed(20 + rank)
    inputs = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    for layer in used[rank]:
        model[layer](inputs).square().sum().backward()
    return model


def _with_zeros(model: nn.Module) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
    )


def _branches(draw: random.Random) -> Iterator[Case]:
    yield ([[0, 1, 2], [0, 1, 2]],)
    yield ([[0, 1, 2], [0, 2]],)  # a layer that one rank did not use
    yield ([[0], [1], [2]],)  # each rank another
    yield ([[2, 1, 0], [0, 1, 2]],)  # used in another order
    yield ([[0, 1], [0, 1]],)  # a layer that nobody used
    yield ([[1]],)


def _run_sum(answer: Callable[..., Any], case: Case) -> list[Any]:
    (used,) = case
    return launch(_sum_on_rank, len(used), answer, used, timeout=5.0)


def _sum_on_rank(answer: Callable[..., Any], used: list[list[int]]) -> Any:
    model = _used_layers(dist.get_rank(), used)
    before = _with_zeros(model)
    result = answer(model)
    if result is not None:
        return result
    if len(used) > 1 and torch.equal(before, _with_zeros(model)):
        return None  # nothing was done: a stub
    frozen = model[0].bias.grad  # type: ignore[index]
    if frozen is not None:
        raise RefusedError("a frozen parameter got a gradient")
    return _with_zeros(model)


def one_round(micro_batches: int) -> list[Tensor]:
    """On both ranks: the sum of all gradients, of all micro-batches and ranks."""
    total = torch.zeros(())
    for rank in range(2):
        model = _model()
        _accumulate_alone(model, rank, micro_batches)
        total = total + _flat_gradient(model)
    return [total] * 2


def _accumulate_alone(model: nn.Module, rank: int, micro_batches: int) -> None:
    for inputs in _micro_inputs(rank, micro_batches):
        model(inputs).square().sum().backward()


def _micro_inputs(rank: int, micro_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(30 + rank)
    shape = micro_batches, 4, 5
    return list(torch.randn(shape, dtype=torch.float64, generator=generator))


def _run_accumulation(answer: Callable[..., Any], case: Case) -> list[Any]:
    (micro_batches,) = case
    return launch(_accumulation_on_rank, 2, answer, micro_batches, timeout=5.0)


def _accumulation_on_rank(answer: Callable[..., Any], micro_batches: int) -> Any:
    model = _model()
    with trace() as t:
        result = answer(model, _micro_inputs(dist.get_rank(), micro_batches))
    if result is not None:
        return result
    if any(p.grad is None for p in model.parameters()):
        return None
    calls, gradients = len(t.messages), len(list(model.parameters()))
    if calls > gradients:
        raise RefusedError(
            f"it makes {calls} calls for {gradients} gradients; one round is enough"
        )
    return _flat_gradient(model)


def _micro_batch_counts(draw: random.Random) -> Iterator[Case]:
    for count in (1, 2, 3, 5):
        yield (count,)


JUDGED_ON = (
    "tied",
    "frozen",
    "unused",
    "branches",
    "micro-batches",
    "no tokens",
)


def technique_is_right(ranks: int, problems: list[str]) -> bool:
    """A data-parallel technique equals one device."""
    return True


def _run_technique(answer: Callable[..., Any], case: Case) -> bool:
    """Let the harness compare the reader's technique with one device."""
    ranks, problems = case
    written = partial(_unless_stub, answer)
    try:
        check_equal(written, ranks, [PROBLEMS[p] for p in problems], timeout=5.0)
    except AssertionError as difference:
        raise RefusedError(str(difference)) from difference
    return True


def _unless_stub(answer: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> Any:
    made = answer(model, mesh)
    if is_stub(made):
        raise NotImplementedError
    return made


def _judged(draw: random.Random) -> Iterator[Case]:
    yield 3, ["plain"]
    yield 2, list(JUDGED_ON)
    yield 1, ["plain"]


EXERCISES = (
    Exercise("step_wire_bytes", step_wire_bytes, _steps),
    Exercise("buckets", buckets, _models),
    Exercise("exposed_seconds", exposed_seconds, _timelines),
    Exercise("agreed", agreed, _cycles),
    Exercise(
        "sum_gradients", summed_gradients, _branches, _run_sum, 1e-12, part="rank"
    ),
    Exercise(
        "rank_loss",
        gradient_of_the_mean,
        _token_counts,
        _run_loss,
        1e-12,
        part="rank",
    ),
    Exercise(
        "accumulate_once",
        one_round,
        _micro_batch_counts,
        _run_accumulation,
        1e-12,
        part="rank",
    ),
    Exercise("technique", technique_is_right, _judged, _run_technique),
)
