"""What an operator takes on one accelerator: closed forms of its sizes.

Every function here takes a `Chip` and sizes, each a number or an array of numbers, and
returns seconds of device time. They are pure arithmetic in numpy, so that the same
source serves one configuration, a million of them, and a page without Python.

A matrix product is cut into large or small tiles, whichever is faster; the SMs work
them off in waves, each tile runs through k at a share of the SM's peak and loses a
start and an end; long products heat the device, which lowers its clock; nothing is
faster than memory. An attention kernel
gives each SM a tile of queries; the longest of them bounds the whole. What only moves
bytes takes a share of the memory's bandwidth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitrain.simulate.accelerators import Accelerator
from minitrain.simulate.families import kernels_of

Number = Any
"""A number, or an array of numbers: an array of sizes gives an array of seconds."""

TILE_M = 128
"""Rows of a product's large tile, and queries of an attention kernel's tile."""
TILE_N = 256
"""Columns of a product's large tile."""
SMALL = 64
"""Rows and columns of a small tile."""
SUM_BYTES = 8
"""To add to an element in fp32: it is read and written."""
HEAT_SECONDS = 0.01
"""Length of a product at which half of what heat costs is lost."""
WIDTH = 128
"""Width of the heads that attention was measured with."""


class Chip(NamedTuple):
    """One accelerator at one precision: numbers only.

    Attributes:
        flops: FLOP/s of the precision's matrix products, after the power derate.
        attention_flops: FLOP/s of attention's products: in half precision, unless the
            precision is a wider one.
        memory_bytes_per_second: The data sheet's.
        sms: Units that work on tiles of their own.
        input_bytes: Of one element of a product's inputs.
        output_bytes: Of one element of its output.
        gemm_share: Of `flops`, by a large product on a cool device.
        gemm_small_share: Of `gemm_share`, by small tiles, which fill waves better.
        gemm_ramp: Elements of k whose time a tile loses to its start and end.
        gemm_quantum: Share of the last, unfilled wave that is lost.
        gemm_padding: Share of the last, unfilled row and column of tiles that is lost.
        gemm_heat: Share by which a long product is slower than `gemm_share`.
        gemm_memory_share: Of memory's bandwidth, by a product that is bound by it.
        launch_seconds: Of the device, of a product.
        cast_seconds_per_element: To bring an input to fp8; 0 in other precisions.
        cast_launch_seconds: Of the device, of that; 0 in other precisions.
        dgrad_share: Speed of the product for an input's gradient, of the forward's.
        wgrad_share: Speed of the product for a weight's gradient, of the forward's.
        grouped_share: Speed of the products of many experts, of one of that size.
        grouped_wgrad_share: Speed of those for their weights' gradients.
        memory_share: Of memory's bandwidth, by an operator that only moves bytes.
        memory_launch_seconds: Of the device, of such an operator.
        flash_share: Of `attention_flops`, by a large forward pass.
        flash_ramp: Keys whose time a row of queries loses to its start and end.
        flash_tail: Share of the longest tile's time that is not hidden.
        flash_backward_share: As `flash_share`, of the backward pass.
        flash_backward_tail: As `flash_tail`, of the backward pass.
        flash_softmax: Share of the time that does not depend on the head's width, at
            the width of 128.
        flash_launch_seconds: Of the device, of attention.
        measured: 1 where products were measured on its family at this precision, 0
            where the constants are those of another family, or assumed.
    """

    flops: float
    attention_flops: float
    memory_bytes_per_second: float
    sms: float
    input_bytes: float
    output_bytes: float
    gemm_share: float
    gemm_small_share: float
    gemm_ramp: float
    gemm_quantum: float
    gemm_padding: float
    gemm_heat: float
    gemm_memory_share: float
    launch_seconds: float
    cast_seconds_per_element: float
    cast_launch_seconds: float
    dgrad_share: float
    wgrad_share: float
    grouped_share: float
    grouped_wgrad_share: float
    memory_share: float
    memory_launch_seconds: float
    flash_share: float
    flash_ramp: float
    flash_tail: float
    flash_backward_share: float
    flash_backward_tail: float
    flash_softmax: float
    flash_launch_seconds: float
    measured: float


BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Of one element, by precision."""


def chip(accelerator: Accelerator, precision: str, power_derate: float = 1.0) -> Chip:
    """The record of an accelerator at a precision.

    Args:
        accelerator: From `hardware`.
        precision: Of the matrix products' inputs, as in `accelerator.peak_flops`.
        power_derate: Share of its speed that power and cooling allow.

    Raises:
        ValueError: The accelerator has no such precision.
    """
    peak = accelerator.peak_flops
    if precision not in peak:
        raise ValueError(
            f"{accelerator.name} has no {precision}; it has {', '.join(peak)}"
        )
    narrow = precision in ("fp8", "fp4")
    half = "bf16" if "bf16" in peak else "fp16"
    fitted, measured = kernels_of(accelerator.family, precision)
    return Chip(
        flops=peak[precision] * power_derate,
        attention_flops=peak[half if narrow else precision] * power_derate,
        memory_bytes_per_second=accelerator.memory_bytes_per_second,
        sms=accelerator.sms,
        input_bytes=BYTES[precision],
        output_bytes=max(2.0, BYTES[precision]),
        measured=measured,
        **fitted._asdict(),
    )


def tile_rounds(
    c: Chip, groups: Number, m: Number, n: Number, tile_m: float, tile_n: float
) -> Number:
    """Waves of tiles of one size that `groups` outputs [m, n] take.

    An unfilled wave, and an unfilled last row or column of tiles, costs a share of what
    a filled one does.
    """
    rows, columns = m / tile_m, n / tile_n
    rows = rows + c.gemm_padding * (np.ceil(rows) - rows)
    columns = columns + c.gemm_padding * (np.ceil(columns) - columns)
    waves = groups * rows * columns / c.sms
    return waves + c.gemm_quantum * (np.ceil(waves) - waves)


def product_seconds(
    c: Chip, groups: Number, m: Number, n: Number, k: Number, output_bytes: Number
) -> Number:
    """Seconds of `groups` products [m, k] x [k, n] in one kernel.

    Args:
        c: The accelerator.
        groups: Products of one size.
        m: Rows of the output.
        n: Columns of the output.
        k: Elements that are summed up.
        output_bytes: Moved for an element of the output.
    """
    large = tile_rounds(c, groups, m, n, TILE_M, TILE_N) * (TILE_M * TILE_N)
    small = tile_rounds(c, groups, m, n, SMALL, SMALL) * (SMALL**2 / c.gemm_small_share)
    outputs = np.minimum(large, small) * c.sms
    computing = 2 * outputs * (k + c.gemm_ramp) / (c.gemm_share * c.flops)
    computing = computing * (1 + c.gemm_heat * computing / (computing + HEAT_SECONDS))
    moved = groups * (c.input_bytes * (m + n) * k + output_bytes * m * n)
    moving = moved / (c.gemm_memory_share * c.memory_bytes_per_second)
    return c.launch_seconds + np.maximum(computing, moving)


def gemm_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Seconds of the product [m, k] x [k, n], of inputs that have its precision."""
    return product_seconds(c, 1, m, n, k, c.output_bytes)


def batched_gemm_seconds(
    c: Chip, groups: Number, m: Number, n: Number, k: Number
) -> Number:
    """Seconds of `groups` products [m, k] x [k, n], such as those of attention."""
    return product_seconds(c, groups, m, n, k, c.output_bytes)


def grouped_gemm_seconds(
    c: Chip, groups: Number, m: Number, n: Number, k: Number
) -> Number:
    """Seconds of the products [m, k] x [k, n] of `groups` experts, m tokens each."""
    return batched_gemm_seconds(c, groups, m, n, k) / c.grouped_share


def dgrad_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Seconds of the input's gradient of a forward product [m, k] x [k, n]."""
    return gemm_seconds(c, m, k, n) / c.dgrad_share


def wgrad_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Seconds of the weight's gradient of a forward product [m, k] x [k, n].

    It is added to what is there, in fp32.
    """
    return product_seconds(c, 1, k, n, m, SUM_BYTES) / c.wgrad_share


def grouped_wgrad_seconds(
    c: Chip, groups: Number, m: Number, n: Number, k: Number
) -> Number:
    """Seconds of the weights' gradients of the forward products of `groups` experts."""
    return product_seconds(c, groups, k, n, m, SUM_BYTES) / c.grouped_wgrad_share


def cast_seconds(c: Chip, elements: Number) -> Number:
    """Seconds to bring a tensor to fp8: its largest value is found, then it is scaled.

    Once a tensor: forward of the product's input and of the weight, backward of the
    output's gradient. Nothing in other precisions.
    """
    return c.cast_launch_seconds + c.cast_seconds_per_element * elements


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
    """Seconds of a flash attention kernel (Dao, 2023).

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
    tail = np.where(backward, c.flash_backward_tail, c.flash_tail)
    passes = np.where(backward, 2.5, 1.0)
    narrow = (1 - c.flash_softmax) * head_dim + c.flash_softmax * WIDTH
    width = np.maximum(head_dim, narrow)
    row_flops = 4 * passes * width * (seq_k + c.flash_ramp)
    rate = share * c.attention_flops
    total = (1 - 0.5 * causal) * batch * heads * seq_q * row_flops / rate
    longest = TILE_M * row_flops * c.sms / rate
    moved = 4 * passes * batch * head_dim * (heads * seq_q + kv_heads * seq_k)
    moving = moved / (c.memory_share * c.memory_bytes_per_second)
    return c.flash_launch_seconds + np.maximum(total + tail * longest, moving)


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
    scores = batched_gemm_seconds(c, groups, seq_q, seq_k, head_dim)
    values = batched_gemm_seconds(c, groups, seq_q, head_dim, seq_k)
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
