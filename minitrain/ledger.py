"""The ledger: one run that goes through the whole book, and what it costs so far.

The run trains Llama-3 8B on 64 H100s, four million tokens a step. Each chapter makes
one line of it, from closed forms: the memory of a GPU and the time of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        batch_tokens: Tokens of one optimizer step over all GPUs: our choice, eight
            sequences for each GPU.
        sequence: Tokens of one sequence.
        utilization: Share of the peak at which a GPU is assumed to compute; training
            the 405B model of the same report reached 0.38 to 0.43.
    """

    parameters: int = 8_030_261_248
    training_tokens: float = 15e12
    gpus: int = 64
    gpus_per_host: int = 8
    peak_flops: float = 989e12
    memory_bytes: int = 80 * 2**30
    network_bytes_per_second: float = 50e9
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


def entries(chapter: int) -> list[Entry]:
    """The lines of the ledger up to a chapter, in order."""
    lines = {1: _messages, 2: _counted}
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
    from minitrain.viz import Entry
    from minitrain.workload import costs, formulas
    from minitrain.workload.memory import step_memory
    from minitrain.workload.presets import preset

    model, seq = preset("llama3-8b"), RUN.sequence
    payload = 2 * RUN.parameters
    gather = through_rank_0_seconds(payload, RUN.gpus, RUN.network_bytes_per_second)
    head = formulas.matmul_flops(seq, model.hidden * model.vocab_size)
    lines = []
    for name, again in (("ch. 2: all counted", False), ("ch. 2: recomputed", True)):
        memory = step_memory(
            model, 1, seq, "bfloat16", again, fused=True, accumulating=True
        )
        blocks = costs.forward_flops(model, 1, seq) - head
        flops = costs.model_flops(model, 1, seq) + again * blocks
        seconds = RUN.arithmetic_seconds(RUN.gpus, flops / seq) + gather
        lines.append(Entry(name, memory.peak_bytes, seconds))
    return lines
