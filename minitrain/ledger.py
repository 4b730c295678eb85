"""The ledger: one run that goes through the whole book, and what it costs so far.

The run trains Llama-3 8B on 64 H100s, four million tokens a step. Each chapter makes
one line of it, from closed forms: the memory of a GPU and the time of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from minitrain.collectives.cost import Link, hierarchical_seconds
from minitrain.parallel.data import plan_buckets
from minitrain.simulate.estimate import Estimate, estimate
from minitrain.simulate.plan import Plan
from minitrain.simulate.software import software
from minitrain.workload import costs, formulas
from minitrain.workload.memory import step_memory
from minitrain.workload.model import Transformer
from minitrain.workload.presets import preset

if TYPE_CHECKING:
    from minitrain.viz import Entry


@dataclass(frozen=True)
class Run:
    """The run of the ledger, in SI units.

    Attributes:
        parameters: Of Llama-3 8B (Grattafiori et al. 2024, arXiv:2407.21783).
        training_tokens: What it was trained on (the same).
        gpus: H100 SXM, eight to a host.
        peak_flops: Dense bf16 operations a second of one GPU (NVIDIA data sheet).
        memory_bytes: Of one GPU: five stacks of 16 GiB, sold as 80 GB; its driver
            leaves 79.6 GiB.
        network_bytes_per_second: One 400 Gbit/s adapter for each GPU, each way.
        nvlink_bytes_per_second: Between GPUs of a host, each way (NVIDIA data sheet).
        network_latency_seconds: Of a step of a ring over the network, and
        nvlink_latency_seconds: within a host: constants of NCCL's tuning model, ring
            with the Simple protocol (nccl b6475625, src/graph/tuning.cc).
        batch_tokens: Tokens of one optimizer step over all GPUs: our choice, eight
            sequences for each GPU.
        sequence: Tokens of one sequence.
        utilization: Share of the peak at which a GPU is assumed to compute, until
            chapter 4 derives it; training the 405B model of the same report reached
            0.38 to 0.43.
    """

    parameters: int = 8_030_261_248
    training_tokens: float = 15e12
    gpus: int = 64
    gpus_per_host: int = 8
    peak_flops: float = 989e12
    memory_bytes: int = 80 * 2**30
    network_bytes_per_second: float = 50e9
    nvlink_bytes_per_second: float = 450e9
    network_latency_seconds: float = 14.0e-6
    nvlink_latency_seconds: float = 3.4e-6
    batch_tokens: int = 4 * 2**20
    sequence: int = 8192
    utilization: float = 0.40

    def arithmetic_seconds(self, gpus: int, flops_per_token: float) -> float:
        """Time of a step's arithmetic on so many GPUs, nothing else counted."""
        speed = gpus * self.peak_flops * self.utilization
        return self.batch_tokens * flops_per_token / speed


RUN = Run()


def through_rank_0_seconds(
    payload_bytes: int, ranks: int, bytes_per_second: float
) -> float:
    """Time of a sum that all ranks send to rank 0, which sends it back to each.

    Rank 0's link carries ``ranks - 1`` payloads in, then as many out.
    """
    return 2 * (ranks - 1) * payload_bytes / bytes_per_second


def all_reduce_seconds(payload_bytes: float) -> float:
    """Time of a sum over all GPUs in two levels: hosts, and the GPUs in them."""
    inside = Link(RUN.nvlink_latency_seconds, RUN.nvlink_bytes_per_second)
    across = Link(RUN.network_latency_seconds, RUN.network_bytes_per_second)
    hosts = RUN.gpus // RUN.gpus_per_host
    return hierarchical_seconds(hosts, RUN.gpus_per_host, payload_bytes, inside, across)


def exposed_seconds(
    ready_seconds: Sequence[float],
    message_seconds: Sequence[float],
    backward_seconds: float,
) -> float:
    """How long after backward the last bucket arrives; buckets travel in order.

    Args:
        ready_seconds: When each bucket is full, counted from the start of backward.
        message_seconds: How long its sum takes, once the link is free.
        backward_seconds: When backward ends.
    """
    free = 0.0
    for ready, length in zip(ready_seconds, message_seconds, strict=True):
        free = max(free, ready) + length
    return max(0.0, free - backward_seconds)


def entries(chapter: int) -> list[Entry]:
    """The lines of the ledger up to a chapter, in order."""
    lines = {1: _messages, 2: _counted, 3: _two_levels, 4: _derived, 5: _overlapped}
    return [line for n, make in lines.items() if n <= chapter for line in make()]


