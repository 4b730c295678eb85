"""What a data-parallel rank of this library holds at the peak of a step, to the byte.

The closed forms of `footprint` serve every framework and plan, and are right to a few
per cent. Where the whole program is ours, `workload.moments` says each byte of one
device, and what data parallelism adds is three numbers.
"""

from __future__ import annotations

from typing import Literal

from minitrain.workload.config import ModelConfig
from minitrain.workload.memory import Precision, step_memory

Technique = Literal["replicate", "ddp"]

LOSS = 4 + 8
"""Bytes of a micro-batch's loss that wait for the next one's: a sum and a count."""


def replica_bytes(
    config: ModelConfig,
    batch: int,
    seq: int,
    precision: Precision = "float32",
    micro_batches: int = 1,
    technique: Technique = "replicate",
    recompute: bool = False,
    fused: bool = False,
) -> dict[str, int]:
    """Live bytes by kind when their sum is highest, after the first step.

    With `replicate`, gradients are summed where they are. With `ddp` they live in
    buckets that stay from step to step; with several micro-batches they are added up
    outside, and copied into the buckets at the end. As exact as `step_memory`.

    Args:
        config: The model.
        batch: Sequences of a micro-batch.
        seq: Tokens of a sequence.
        precision: See `Precision`.
        micro_batches: Of a step; all of their tokens are there from the start.
        technique: Of data parallelism.
        recompute: Whether each block keeps only its input.
        fused: Whether norms, attention and optimizer are GPU kernels.
    """
    several = micro_batches > 1
    stays = several or technique == "ddp"
    one = step_memory(
        config, batch, seq, precision, recompute, fused, accumulating=stays
    )
    live = dict(one.at_peak)
    if several:
        tokens = 8 * batch * (seq + 1) * (micro_batches - 1)
        live["other"] += tokens + LOSS
        if technique == "ddp":
            live["gradients"] += one.gradients
    return live
