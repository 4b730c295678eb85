"""Will it fit? The memory of one step on one GPU, from the library's closed forms.

The page runs `minitrain.workload.moments`, which `step_memory` runs too, as JavaScript
printed by `tojs`.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

from tojs import to_js

from minitrain.workload import formulas, memory, moments
from minitrain.workload.presets import PRESETS

OPTIMIZERS = {"AdamW": memory.ADAM, "SGD with momentum": 4, "SGD": 0}
"""Bytes a parameter of float32 moments."""

NAMES: dict[memory.Precision, str] = {
    "float32": "float32",
    "autocast": "bfloat16 autocast",
    "bfloat16": "bfloat16, float32 master",
}


def functions() -> list[Callable[..., Any]]:
    """Every closed form."""
    return [
        function
        for module in (formulas, moments)
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    ]


def javascript() -> str:
    """The page's functions and tables."""
    tables = {
        "MODELS": {n: memory.model_numbers(c) for n, c in PRESETS.items()},
        "PRECISIONS": {name: memory.precision_numbers(p) for p, name in NAMES.items()},
        "OPTIMIZERS": OPTIMIZERS,
        "MOMENTS": moments.MOMENTS,
    }
    lines = [f"const {name} = {json.dumps(t)};" for name, t in tables.items()]
    return "\n".join([*lines, to_js(*functions())])


def numbers(name: str) -> dict[str, Any]:
    """The figures of one model that the cheat-sheet shows, as numbers."""
    config = PRESETS[name]
    seq = config.max_seq
    saved = []
    for recompute in (0, 1):
        step = memory.step_sizes(
            config, 1, seq, "bfloat16", recompute=recompute, fused=1
        )
        saved.append(moments.at_loss(step)[1])
    matrices = formulas.block_matrices(
        step.hidden, step.heads, step.kv_heads, step.head_dim, step.ffn, step.gated
    )
    products = formulas.matmul_flops(
        seq, step.layers * matrices + step.hidden * step.vocab
    )
    attention = step.layers * formulas.attention_flops(
        1, seq, step.heads, step.head_dim
    )
    parameters = moments.parameters(step)
    return {
        "parameters": parameters,
        "seq": seq,
        "token_flops": 3 * (products + attention) / seq,
        "attention_share": attention / (products + attention),
        "state_bytes": formulas.state_bytes(parameters, 2, 2, 12),
        "saved_bytes": saved[0],
        "recompute_bytes": saved[1],
    }
