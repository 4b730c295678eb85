"""This machine as a cluster: its kernels are priced by running them.

So a program can be simulated on the processes that `launch` starts here, and its
timeline stand below the one that was measured. What is predicted is what they do
together: the overlap, the waiting, the end.

    where, costs = this_machine(ranks=2)
    s = simulate(step, where, costs=costs, fuse=False)
    viz.twin(launch(step, 2), s.traces())
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minitrain.runtime import launch, trace
from minitrain.runtime.operators import BACKWARD, Operator
from minitrain.simulate.accelerators import Accelerator
from minitrain.simulate.costs import Costs
from minitrain.simulate.costs import costs as costs_of
from minitrain.simulate.events import Sharing
from minitrain.simulate.hardware import Cluster, Link
from minitrain.simulate.network import ideal
from minitrain.simulate.program import FLASH, PRODUCTS, Kernel

ELEMENTS = 2**20
"""Of the tensor that is summed over the ranks."""


def this_machine(ranks: int, link: Link | None = None) -> tuple[Cluster, Costs]:
    """A cluster of one host whose devices are the ranks that `launch` starts here.

    Args:
        ranks: Of the launch; no more than there are cores, else they share them.
        link: Between ranks, where it is emulated (a slow link); else it is measured.

    Returns:
        The cluster, and the costs to simulate with.
    """
    measured = launch(_measure, ranks)
    operator, flops, latency, bandwidth = map(median, zip(*measured, strict=True))
    link = link or Link(latency, bandwidth)
    device = Accelerator(
        name="core of this machine",
        peak_flops=dict.fromkeys(("fp32", "fp16", "bf16"), flops),
        memory_bytes=2**40,
        memory_bytes_per_second=1e10,
        l2_bytes=0,
        sms=1,
        watts=None,
        scale_up_bytes_per_second=link.bytes_per_second,
        scale_up_ranks=ranks,
        network_bytes_per_second=link.bytes_per_second,
        family="A100",
        per_host=ranks,
    )
    where = Cluster(device, 1, ranks, link, link, ranks)
    usual = costs_of(where, Sharing(0.0, 0.0), 0.0, False)
    latency = link.latency_seconds
    links = ideal(usual.wires, latency, latency)
    numbers = Here(usual.chips, links, usual.sharing, 0.0, False, {}, operator)
    return where, numbers


@dataclass(frozen=True)
class Here(Costs):
    """Prices a kernel by running it in this process, on one thread.

    Attributes:
        operator_seconds: Of a call, beside the kernel: Python, autograd, the trace.
    """

    operator_seconds: float = 0.0

    def _price(self, kernel: Kernel) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.operator_seconds + _run(kernel)
        finally:
            torch.set_num_threads(threads)


@torch.no_grad()
def _run(kernel: Kernel) -> float:
    """Seconds of a kernel here."""
    dtype = getattr(torch, kernel.dtype, torch.float32)
    if kernel.kind == FLASH:
        return _attention(kernel, dtype)
    if kernel.kind != PRODUCTS:  # an addition: two reads and a write
        a, b = torch.ones(2, max(1, kernel.sizes[0] // 12))
        return _seconds(lambda: torch.add(a, b))
    batch, m, n, k = kernel.sizes
    turned = kernel.variant == "wgrad"
    a = torch.ones(batch, *((k, m) if turned else (m, k)), dtype=dtype)
    a = a.transpose(1, 2) if turned else a
    b = torch.ones(batch, *((n, k) if kernel.variant == "forward" else (k, n)))
    b = b.to(dtype).transpose(1, 2) if kernel.variant == "forward" else b.to(dtype)
    if batch == 1:
        return _seconds(lambda: torch.mm(a[0], b[0]))
    return _seconds(lambda: torch.bmm(a, b))


def _attention(kernel: Kernel, dtype: torch.dtype) -> float:
    batch, heads, kv_heads, seq_q, seq_k, head_dim = kernel.sizes
    q = torch.ones(batch, heads, seq_q, head_dim, dtype=dtype)
    k = torch.ones(batch, kv_heads, seq_k, head_dim, dtype=dtype)
    backward = kernel.phase == BACKWARD

    def work() -> Any:
        with torch.set_grad_enabled(backward):
            x = q.detach().requires_grad_(backward)
            out = torch.nn.functional.scaled_dot_product_attention(
                x, k, k, is_causal=kernel.variant == "causal", enable_gqa=True
            )
            return out.sum().backward() if backward else out

    forward = _run(kernel._replace(phase="forward")) if backward else 0.0
    return max(0.0, _seconds(work) - forward)


def _measure() -> tuple[float, float, float, float]:
    """Seconds of an operator, FLOP/s of a product; latency and bytes/s of a ring."""
    few, many = torch.ones(8), torch.ones(ELEMENTS)
    a, ranks = torch.ones(512, 512), dist.get_world_size()
    operator = _operator_seconds()
    product = _seconds(lambda: a @ a, 10)
    small = _seconds(lambda: dist.all_reduce(few), 20)
    large = _seconds(lambda: dist.all_reduce(many), 5)
    sent = 2 * (ranks - 1) / ranks * 4 * ELEMENTS
    latency = small / max(1, 2 * (ranks - 1))
    rate = sent / max(large - small, 1e-9) if sent else math.inf
    return operator, 2 * 512**3 / product, latency, min(rate, 1e12)


def _operator_seconds() -> float:
    """What an operator costs in a step of nothing else, forward and backward."""
    parts = [nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.SiLU()]
    model, x = nn.Sequential(*parts * 8), torch.ones(8, 8)

    def step() -> None:
        model(x).sum().backward()

    with trace(operators=True) as counted:
        step()
    with trace():
        seconds = _seconds(step, 20)
    return seconds / sum(isinstance(e, Operator) for e in counted.program)


def _seconds(work: Callable[[], object], times: int = 3) -> float:
    """Median of some calls, after one that is not counted.

    Results are kept, as a forward pass keeps them: new memory takes time of its own.
    """
    kept, seconds = [work()], []
    for _ in range(times):
        begin = time.perf_counter()
        kept.append(work())
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
