"""What an operator takes on one accelerator: closed forms of its sizes.

Every function here takes a `Chip` and sizes, each a number or an array of numbers, and
returns seconds of device time. They are pure arithmetic in numpy, so that the same
source serves one configuration, a million of them, and a page without Python.

A matrix product is cut into tiles; the SMs work them off in waves, each tile runs
through k at a share of the SM's peak and loses a start and an end; nothing is faster
than memory. An attention kernel gives each SM a tile of queries; the longest of them
bounds the whole. What only moves bytes takes a share of the memory's bandwidth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitrain.simulate.accelerators import Accelerator
from minitrain.simulate.constants import KERNELS

Number = Any
"""A number, or an array of numbers: an array of sizes gives an array of seconds."""


class Chip(NamedTuple):
    """One accelerator at one precision: numbers only.

    Attributes:
        flops: FLOP/s of the precision's matrix products, after the power derate.
        vector_flops: FLOP/s of bf16 products: what attention runs in under fp8.
        memory_bytes_per_second: The data sheet's.
        sms: Units that work on tiles of their own.
        input_bytes: Of one element of a product's inputs.
        output_bytes: Of one element of its output.
        gemm_share: Of `flops`, by a large product.
        gemm_ramp: Elements of k whose time a tile loses to its start and end.
        gemm_quantum: Share of the last, unfilled wave that is lost.
        tile_m: Rows of a tile.
        tile_n: Columns of a tile.
        launch_seconds: Of the device, of a product.
        cast_seconds_per_element: To bring an input to fp8; 0 in other precisions.
        dgrad_share: Speed of the product for an input's gradient, of the forward's.
        wgrad_share: Speed of the product for a weight's gradient, of the forward's.
        memory_share: Of memory's bandwidth, by an operator that only moves bytes.
        memory_launch_seconds: Of the device, of such an operator.
        flash_share: Of `vector_flops`, by a large attention forward of head_dim 128.
        flash_backward_share: The same, backward.
        flash_softmax: Share of that time that the softmax takes, at head_dim 128.
        flash_tail: Share of the longest tile's time that is not hidden.
        flash_launch_seconds: Of the device, of attention.
        measured: 1 where the constants were fitted on this accelerator, else 0.
    """

    flops: float
    vector_flops: float
    memory_bytes_per_second: float
    sms: float
    input_bytes: float
    output_bytes: float
    gemm_share: float
    gemm_ramp: float
    gemm_quantum: float
    tile_m: float
    tile_n: float
    launch_seconds: float
    cast_seconds_per_element: float
    dgrad_share: float
    wgrad_share: float
    memory_share: float
    memory_launch_seconds: float
    flash_share: float
    flash_backward_share: float
    flash_softmax: float
    flash_tail: float
    flash_launch_seconds: float
    measured: float


BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
FLASH_TILE = 128
"""Queries of one tile of the attention kernel."""


def chip(accelerator: Accelerator, precision: str, power_derate: float = 1.0) -> Chip:
    """The record of an accelerator at a precision.

    Args:
        accelerator: From `hardware`.
        precision: Of the matrix products' inputs, as in `accelerator.peak_flops`.
        power_derate: Share of its speed that power and cooling allow.

    Raises:
        ValueError: The accelerator has no such precision.
    """
    if precision not in accelerator.peak_flops:
        known = ", ".join(accelerator.peak_flops)
        raise ValueError(f"{accelerator.name} has no {precision}; it has {known}")
    family = accelerator.family
    like = "fp8" if precision in ("fp8", "fp4") else "bf16"
    measured = (family, like) in KERNELS
    near = {"H200": "H100", "B300": "B200", "GB200": "B200"}.get(family, "A100")
    near = "H100" if like == "fp8" and near == "A100" else near
    c = KERNELS[(family if measured else near, like)]
    half = accelerator.peak_flops.get("bf16", accelerator.peak_flops.get("fp16", 0.0))
    return Chip(
        flops=accelerator.peak_flops[precision] * power_derate,
        vector_flops=min(half, accelerator.peak_flops[precision]) * power_derate
        if precision in ("fp32", "tf32")
        else half * power_derate,
        memory_bytes_per_second=accelerator.memory_bytes_per_second,
        sms=accelerator.sms,
        input_bytes=BYTES[precision],
        output_bytes=max(2.0, BYTES[precision]),
        gemm_share=c.gemm_share,
        gemm_ramp=c.gemm_ramp,
        gemm_quantum=c.gemm_quantum,
        tile_m=c.tile_m,
        tile_n=c.tile_n,
        launch_seconds=c.launch_seconds,
        cast_seconds_per_element=c.cast_seconds_per_element,
        dgrad_share=c.dgrad_share,
        wgrad_share=c.wgrad_share,
        memory_share=c.memory_share,
        memory_launch_seconds=3e-6,
        flash_share=c.flash_share,
        flash_backward_share=c.flash_backward_share,
        flash_softmax=c.flash_softmax,
        flash_tail=c.flash_tail,
        flash_launch_seconds=c.flash_launch_seconds,
        measured=float(measured),
    )


def grouped_gemm_seconds(
    c: Chip, groups: Number, m: Number, n: Number, k: Number
) -> Number:
    """Seconds of `groups` products [m, k] x [k, n] in one kernel.

    Batched products of attention, and the experts of a mixture. Under fp8 the left
    input is brought to fp8 first.
    """
    waves = groups * np.ceil(m / c.tile_m) * np.ceil(n / c.tile_n) / c.sms
    rounds = waves + c.gemm_quantum * (np.ceil(waves) - waves)
    wave_flops = 2 * c.tile_m * c.tile_n * c.sms * (k + c.gemm_ramp)
    computing = rounds * wave_flops / (c.gemm_share * c.flops)
    moved = groups * (c.input_bytes * (m * k + n * k) + c.output_bytes * m * n)
    moving = moved / (c.memory_share * c.memory_bytes_per_second)
    casting = groups * m * k * c.cast_seconds_per_element
    return c.launch_seconds + np.maximum(computing, moving) + casting


def gemm_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Seconds of the product [m, k] x [k, n]; under fp8 with the left input's cast."""
    return grouped_gemm_seconds(c, 1, m, n, k)


