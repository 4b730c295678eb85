"""What a model costs: parameters, operations, utilization.

The closed forms of `minitrain.workload.formulas`, for a `ModelConfig`, and a counter to
hold them against. What it costs in bytes is in `minitrain.workload.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from minitrain.workload import formulas
from minitrain.workload.config import ModelConfig

# Parameters


def parameters(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    return formulas.parameter_count(
        config.layers,
        config.hidden,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
        config.vocab_size,
        config.max_seq if config.positions == "learned" else 0,
        int(config.activation == "swiglu"),
        int(config.norm == "layer"),
        int(config.bias),
        int(config.tie_embeddings),
        int(config.parallel_block),
        int(config.embed_norm),
    )


def parameter_sizes(config: ModelConfig) -> list[int]:
    """Elements of each parameter, in the order of `Transformer(config).parameters()`.

    The embedding, positions, their norm; the blocks; the last norm and the head.
    """
    table = config.vocab_size * config.hidden
    norm = _norm_sizes(config)
    positions = [config.max_seq * config.hidden]
    return [
        table,
        *(positions if config.positions == "learned" else []),
        *(norm if config.embed_norm else []),
        *block_sizes(config) * config.layers,
        *norm,
        *([] if config.tie_embeddings else [table]),
    ]


def block_sizes(config: ModelConfig) -> list[int]:
    """Elements of each parameter of one block, in order.

    A norm, q, k, v, o, another norm, gate, up, down; each weight before its bias.
    """
    hidden, ffn = config.hidden, config.ffn
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    up = [(ffn, hidden)] * (2 if config.activation == "swiglu" else 1)

    def linears(shapes: Sequence[tuple[int, int]]) -> Iterator[int]:
        for outputs, inputs in shapes:
            yield outputs * inputs
            if config.bias:
                yield outputs

    norm = _norm_sizes(config)
    second = [] if config.parallel_block else norm
    mlp = [*up, (hidden, ffn)]
    return [*norm, *linears(attention), *second, *linears(mlp)]


def _norm_sizes(config: ModelConfig) -> list[int]:
    biased = config.norm == "layer" and config.bias
    return [config.hidden] * (2 if biased else 1)


def block_matrices(config: ModelConfig) -> int:
    """Elements of the matrices of one block."""
    return formulas.block_matrices(
        config.hidden,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
        int(config.activation == "swiglu"),
    )


# Operations


def _flops(config: ModelConfig, batch: int, seq: int) -> tuple[int, int, int]:
    """Forward operations of a block's matrices, of its attention, and of the head."""
    tokens = batch * seq
    return (
        formulas.matmul_flops(tokens, block_matrices(config)),
        formulas.attention_flops(batch, seq, config.heads, config.head_dim),
        formulas.matmul_flops(tokens, config.hidden * config.vocab_size),
    )


def forward_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """Operations of a forward pass over `batch` sequences of `seq` tokens."""
    block, attention, head = _flops(config, batch, seq)
    return config.layers * (block + attention) + head


def step_flops(
    config: ModelConfig, batch: int, seq: int, recompute: bool = False
) -> int:
    """Operations of forward and backward, as counted: what the hardware does."""
    block, attention, head = _flops(config, batch, seq)
    return formulas.step_flops(config.layers, block, attention, head, int(recompute))


def model_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """Operations that the step needs: three forwards, nothing computed twice."""
    return formulas.model_flops(config.layers, *_flops(config, batch, seq))


def count_flops(work: Callable[[], Any]) -> int:
    """Operations of the products in `work`, counted by torch's FlopCounterMode.

    The counter does not know PyTorch's attention kernel for CPUs, and is told.
    """
    ops = torch.ops.aten

    def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, q, k, v)

    kernels = {
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        work()
    return int(counter.get_total_flops())


def mfu(
    config: ModelConfig,
    batch: int,
    seq: int,
    seconds: float,
    peak_flops: float,
    devices: int = 1,
) -> float:
    """Model FLOPs utilization (Chowdhery et al., arXiv:2204.02311, appendix B).

    Args:
        config: The model.
        batch: Sequences of the global batch.
        seq: Tokens of a sequence.
        seconds: Time of a step.
        peak_flops: Operations that one device can do in a second.
        devices: How many work on the step.

    Returns:
        The share of the devices' peak that went into operations the step needs.
    """
    return model_flops(config, batch, seq) / (seconds * peak_flops * devices)


def hfu(
    config: ModelConfig,
    batch: int,
    seq: int,
    seconds: float,
    peak_flops: float,
    devices: int = 1,
    recompute: bool = False,
) -> float:
    """Hardware FLOPs utilization: `mfu`, with what is computed again counted too."""
    done = step_flops(config, batch, seq, recompute)
    return done / (seconds * peak_flops * devices)
