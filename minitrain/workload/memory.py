"""What a training step holds in memory, by kind, in closed form.

Live bytes rise and fall through a step, and their sum is highest at one of a few
moments: when the loss, the head, a block or the embedding is differentiated, or when
the optimizer updates. Each is written down here, by kind; the peak is the highest.
`minitrain.trace` measures the same step, and the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minitrain.workload import formulas
from minitrain.workload.config import ModelConfig
from minitrain.workload.costs import (
    block_matrices,
    block_sizes,
    parameter_sizes,
    parameters,
)

Precision = Literal["float32", "autocast", "bfloat16"]
"""Float32; bfloat16 matrix products on float32 weights (autocast); bfloat16 weights
with float32 master weights in the optimizer."""

WIDTHS = {"float32": (4, 4), "autocast": (2, 4), "bfloat16": (2, 2)}
"""Bytes of what matrix products, and of what norms and residuals, read and write."""

STATE = {"float32": (4, 4, 8), "autocast": (4, 4, 8), "bfloat16": (2, 2, 12)}
"""Bytes a parameter: weight, gradient, state of AdamW with its master weight."""

SCALARS = 4 + 4 + 8  # the loss, the objective, the count of tokens
SEED = 4  # the gradient of the objective, where backward begins

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


@dataclass(frozen=True)
class _Sizes:
    """The sizes, in bytes, from which the moments are made."""

    config: ModelConfig
    batch: int
    seq: int
    precision: Precision
    fused: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def matmul(self) -> int:
        return WIDTHS[self.precision][0]

    @property
    def residual(self) -> int:
        return WIDTHS[self.precision][1]

    @property
    def casts(self) -> bool:
        return self.matmul < self.residual

    @property
    def stream(self) -> int:
        """The residual stream."""
        return self.tokens * self.residual * self.config.hidden

    @property
    def wide(self) -> int:
        """One tensor of the MLP's width."""
        return self.tokens * self.matmul * self.config.ffn

    @property
    def logits(self) -> int:
        return formulas.logits_bytes(self.tokens, self.config.vocab_size)

    @property
    def norm(self) -> int:
        """What a norm saves, for each token."""
        centred = int(self.config.norm == "layer")
        return formulas.norm_saved_bytes(
            self.config.hidden, centred, self.residual, int(self.fused)
        )

    @property
    def block(self) -> int:
        """What a block saves, its output included, without copies of weights."""
        config, parallel = self.config, int(self.config.parallel_block)
        gated = int(config.activation == "swiglu")
        # Rotation leaves queries in another layout than the output projection reads.
        rope = config.positions == "rope"
        copied = rope and not self.fused and config.heads > 1 and self.seq > 1
        return self.tokens * formulas.block_saved_bytes(
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.ffn,
            {"swiglu": 4, "gelu": 2, "relu": 1}[config.activation],
            formulas.readers_of_norms(gated, parallel, int(self.casts)),
            2 - parallel,
            self.norm,
            int(copied),
            self.matmul,
            self.residual,
        )

    @property
    def outside(self) -> int:
        """What embedding, positions, last norm and head save."""
        return self.tokens * formulas.outside_saved_bytes(
            self.config.hidden,
            self.config.head_dim,
            self.norm,
            int(self.config.positions == "rope"),
            int(self.config.embed_norm),
            self.matmul,
            self.residual,
        )

    @property
    def after_blocks(self) -> int:
        """The part of `outside` that the last norm and the head save."""
        return self.tokens * (self.norm + self.matmul * self.config.hidden)

    @property
    def block_casts(self) -> int:
        """Copies of a block's matrices that autocast makes and backward reads."""
        return 2 * block_matrices(self.config) if self.casts else 0

    @property
    def head_cast(self) -> int:
        return 2 * self.table if self.casts else 0

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.config.vocab_size * self.config.hidden

    @property
    def targets(self) -> int:
        """Targets, copied to stand in a row; a single row or column already does."""
        return 8 * self.tokens if self.batch > 1 and self.seq > 1 else 0

    @property
    def data(self) -> int:
        """Sequences of one more token, and positions where the model reads them."""
        positions = 0 if self.config.positions == "none" else 8 * self.seq
        return 8 * self.batch * (self.seq + 1) + positions


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
    is the sum where loss or update are the highest moment, as in every model whose
    vocabulary is wider than its MLP, and else to a few per cent. What kernels allocate
    for themselves is not counted.

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
    sizes = _Sizes(config, batch, seq, precision, fused)
    count, tensors = parameters(config), parameter_sizes(config)
    weight, gradient, state = STATE[precision]
    scratch = 0 if fused else adamw_scratch_bytes(groups or [tensors], foreach)
    saved = formulas.saved_bytes(
        config.layers, 1, sizes.block, sizes.outside, sizes.stream, int(recompute)
    )
    saved += sizes.head_cast
    saved += 0 if recompute else config.layers * sizes.block_casts
    at_loss = saved + sizes.logits + SEED
    lasting = {"parameters": weight * count}
    lasting["optimizer state"] = state * count + 4 * len(tensors)  # a step each
    moments = {
        "loss": _moment(at_loss, 0, sizes.data + SCALARS + 2 * sizes.logits),
        "head": _head(sizes, at_loss - sizes.logits),
        "last block": _block(sizes, config.layers - 1, recompute),
        "first block": _block(sizes, 0, recompute),
        "embedding": _embedding(sizes, gradient * count),
        "update": _moment(0, gradient * count, sizes.data + scratch),
    }
    if accumulating:
        own = 0 if config.tie_embeddings else gradient * sizes.table
        moments = _accumulating(moments, gradient * count, own)
    inside = _saved_at_block(sizes, config.layers - 1, recompute)
    return StepMemory(
        parameters=lasting["parameters"],
        gradients=gradient * count,
        optimizer_state=lasting["optimizer state"],
        activations=max(at_loss + sizes.targets + 4, inside),  # 4: sum of weights
        moments={name: lasting | moment for name, moment in moments.items()},
    )