def dgrad_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Seconds of the input's gradient of a forward product [m, k] x [k, n]."""
    return gemm_seconds(c, m, k, n) / c.dgrad_share


def wgrad_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Seconds of the weight's gradient of a forward product [m, k] x [k, n]."""
    return gemm_seconds(c, k, n, m) / c.wgrad_share


def attention_seconds(
    c: Chip,
    batch: Number,
    heads: Number,
    kv_heads: Number,
    seq_q: Number,
    seq_k: Number,
    head_dim: Number,
    causal: Number,
    backward: Number,
) -> Number:
    """Seconds of a flash attention kernel.

    Args:
        c: The accelerator.
        batch: Sequences.
        heads: Query heads on this device.
        kv_heads: Key and value heads on this device.
        seq_q: Queries of a sequence.
        seq_k: Keys of a sequence.
        head_dim: Width of a head.
        causal: 1 if a query sees the keys up to its own place only, else 0.
        backward: 1 for the backward pass, which recomputes the scores, else 0.
    """
    share = np.where(backward, c.flash_backward_share, c.flash_share)
    passes = np.where(backward, 2.5, 1.0)
    width = (1 - c.flash_softmax) * head_dim + c.flash_softmax * 128
    row_flops = passes * 4 * width * seq_k
    seen = 1 - 0.5 * causal
    total = batch * heads * seq_q * row_flops * seen / (share * c.vector_flops)
    longest = FLASH_TILE * row_flops * c.sms / (share * c.vector_flops)
    moved = 2 * batch * head_dim * (2 * heads * seq_q + 2 * kv_heads * seq_k) * passes
    moving = moved / (c.memory_share * c.memory_bytes_per_second)
    return c.flash_launch_seconds + np.maximum(total + c.flash_tail * longest, moving)


def score_bytes(
    batch: Number,
    heads: Number,
    seq_q: Number,
    seq_k: Number,
    fused: Number,
    dropout: Number,
    backward: Number,
) -> Number:
    """Bytes that scale, mask, softmax and dropout of unfused attention move.

    In half precision, a read and a write of the scores is 4 bytes a score. One kernel
    does scale, mask and softmax where `fused` is 1; else scale and mask are passes of
    their own, and softmax runs in fp32 between two casts (16 bytes more). Dropout reads
    and writes the scores and its mask of one byte.

    Args:
        batch: Sequences.
        heads: Query heads on this device.
        seq_q: Queries of a sequence.
        seq_k: Keys of a sequence.
        fused: 1 if scale, mask and softmax are one kernel, else 0.
        dropout: 1 if probabilities are dropped, else 0.
        backward: 1 for the backward pass, else 0.
    """
    forward = 4 + (1 - fused) * 20 + dropout * 5
    back = 6 + (1 - fused) * 20 + dropout * 5
    return batch * heads * seq_q * seq_k * np.where(backward, back, forward)


def unfused_attention_seconds(
    c: Chip,
    batch: Number,
    heads: Number,
    seq_q: Number,
    seq_k: Number,
    head_dim: Number,
    fused: Number,
    dropout: Number,
    backward: Number,
) -> Number:
    """Seconds of attention by two batched products and the passes between them.

    As in software before FlashAttention (2022); all scores are computed, masked or not.
    Arguments as of `score_bytes` and `attention_seconds`.
    """
    groups = batch * heads
    scores = grouped_gemm_seconds(c, groups, seq_q, seq_k, head_dim)
    values = grouped_gemm_seconds(c, groups, seq_q, head_dim, seq_k)
    products = np.where(backward, 2, 1) * (scores + values)
    moved = score_bytes(batch, heads, seq_q, seq_k, fused, dropout, backward)
    kernels = 1 + 4 * (1 - fused) + dropout
    passes = memory_seconds(c, moved) + (kernels - 1) * c.memory_launch_seconds
    return products + passes


def memory_seconds(c: Chip, moved_bytes: Number) -> Number:
    """Seconds of an operator that reads and writes `moved_bytes` in all."""
    rate = c.memory_share * c.memory_bytes_per_second
    return c.memory_launch_seconds + moved_bytes / rate


def optimizer_seconds(
    c: Chip, parameters: Number, bytes_per_parameter: Number
) -> Number:
    """Seconds of a fused optimizer step that moves that many bytes a parameter."""
    return memory_seconds(c, parameters * bytes_per_parameter)
