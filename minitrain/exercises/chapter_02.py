"""Exercises of chapter 2: what training costs, and how a loss is averaged."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minitrain.exercises.framework import Case, Exercise


def block_parameters(hidden: int, heads: int, kv_heads: int, ffn: int) -> int:
    """Parameters of one Llama block: no biases, SwiGLU, grouped queries, two norms."""
    head_dim = hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head_dim
    return attention + 3 * hidden * ffn + 2 * hidden


def _blocks(draw: random.Random) -> Iterator[Case]:
    yield 4096, 32, 8, 14336  # Llama-3 8B
    yield 4096, 32, 32, 11008  # Llama-2 7B: every head has its own keys
    for _ in range(18):
        kv_heads, group, head_dim = (draw.randint(1, 8) for _ in range(3))
        heads = kv_heads * group
        yield 8 * heads * head_dim, heads, kv_heads, draw.randint(1, 10**4)


def state_bytes(parameters: int, optimizer: str, precision: str) -> int:
    """Weights, gradients and optimizer state of plain training.

    `precision` is "fp32", or "bf16" with float32 master weights; `optimizer` is "sgd"
    (no state) or "adamw" (two moments in float32).
    """
    weights = 4 + 4 if precision == "fp32" else 2 + 2 + 4
    return parameters * (weights + (8 if optimizer == "adamw" else 0))


def _states(draw: random.Random) -> Iterator[Case]:
    for optimizer in ("adamw", "sgd"):
        for precision in ("bf16", "fp32"):
            yield draw.randint(1, 10**12), optimizer, precision


def mfu(
    tokens_per_second: float,
    parameters: int,
    layers: int,
    heads: int,
    head_dim: int,
    seq: int,
    peak_flops: float,
) -> float:
    """Model FLOPs utilization (Chowdhery et al. 2022, appendix B)."""
    per_token = 6 * parameters + 12 * layers * heads * head_dim * seq
    return tokens_per_second * per_token / peak_flops


def _runs(draw: random.Random) -> Iterator[Case]:
    # PaLM 540B on 6,144 TPU v4 of 275 TFLOP/s: 0.462 in the paper.
    yield 238.3e3, 540 * 10**9, 118, 48, 256, 2048, 6144 * 275e12
    for _ in range(9):
        layers, heads, head_dim = (draw.randint(1, 128) for _ in range(3))
        seq, parameters = 2 ** draw.randint(5, 15), draw.randint(10**6, 10**12)
        yield 1e4 * draw.random(), parameters, layers, heads, head_dim, seq, 1e17


def global_mean(sums: list[list[float]], tokens: list[list[int]]) -> float:
    """The loss a token of a step: `sums[rank][micro_batch]` nats over `tokens`."""
    count = sum(map(sum, tokens))
    return sum(map(sum, sums)) / count if count else 0.0


def _losses(draw: random.Random) -> Iterator[Case]:
    yield [[2.0, 14.0]], [[1, 7]]
    yield [[3.0], [21.0]], [[1], [7]]  # one rank has few valid tokens
    yield [[4.0, 0.0], [8.0, 6.0]], [[2, 0], [2, 3]]  # a micro-batch without any
    yield [[0.0], [0.0]], [[0], [0]]
    for _ in range(16):
        ranks, parts = draw.randint(1, 4), draw.randint(1, 4)
        tokens = [[draw.randint(0, 9) for _ in range(parts)] for _ in range(ranks)]
        yield [[n * draw.uniform(1, 8) for n in row] for row in tokens], tokens


Micro = list[tuple[Tensor, Tensor]]


def _linear() -> nn.Linear:
    """The model of the next exercise, the same each time."""
    model = nn.Linear(3, 5, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.weight.normal_(generator=generator)
    return model


def accumulated(micro_batches: Micro) -> Tensor:
    """The gradient of the mean loss over all valid tokens of all micro-batches."""
    model = _linear()
    inputs = torch.cat([x for x, _ in micro_batches])
    targets = torch.cat([y for _, y in micro_batches])
    if (targets != -100).any():
        nn.functional.cross_entropy(model(inputs), targets).backward()
    gradient = model.weight.grad
    return torch.zeros_like(model.weight) if gradient is None else gradient


def _accumulate(answer: Callable[[nn.Module, Micro], Any], case: Case) -> Any:
    model = _linear()
    if (result := answer(model, *case)) is not None:
        return result
    gradient = model.weight.grad
    return None if gradient is None else gradient


def _micro_batches(draw: random.Random) -> Iterator[Case]:
    for sizes, ignored in (
        ([4, 4], 0),
        ([1, 7], 0),
        ([3, 3, 2], 5),
        ([5], 2),
        ([2, 2], 3),
    ):
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        batches: Micro = []
        for size in sizes:
            inputs = torch.randn(size, 3, dtype=torch.float64, generator=generator)
            targets = torch.randint(5, (size,), generator=generator)
            batches.append((inputs, targets))
        for at in range(ignored):  # the first micro-batch loses its tokens first
            order = [y[i : i + 1] for _, y in batches for i in range(len(y))]
            order[at].fill_(-100)
        yield (batches,)


def largest_batch(capacity_bytes: int, fixed_bytes: int, sequence_bytes: int) -> int:
    """Sequences that fit: what is left beside the states, in whole sequences."""
    return max(0, (capacity_bytes - fixed_bytes) // sequence_bytes)


def _capacities(draw: random.Random) -> Iterator[Case]:
    yield 80 * 2**30, 40 * 2**30, 10 * 2**30
    yield 80 * 2**30, 128 * 10**9, 2**30  # not even the states fit
    yield 100, 40, 60  # exactly one
    for _ in range(17):
        yield draw.randint(1, 2**40), draw.randint(1, 2**39), draw.randint(1, 2**33)


def clip_scale(norms: list[float], max_norm: float) -> float:
    """What every gradient is multiplied by, from the norms of the model's parts."""
    norm = math.hypot(*norms)
    return min(1.0, max_norm / norm) if norm else 1.0


def _norms(draw: random.Random) -> Iterator[Case]:
    yield [3.0, 4.0], 1.0
    yield [0.1, 0.2], 1.0  # small enough already
    yield [0.0, 0.0], 1.0
    for _ in range(17):
        yield (
            [draw.uniform(0, 4) for _ in range(draw.randint(1, 6))],
            draw.uniform(1, 4),
        )


EXERCISES = (
    Exercise("block_parameters", block_parameters, _blocks),
    Exercise("state_bytes", state_bytes, _states),
    Exercise("mfu", mfu, _runs),
    Exercise("global_mean", global_mean, _losses),
    Exercise("accumulate", accumulated, _micro_batches, _accumulate, 1e-10),
    Exercise("largest_batch", largest_batch, _capacities),
    Exercise("clip_scale", clip_scale, _norms, tolerance=1e-5),
)