def _messages() -> list[Entry]:
    """Chapter 1: weights and gradients in bf16, and gradients summed by rank 0."""
    from minitrain.viz import Entry

    held = 4 * RUN.parameters  # two bytes a weight, two a gradient
    alone = RUN.arithmetic_seconds(1, 6 * RUN.parameters)
    shared = RUN.arithmetic_seconds(RUN.gpus, 6 * RUN.parameters)
    payload = 2 * RUN.parameters
    gather = through_rank_0_seconds(payload, RUN.gpus, RUN.network_bytes_per_second)
    return [
        Entry("one GPU", held, alone),
        Entry("ch. 1: 64 GPUs, sums by rank 0", held, shared + gather),
    ]


def _counted() -> list[Entry]:
    """Chapter 2: all that a GPU holds, and all operations, with and without recompute.

    Weights in bfloat16, AdamW with float32 master weights, and eight micro-batches of
    one sequence. What is computed again is computed at the same speed.
    """
    gather = through_rank_0_seconds(
        2 * RUN.parameters, RUN.gpus, RUN.network_bytes_per_second
    )
    return [
        _line("ch. 2: all counted", False, gather),
        _line("ch. 2: recomputed", True, gather),
    ]


def _two_levels() -> list[Entry]:
    """Chapter 3: the same sum, hierarchical; what is recomputed stays so."""
    seconds = all_reduce_seconds(2 * RUN.parameters)
    return [_line("ch. 3: sums in two levels", True, seconds)]


def _derived() -> list[Entry]:
    """Chapter 4: the same step, its kernels and sums priced by the simulator."""
    from minitrain.viz import Entry

    held = _line("", True, 0.0).memory_bytes
    return [Entry("ch. 4: derived, not assumed", held, derived().step_seconds)]


@cache
def derived() -> Estimate:
    """The run by the closed forms of `minitrain.simulate`, sums after backward.

    Llama-3 8B, blocks recomputed, eight micro-batches of one sequence on each GPU;
    gradients are summed in bfloat16, two bytes each. Products are as fast as whole
    steps of others were found to run them on H100s (`minitrain.simulate.residuals`).
    """
    plan = Plan(
        seq=RUN.sequence,
        global_batch=RUN.batch_tokens // RUN.sequence,
        dp=RUN.gpus,
        recompute="full",
    )
    share = software("megatron-core", "H100").gemm_share
    rules = replace(software("minitrain"), data_hidden=0, gemm_share=share)
    hosts = RUN.gpus // RUN.gpus_per_host
    cluster = f"h100:{hosts}x{RUN.gpus_per_host}"
    return estimate(preset("llama3-8b"), plan, cluster, rules)


def _overlapped() -> list[Entry]:
    """Chapter 5: in buckets, during the backward pass of the last micro-batch.

    Summed in bfloat16 (`reduce_dtype`), two bytes a gradient, as everywhere here.
    """
    from minitrain.viz import Entry

    (before,) = _derived()
    step = derived()
    computing = step.step_seconds - step.parts["data-parallel messages"]
    seconds = computing + overlapped_seconds()
    return [Entry("ch. 5: sums overlapped", before.memory_bytes, seconds)]


def overlapped_seconds() -> float:
    """What is left of the sums of a step when buckets travel during backward.

    A parameter's gradient is taken to need time in proportion to its elements; the
    embedding's needs none, and comes last.
    """
    model = Transformer(preset("llama3-8b"), device="meta", dtype=torch.bfloat16)
    buckets = plan_buckets(model.parameters())
    sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
    matrices = RUN.parameters - next(model.parameters()).numel()
    backward = len(model.blocks) * derived().block_backward_seconds
    done = [min(n, matrices) for n in itertools.accumulate(sizes)]
    ready = [backward * n / matrices for n in done]
    return exposed_seconds(ready, [all_reduce_seconds(2 * n) for n in sizes], backward)


def micro_batch_seconds(recompute: bool) -> float:
    """Arithmetic of one sequence on one GPU, forward and backward."""
    model, seq = preset("llama3-8b"), RUN.sequence
    head = formulas.matmul_flops(seq, model.hidden * model.vocab_size)
    again = costs.forward_flops(model, 1, seq) - head
    flops = costs.model_flops(model, 1, seq) + recompute * again
    return flops / (RUN.peak_flops * RUN.utilization)


def _line(name: str, recompute: bool, sum_seconds: float) -> Entry:
    """Memory and arithmetic of chapter 2, and so much time for the sums."""
    from minitrain.viz import Entry

    model, seq = preset("llama3-8b"), RUN.sequence
    memory = step_memory(
        model, 1, seq, "bfloat16", recompute, fused=True, accumulating=True
    )
    micro_batches = RUN.batch_tokens / seq / RUN.gpus
    seconds = micro_batches * micro_batch_seconds(recompute) + sum_seconds
    return Entry(name, memory.peak_bytes, seconds)
