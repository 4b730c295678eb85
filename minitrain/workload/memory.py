"""What a training step holds in memory, by kind, in closed form.

The moments at which a step may stand highest are written down in
`minitrain.workload.moments`, in numbers; here they are those of a configuration, and
the peak is the highest. `minitrain.trace` measures the same step, and the tests hold
the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minitrain.workload import moments
from minitrain.workload.config import ModelConfig
from minitrain.workload.costs import parameter_sizes
from minitrain.workload.moments import StepSizes

Precision = Literal["float32", "autocast", "bfloat16"]
"""Float32; bfloat16 matrix products on float32 weights (autocast); bfloat16 weights
with float32 master weights in the optimizer."""

WIDTHS = {"float32": (4, 4), "autocast": (2, 4), "bfloat16": (2, 2)}
"""Bytes of what matrix products, and of what norms and residuals, read and write."""

STATE = {"float32": (4, 4, 8), "autocast": (4, 4, 8), "bfloat16": (2, 2, 12)}
"""Bytes a parameter: weight, gradient, state of AdamW with its master weight."""

ADAM = 4 + 4
"""Bytes a parameter: Adam's two moments."""

Moment = dict[str, int]
"""Live bytes by kind, in the names of `minitrain.trace`."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step after the first.

    Attributes:
        parameters, gradients, optimizer_state, activations: The peak of each kind.
        moments: Live bytes by kind at each moment that may be the highest.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    moments: dict[str, Moment]

    @property
    def highest(self) -> str:
        """Name of the moment at which the sum of all kinds is highest."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def at_peak(self) -> Moment:
        """Live bytes by kind at that moment."""
        return self.moments[self.highest]

    @property
    def peak_bytes(self) -> int:
        """Live bytes of all kinds at that moment."""
        return sum(self.at_peak.values())


def step_memory(
    config: ModelConfig,
    batch: int,
    seq: int,
    precision: Precision = "float32",
    recompute: bool = False,
    fused: bool = False,
    groups: Sequence[Sequence[int]] | None = None,
    foreach: bool = False,
    accumulating: bool = False,
) -> StepMemory:
    """Memory of one AdamW step by kind, after the first step.

    On the CPU, exact to the byte for what operators return, of a step that runs a
    `Batch.from_sequences` through `accumulate`, with autocast around the forward alone
    and recomputation of whole blocks, and heads wider than two. Each kind is exact; so
    is the sum where loss or update are the highest moment, and else to a few per cent.
    What kernels allocate for themselves is not counted.

    Args:
        config: The model.
        batch: Sequences of the micro-batch.
        seq: Tokens of a sequence.
        precision: See `Precision`.
        recompute: Whether each block keeps only its input.
        fused: Whether norms, attention and optimizer are GPU kernels.
        groups: Elements of the optimizer's parameters, in its groups and order; one
            group in the model's order if not given.
        foreach: Whether the optimizer takes all parameters of a group at once.
        accumulating: Whether the step has several micro-batches of this size: from the
            second on, all gradients are there from the start.
    """
    groups = groups or [parameter_sizes(config)]
    scratch = 0 if fused else adamw_scratch_bytes(groups, foreach)
    sizes = step_sizes(
        config,
        batch,
        seq,
        precision,
        recompute=int(recompute),
        fused=int(fused),
        accumulating=int(accumulating),
        scratch_bytes=scratch,
    )
    lasting = {
        "parameters": moments.weights_bytes(sizes),
        "optimizer state": moments.optimizer_bytes(sizes),
    }
    live = {
        name: dict(zip(("gradients", "activations", "other"), kinds, strict=True))
        for name, kinds in zip(moments.MOMENTS, moments.moments(sizes), strict=True)
    }
    at_loss = live["loss"]["activations"] + moments.targets_bytes(sizes) + 4  # weights
    return StepMemory(
        parameters=lasting["parameters"],
        gradients=moments.gradients_bytes(sizes),
        optimizer_state=lasting["optimizer state"],
        activations=max(at_loss, moments.saved_at_block(sizes, config.layers - 1)),
        moments={name: lasting | kinds for name, kinds in live.items()},
    )


def step_sizes(
    config: ModelConfig, batch: int, seq: int, precision: Precision, **options: int
) -> StepSizes:
    """The step in numbers.

    Args:
        config: The model.
        batch: Sequences of the micro-batch.
        seq: Tokens of a sequence.
        precision: See `Precision`.
        options: The last four fields of `StepSizes`, 0 if not given.
    """
    model, widths = model_numbers(config), precision_numbers(precision)
    sizes = model | widths | {"batch": batch, "seq": seq}
    return StepSizes(**sizes, **options)


def model_numbers(config: ModelConfig) -> dict[str, int]:
    """What `StepSizes` says of the model."""
    return {
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn,
        "vocab": config.vocab_size,
        "position_rows": config.max_seq if config.positions == "learned" else 0,
        "positions": int(config.positions != "none"),
        "rope": int(config.positions == "rope"),
        "gated": int(config.activation == "swiglu"),
        "kept": {"swiglu": 4, "gelu": 2, "relu": 1}[config.activation],
        "centred": int(config.norm == "layer"),
        "bias": int(config.bias),
        "tied": int(config.tie_embeddings),
        "parallel": int(config.parallel_block),
        "embed_norm": int(config.embed_norm),
        "tensors": len(parameter_sizes(config)),
    }


def precision_numbers(precision: Precision) -> dict[str, int]:
    """What `StepSizes` says of the precision, with AdamW's two moments."""
    matmul, residual = WIDTHS[precision]
    weight, gradient, state = STATE[precision]
    return {
        "matmul_bytes": matmul,
        "residual_bytes": residual,
        "weight_bytes": weight,
        "gradient_bytes": gradient,
        "master_bytes": state - ADAM,
        "moment_bytes": ADAM,
    }


def adamw_scratch_bytes(groups: Sequence[Sequence[int]], foreach: bool = False) -> int:
    """Float32 temporaries of torch's AdamW at their highest.

    One by one, it holds two tensors of the parameter it is at, and still one of the
    parameter before. With `foreach` it holds one of every parameter of a group.

    Args:
        groups: Elements of the parameters, in the optimizer's groups and order.
        foreach: Whether it takes all parameters of a group at once.
    """
    if foreach:
        return 4 * max(sum(sizes) for sizes in groups)
    return 4 * max(
        before + 2 * size
        for sizes in groups
        for before, size in zip([0, *sizes], sizes, strict=False)
    )
