"""A data-parallel training step: ours beside torch's DistributedDataParallel.

The same Transformer and the same data, on 2 and on 4 gloo ranks; both with their
default buckets, a first one of 1 MiB, then 25 MiB. A step is zero_grad, forward,
backward with the sum of the gradients, and SGD. Steps of both are taken in turn, A B,
B A, ..., each from a barrier; a step takes as long as on its slowest rank. Figures are
medians, ratios those of the pairs. Measure on a machine that does nothing else.

Without overlap one bucket holds the whole model; torch's is full when backward ends,
ours is told to wait until then.

The bound is max(compute alone, all-reduce alone): the same step without communication,
and the bytes of the gradients over the bandwidth of one all-reduce of that size.

    python benchmarks/ddp.py
"""

import json
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minitrain import launch
from minitrain.parallel.data import ddp
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer

RANKS = (2, 4)
SECONDS = 36.0  # of measuring, for each number of ranks
WARM_UP = 3  # rounds; torch's puts its buckets in order after the first
CONFIG = ModelConfig(vocab_size=1024, layers=2, hidden=512, heads=8, kv_heads=8)
BATCH, SEQ = 1, 64

Step = Callable[[], None]
Seconds = dict[str, list[float]]


def steps() -> dict[str, Step]:
    """Each kind of step, by name, on a model of its own."""
    everything = sum(p.numel() * 4 for p in Transformer(CONFIG).parameters())
    one = math.ceil(everything / 2**20)
    made: dict[str, nn.Module] = {
        "ours, overlap": ddp(Transformer(CONFIG)),
        "torch, overlap": peer(None),
        "ours, no overlap": ddp(
            Transformer(CONFIG), bucket_bytes=one * 2**20, overlap=False
        ),
        "torch, no overlap": peer(one),
        "compute": Transformer(CONFIG),
    }
    made_steps = {name: step_of(model) for name, model in made.items()}
    buffer = torch.ones(everything // 4)
    made_steps["all-reduce"] = lambda: dist.all_reduce(buffer.fill_(1.0))
    return made_steps


def peer(mebibytes: int | None) -> nn.Module:
    return DistributedDataParallel(
        Transformer(CONFIG), bucket_cap_mb=mebibytes, gradient_as_bucket_view=True
    )


def step_of(model: nn.Module) -> Step:
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (BATCH, SEQ + 1)
    data = torch.randint(CONFIG.vocab_size, size, generator=generator)
    tokens, targets = data[:, :-1], data[:, 1:].flatten()
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens, positions).flatten(0, 1)  # [batch * seq, vocab]
        nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()

    return step


def measure() -> Seconds:
    """Seconds of each step on the slowest rank, round by round."""
    kinds = steps()
    seconds: Seconds = {name: [] for name in kinds}
    start, number = time.monotonic(), -WARM_UP
    while slowest(time.monotonic() - start) < SECONDS or number < WARM_UP:
        order = list(kinds) if number % 4 == 0 else list(kinds)[:4]
        if number % 2:  # who goes first takes turns
            order[0:2], order[2:4] = order[1::-1], order[3:1:-1]
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            kinds[name]()
            took = slowest(time.perf_counter() - begin)
            if number >= 0:
                seconds[name].append(took)
        number += 1
    return seconds


def slowest(value: float) -> float:
    """The largest value of the ranks."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def main() -> None:
    size = sum(p.numel() for p in Transformer(CONFIG).parameters())
    print(f"{size:,} parameters; medians, in milliseconds")
    print(f"{'':20}{'ours':>7}{'torch':>9}{'ratio':>8}{'bound':>9}{'ours / bound':>14}")
    ours, peers, ratios = [], [], []
    for ranks in RANKS:
        seconds = launch(measure, ranks)[0]
        middle = {name: statistics.median(s) * 1e3 for name, s in seconds.items()}
        compute, reduction = middle["compute"], middle["all-reduce"]
        bound = max(compute, reduction)
        for how in ("overlap", "no overlap"):
            a, b = f"ours, {how}", f"torch, {how}"
            pairs = zip(seconds[a], seconds[b], strict=True)
            ratios.append(statistics.median(x / y for x, y in pairs))
            ours.append(middle[a])
            peers.append(middle[b])
            print(
                f"{f'{ranks} ranks, {how}':20}{middle[a]:7.1f}{middle[b]:9.1f}"
                f"{ratios[-1]:8.3f}{bound:9.1f}{middle[a] / bound:14.2f}"
            )
        print(f"  alone: compute {compute:.1f}, all-reduce {reduction:.1f}")
    mean = statistics.geometric_mean
    result = {"name": "ddp", "ours": mean(ours), "peer": mean(peers)}
    print(json.dumps(result | {"ratio": mean(ratios), "ratios": ratios}))


if __name__ == "__main__":
    main()
