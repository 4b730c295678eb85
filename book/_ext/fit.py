"""Will it fit? The memory of one step on one GPU, from the library's closed forms.

`fit` puts the scalar functions of `minitrain.workload.formulas` together as
`minitrain.workload.memory.step_memory` does, for the two moments at which a step is
usually highest. The page runs it as JavaScript, printed by `tojs`.
"""

import json
from typing import Any

from tojs import to_js

from minitrain.workload import formulas, memory
from minitrain.workload.config import ModelConfig
from minitrain.workload.costs import parameter_sizes
from minitrain.workload.formulas import (
    block_biases,
    block_matrices,
    block_saved_bytes,
    logits_bytes,
    norm_parameters,
    norm_saved_bytes,
    outside_saved_bytes,
    parameter_count,
    readers_of_norms,
    saved_bytes,
)
from minitrain.workload.presets import PRESETS

OPTIMIZERS = {"AdamW": 8, "SGD with momentum": 4, "SGD": 0}
"""Bytes a parameter of float32 moments."""

NAMES = {
    "float32": "float32",
    "autocast": "bfloat16 autocast",
    "bfloat16": "bfloat16, float32 master",
}


def fit(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    position_rows: int,
    positions: int,
    rope: int,
    gated: int,
    centred: int,
    bias: int,
    tied: int,
    parallel: int,
    embed_norm: int,
    kept: int,
    tensors: int,
    seq: int,
    batch: int,
    matmul_bytes: int,
    residual_bytes: int,
    weight_bytes: int,
    gradient_bytes: int,
    master_bytes: int,
    moment_bytes: int,
    recompute: int,
) -> tuple[int, int, int, int, int, int]:
    """Bytes of a step with fused kernels, by kind.

    Returns:
        Parameters, gradients (when the optimizer steps), optimizer state, activations
        (when the loss is differentiated), and what else is live at those two moments:
        at the loss, at the update.
    """
    count = parameter_count(
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        position_rows,
        gated,
        centred,
        bias,
        tied,
        parallel,
        embed_norm,
    )
    tokens = batch * seq
    casts = matmul_bytes < residual_bytes
    norm = norm_saved_bytes(hidden, centred, residual_bytes, 1)
    block = block_saved_bytes(
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        kept,
        readers_of_norms(gated, parallel, casts),
        2 - parallel,
        norm,
        0,
        matmul_bytes,
        residual_bytes,
    )
    outside = outside_saved_bytes(
        hidden, head_dim, norm, rope, embed_norm, matmul_bytes, residual_bytes
    )
    stream = residual_bytes * hidden
    saved = saved_bytes(layers, tokens, block, outside, stream, recompute)
    if casts:
        matrices = block_matrices(hidden, heads, kv_heads, head_dim, ffn, gated)
        saved = saved + 2 * vocab * hidden
        saved = saved + (0 if recompute else 2 * layers * matrices)
    logits = logits_bytes(tokens, vocab)
    data = 8 * batch * (seq + 1) + (8 * seq if positions else 0)
    steps = 4 * tensors if moment_bytes > 4 else 0
    return (
        weight_bytes * count,
        gradient_bytes * count,
        (master_bytes + moment_bytes) * count + steps,
        saved + logits + 4,
        data + 16 + 2 * logits,
        data,
    )


def model_arguments(config: ModelConfig) -> dict[str, int]:
    """What `fit` has to know of a model: its first eighteen arguments."""
    learned = config.positions == "learned"
    return {
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn,
        "vocab": config.vocab_size,
        "position_rows": config.max_seq if learned else 0,
        "positions": int(config.positions != "none"),
        "rope": int(config.positions == "rope"),
        "gated": int(config.activation == "swiglu"),
        "centred": int(config.norm == "layer"),
        "bias": int(config.bias),
        "tied": int(config.tie_embeddings),
        "parallel": int(config.parallel_block),
        "embed_norm": int(config.embed_norm),
        "kept": {"swiglu": 4, "gelu": 2, "relu": 1}[config.activation],
        "tensors": len(parameter_sizes(config)),
    }


def precision_arguments(precision: memory.Precision) -> dict[str, int]:
    """Widths in bytes under a precision: the five arguments of `fit` after batch."""
    matmul, residual = memory.WIDTHS[precision]
    weight, gradient, state = memory.STATE[precision]
    return {
        "matmul_bytes": matmul,
        "residual_bytes": residual,
        "weight_bytes": weight,
        "gradient_bytes": gradient,
        "master_bytes": state - OPTIMIZERS["AdamW"],
    }


def javascript() -> str:
    """The page's functions and tables."""
    precisions: tuple[memory.Precision, ...] = ("float32", "autocast", "bfloat16")
    tables = {
        "MODELS": {n: model_arguments(c) for n, c in PRESETS.items()},
        "PRECISIONS": {NAMES[p]: precision_arguments(p) for p in precisions},
        "OPTIMIZERS": OPTIMIZERS,
    }
    functions = to_js(
        norm_parameters,
        block_matrices,
        block_biases,
        parameter_count,
        norm_saved_bytes,
        block_saved_bytes,
        readers_of_norms,
        outside_saved_bytes,
        saved_bytes,
        logits_bytes,
        fit,
    )
    lines = [f"const {name} = {json.dumps(t)};" for name, t in tables.items()]
    return "\n".join([*lines, functions])


def numbers(name: str) -> dict[str, Any]:
    """The figures of one model that the cheat-sheet shows, as numbers."""
    config = PRESETS[name]
    model = model_arguments(config)
    seq = config.max_seq
    common = [*model.values(), seq, 1, *precision_arguments("bfloat16").values(), 8]
    kinds = {recompute: fit(*[*common, recompute]) for recompute in (0, 1)}
    parameters = kinds[0][0] // 2
    matrices = formulas.block_matrices(
        *(model[k] for k in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "gated"))
    )
    products = formulas.matmul_flops(
        seq, config.layers * matrices + config.hidden * config.vocab_size
    )
    attention = config.layers * formulas.attention_flops(
        1, seq, config.heads, config.head_dim
    )
    return {
        "parameters": parameters,
        "seq": seq,
        "token_flops": 3 * (products + attention) / seq,
        "attention_share": attention / (products + attention),
        "state_bytes": formulas.state_bytes(parameters, 2, 2, 12),
        "saved_bytes": kinds[0][3],
        "recompute_bytes": kinds[1][3],
    }
