"""Words of published tables, and what they mean here: frameworks, devices, networks."""

from __future__ import annotations

import re

from minitrain.simulate.plan import Precision

UNLIKE = {
    "lora": "adapters: only a few weights get gradients",
    "megascale": "its block is parallel and its attention slides: not this model",
    "nemotron_3": "layers that are not Transformers",
    "nemotron-h": "layers that are not Transformers",
    "mamba": "layers that are not Transformers",
    "hybrid": "layers that are not Transformers",
}
"""Words in a model's or framework's name that mean something we do not simulate."""

FRAMEWORKS = (
    ("metaseq", "fsdp-unfused"),
    ("bridge", "megatron-core"),
    ("nemo", "megatron-core"),
    ("mcore", "megatron-core"),
    ("megatron-core", "megatron-core"),
    ("te 2", "megatron-core"),
    ("hai-llm", "megatron-core"),
    ("fork", "megatron-flash"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("zb", "megatron-zb"),
    ("megatron-llama", "megatron-core"),
    ("megatron", "megatron-lm"),
    ("deepspeed", "deepspeed-zero3"),
    ("torchtitan", "fsdp"),
    ("composer", "composer"),
    ("foundry", "composer"),
    ("mosaic", "composer"),
    ("fsdp", "fsdp"),
    ("nanotron", "megatron-core"),
    ("internevo", "internevo"),
    ("maxtext", "maxtext"),
    ("paxml", "maxtext"),
    ("jax", "maxtext"),
    ("t5x", "maxtext"),
    ("pathways", "maxtext"),
    ("primus", "megatron-core"),
    ("meta internal", "megatron-core"),
)
"""Words of a framework's name, and the rules that it follows; the first one counts."""

ACTIVATIONS = (
    "llama",
    "qwen",
    "mistral",
    "mixtral",
    "internlm",
    "deepseek",
    "palm",
    "gpt-oss",
    "grok",
    "dbrx",
    "olmo",
    "yi-",
    "smollm",
    "kimi",
    "glm",
)
"""Families whose MLP is gated."""
ROTARY = (*ACTIVATIONS, "nemotron")

SHARED = {
    "deepseek-v3": (2048, 3, 0.40),
    "deepseek-v2": (3072, 1, 0.44),
    "deepseek": (2816, 1, 1.0),
    "kimi": (2048, 1, 0.40),
    "moonlight": (2816, 1, 0.60),
    "qwen2-57b": (20480, 0, 1.0),
    "glm": (1536, 1, 1.0),
}
"""Width of the shared experts, dense layers, and the share of latent attention's
matrices, by family (arXiv:2412.19437, arXiv:2405.04434 and the models' own files)."""


COLUMNS = (
    "source", "table_figure", "model", "layers", "hidden", "heads", "kv_heads",
    "ffn_hidden", "vocab", "seq_len", "precision", "gpu", "n_gpus", "gpus_per_node",
    "interconnect", "tp", "pp", "dp", "cp", "ep", "sequence_parallel", "interleave_v",
    "schedule", "zero_stage", "micro_batch", "global_batch", "recompute",
    "measured_quantity", "value", "note", "provenance", "framework", "source_id",
    "experts", "topk", "moe_ffn", "aux_quantity", "aux_value", "quality",
)  # fmt: skip
"""Columns of a table of published runs; an empty field was not said by the source."""

QUANTITIES = (
    ("layer_forward", "layer_forward_ms"),
    ("layer_backward", "layer_backward_ms"),
    ("activation memory", "activation_gib"),
    ("parameter+optimizer", "state_gib"),
    ("step_time", "step_seconds"),
    ("step_seconds", "step_seconds"),
    ("tokens/s/gpu", "tokens_per_second_per_device"),
    ("tokens_per_second_per_device", "tokens_per_second_per_device"),
    ("tokens/s", "tokens_per_second"),
    ("tokens_per_second", "tokens_per_second"),
    ("samples/s", "samples_per_second"),
    ("tflop/s", "tflops"),
    ("mfu", "mfu_percent"),
    ("hfu", "hfu_percent"),
    ("memory", "memory_gb"),
)
"""Words in `measured_quantity`, and the names used here; the first one counts."""

MEASURED = (
    "is not a step's time or memory; there is step_time_s, tokens/s, tokens/s/GPU, "
    "samples/s, TFLOP/s per GPU, MFU %, HFU %, peak_memory_gib"
)
"""How a table may say what was measured, for those who say it otherwise."""

PRECISION_WORDS: tuple[tuple[str, Precision], ...] = (
    ("fp4", "fp4"),
    ("fp8", "fp8"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
    ("tf32", "fp32"),
)
"""Words in a row's `precision`; the first one counts, whatever accumulates."""

DEVICES = (
    ("gb300", "gb300"), ("gb200", "gb200"), ("b300", "b300"), ("b200", "b200"),
    ("h200", "h200"), ("h800", "h800"), ("h100", "h100"), ("gh200", "h200"),
    ("a800", "a800"), ("a100", "a100"), ("v100", "v100"), ("mi355", "mi355x"),
    ("mi325", "mi325x"), ("mi300", "mi300x"), ("mi250", "mi250x"),
    ("tpu v5p", "tpu-v5p"), ("tpu v5e", "tpu-v5e"), ("tpu v6e", "tpu-v6e"),
    ("tpu v4", "tpu-v4"), ("tpu v3", "tpu-v3"), ("gaudi ?2", "gaudi2"),
)  # fmt: skip
"""Words in a row's `gpu`, and the accelerator."""

SCHEDULE_WORDS = (
    ("zb-2p", "zb-h2"),
    ("zb-1p", "zb-h1"),
    ("zb-v", "zb-v"),
    ("dualpipe", "zb-v"),
    ("passes (2 barriers", "vocab-1"),
    ("passes (1 barrier", "vocab-2"),
    ("vocabulary-parallel", "vocab-1"),
    ("interlaced", "interlaced"),
    ("gpipe", "gpipe"),
)
"""Words in a row's `schedule`, and the schedule; the first one counts."""


def device_name(text: str) -> str:
    """The accelerator that a source's words name: H100-SXM, but not H1000."""
    for word, name in DEVICES:
        if re.search(rf"(?<![a-z0-9]){word}(?![0-9])", text.lower()):
            return name
    return text


def network_bytes_per_second(text: str, per_host: int) -> float | None:
    """Network bandwidth of one device, one direction, from a source's own words."""
    if match := re.search(r"= *(\d+) ?Gb/s per node", text):
        return float(match[1]) / 8 * 1e9 / per_host
    for cards, speed, unit in re.findall(
        r"(\d+)x ?(?:[A-Za-z-]+ )*(\d+) ?(Gb|GB)/s", text
    ):
        bits = 8 if unit == "Gb" else 1
        return int(cards) * float(speed) / bits * 1e9 / per_host
    if match := re.search(r"(\d+) ?Gb/s (?:[A-Za-z0-9-]+ )*per GPU", text):
        return float(match[1]) / 8 * 1e9
    return None