def _moment(activations: int, gradients: int, other: int) -> Moment:
    return {"gradients": gradients, "activations": activations, "other": other}


def _accumulating(
    moments: dict[str, Moment], gradients: int, table: int
) -> dict[str, Moment]:
    """The moments with every gradient there.

    A new gradient is added to the one that is kept, and freed: so the head's and the
    embedding's own are a second copy at their moments.
    """
    extra = {"head": moments["head"]["gradients"], "embedding": table}
    return {
        name: moment
        | {"gradients": gradients, "other": moment["other"] + extra.get(name, 0)}
        for name, moment in moments.items()
    }


def _head(sizes: _Sizes, saved: int) -> Moment:
    """The head has its gradients: of its weight, and of what it read."""
    weight, read = sizes.matmul * sizes.table, sizes.matmul * sizes.tokens
    read *= sizes.config.hidden
    other = sizes.data + SCALARS + sizes.tokens * sizes.matmul * sizes.config.vocab_size
    if sizes.casts or sizes.config.tie_embeddings:  # not yet what is kept
        return _moment(saved, 0, other + weight + read)
    return _moment(saved, weight, other + read)


def _saved_at_block(sizes: _Sizes, index: int, recompute: bool) -> int:
    """What is still saved when backward enters the MLP of block `index`."""
    before = sizes.outside - sizes.after_blocks
    inside = sizes.block - sizes.stream  # its output is read by none that is left
    if recompute:
        kept = before + index * sizes.stream + inside + sizes.block_casts
    else:
        kept = before + index * sizes.block + inside
        kept += (index + 1) * sizes.block_casts
    return kept + SEED


def _block(sizes: _Sizes, index: int, recompute: bool) -> Moment:
    """The MLP of block `index` has the gradient of its activation function's input."""
    config = sizes.config
    norm = formulas.norm_parameters(
        config.hidden, int(config.norm == "layer"), int(config.bias)
    )
    blocks_after = (config.layers - 1 - index) * sum(block_sizes(config))
    down = config.hidden * config.ffn + (config.hidden if config.bias else 0)
    head = 0 if config.tie_embeddings else sizes.table
    width = STATE[sizes.precision][1]
    gradients = width * (head + norm + blocks_after + down)
    partial = width * sizes.table if config.tie_embeddings else 0
    freed = 0 if config.activation == "relu" else sizes.wide
    freed += 2 * config.hidden * config.ffn if sizes.casts else 0
    live = (3 if config.activation == "swiglu" else 2) * sizes.wide
    return _moment(
        _saved_at_block(sizes, index, recompute) - freed,
        gradients,
        sizes.data + SCALARS + partial + sizes.stream + live,
    )


def _embedding(sizes: _Sizes, gradients: int) -> Moment:
    """Every gradient is there; a tied table's two parts are added into a third."""
    tied = sizes.config.tie_embeddings
    width = STATE[sizes.precision][1]
    live = 2 * width * sizes.table if tied else sizes.stream
    return _moment(SEED, gradients, sizes.data + SCALARS + live)


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
