"""What a trace costs an operator: ours beside torch's profiler recording memory.

Small operators, so that what is measured is the observer and not the work: a step of
eight tiny Transformer layers, about two thousand operators. Samples are paired, one
after the other; the figures are medians, in microseconds added to an operator.

    python benchmarks/trace.py
"""

import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain import trace

SAMPLES = 15


class Count(TorchDispatchMode):
    """Counts operators."""

    seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def profiler() -> AbstractContextManager[Any]:
    """The peer: what gives live bytes, and gloo's calls."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def main() -> None:
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(1, 4, 16)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(observer: Callable[[], AbstractContextManager[Any]]) -> float:
        begin = time.perf_counter()
        with observer() as result:
            step()
        if isinstance(result, profile):
            result.events()
        return time.perf_counter() - begin

    step()
    with Count() as count:
        step()
    seconds: dict[str, list[float]] = {"plain": [], "trace": [], "profiler": []}
    for _ in range(SAMPLES):
        seconds["plain"].append(timed(nullcontext))
        seconds["trace"].append(timed(trace))
        seconds["profiler"].append(timed(profiler))
    added = {
        name: statistics.median(
            (b - a) / count.seen * 1e6
            for a, b in zip(seconds["plain"], times, strict=True)
        )
        for name, times in seconds.items()
    }
    print(f"{count.seen} operators; microseconds added to each")
    for name in ("trace", "profiler"):
        print(f"  {name:9} {added[name]:6.1f}")
    result = {"name": "trace", "ours": added["trace"], "peer": added["profiler"]}
    print(json.dumps(result | {"ratio": added["trace"] / added["profiler"]}))


if __name__ == "__main__":
    main()
