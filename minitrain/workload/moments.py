"""What is live at each moment of a training step, as arithmetic of one record.

Bytes rise and fall through a step, and their sum is highest at one of a few moments:
when the loss, the head, a block or the embedding is differentiated, or when the
optimizer updates. Each function here says what is live then, with the forms of
`minitrain.workload.formulas`; like those, the book prints them as JavaScript.
`minitrain.workload.memory` makes the record from a model's configuration.
"""

from dataclasses import dataclass

from minitrain.workload import formulas

MOMENTS = ("loss", "head", "last block", "first block", "embedding", "update")
"""The moments, in the order of `moments`."""

SCALARS = 4 + 4 + 8  # the loss, the objective, the count of tokens
SEED = 4  # the gradient of the objective, where backward begins

Live = tuple[int, int, int]
"""Bytes of gradients, of activations, and of what is neither nor lasts."""


@dataclass(frozen=True)
class StepSizes:
    """A training step in numbers; yes and no are 1 and 0.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the model.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: Width of a head.
        ffn: Width of the MLP.
        vocab: Tokens in the vocabulary.
        position_rows: Rows of the table of learned positions; 0 if there is none.
        positions: 1 if the model reads positions at all.
        rope: 1 for rotary positions.
        gated: 1 for SwiGLU.
        kept: Tensors of the MLP's width kept: 4 in SwiGLU, 2 with GELU, 1 with ReLU.
        centred: 1 for LayerNorm, 0 for RMSNorm.
        bias: 1 if matrices, and LayerNorms, have biases.
        tied: 1 if the head is the embedding.
        parallel: 1 if attention and MLP read one norm.
        embed_norm: 1 if a norm follows the embedding.
        tensors: Number of parameters as tensors.
        batch: Sequences of a micro-batch.
        seq: Tokens of a sequence.
        matmul_bytes: Width of what matrix products read and write.
        residual_bytes: Width of the residual stream and of the norms.
        weight_bytes: Width of a weight.
        gradient_bytes: Width of its gradient.
        master_bytes: Width of its copy in the optimizer; 0 if there is none.
        moment_bytes: Width of all its moments in the optimizer: 8 in AdamW.
        recompute: 1 if of each block only its input is kept.
        fused: 1 if norms and attention are GPU kernels.
        accumulating: 1 if the step has several micro-batches.
        scratch_bytes: What the optimizer's temporaries take.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    position_rows: int
    positions: int
    rope: int
    gated: int
    kept: int
    centred: int
    bias: int
    tied: int
    parallel: int
    embed_norm: int
    tensors: int
    batch: int
    seq: int
    matmul_bytes: int
    residual_bytes: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int
    recompute: int = 0
    fused: int = 0
    accumulating: int = 0
    scratch_bytes: int = 0


# What lasts from step to step


def parameters(step: StepSizes) -> int:
    """Parameters of the model."""
    return formulas.parameter_count(
        step.layers,
        step.hidden,
        step.heads,
        step.kv_heads,
        step.head_dim,
        step.ffn,
        step.vocab,
        step.position_rows,
        step.gated,
        step.centred,
        step.bias,
        step.tied,
        step.parallel,
        step.embed_norm,
    )


def weights_bytes(step: StepSizes) -> int:
    """All weights."""
    return step.weight_bytes * parameters(step)


def gradients_bytes(step: StepSizes) -> int:
    """All gradients."""
    return step.gradient_bytes * parameters(step)


def optimizer_bytes(step: StepSizes) -> int:
    """Master weights and moments; AdamW also counts its steps, for each tensor."""
    counts = 4 * step.tensors if step.moment_bytes > 4 else 0
    return (step.master_bytes + step.moment_bytes) * parameters(step) + counts


# What a micro-batch makes


def casts(step: StepSizes) -> bool:
    """Whether autocast makes narrow copies of wider weights."""
    return step.matmul_bytes < step.residual_bytes


def stream_bytes(step: StepSizes) -> int:
    """The residual stream."""
    return step.batch * step.seq * step.residual_bytes * step.hidden


def wide_bytes(step: StepSizes) -> int:
    """One tensor of the MLP's width."""
    return step.batch * step.seq * step.matmul_bytes * step.ffn


def scores_bytes(step: StepSizes) -> int:
    """One tensor of logits in float32."""
    return formulas.logits_bytes(step.batch * step.seq, step.vocab)


def norm_token_bytes(step: StepSizes) -> int:
    """What a norm saves, for each token."""
    return formulas.norm_saved_bytes(
        step.hidden, step.centred, step.residual_bytes, step.fused
    )


def block_bytes(step: StepSizes) -> int:
    """What a block saves, its output included, without copies of weights."""
    # Rotation leaves queries in another layout than the output projection reads.
    copied = step.rope and not step.fused and step.heads > 1 and step.seq > 1
    token = formulas.block_saved_bytes(
        step.hidden,
        step.heads,
        step.kv_heads,
        step.head_dim,
        step.ffn,
        step.kept,
        formulas.readers_of_norms(step.gated, step.parallel, casts(step)),
        2 - step.parallel,
        norm_token_bytes(step),
        int(copied),
        step.matmul_bytes,
        step.residual_bytes,
    )
    return step.batch * step.seq * token


def outside_bytes(step: StepSizes) -> int:
    """What embedding, positions, last norm and head save."""
    token = formulas.outside_saved_bytes(
        step.hidden,
        step.head_dim,
        norm_token_bytes(step),
        step.rope,
        step.embed_norm,
        step.matmul_bytes,
        step.residual_bytes,
    )
    return step.batch * step.seq * token


def after_blocks_bytes(step: StepSizes) -> int:
    """The part of `outside_bytes` that the last norm and the head save."""
    token = norm_token_bytes(step) + step.matmul_bytes * step.hidden
    return step.batch * step.seq * token


def block_casts_bytes(step: StepSizes) -> int:
    """Copies of a block's matrices that autocast makes and backward reads."""
    matrices = formulas.block_matrices(
        step.hidden, step.heads, step.kv_heads, step.head_dim, step.ffn, step.gated
    )
    return 2 * matrices if casts(step) else 0


def forward_bytes(step: StepSizes) -> int:
    """All that the forward pass saves, without the loss."""
    saved = formulas.saved_bytes(
        step.layers,
        1,
        block_bytes(step),
        outside_bytes(step),
        stream_bytes(step),
        step.recompute,
    )
    if casts(step):
        saved = saved + 2 * step.vocab * step.hidden
    return saved + (0 if step.recompute else step.layers * block_casts_bytes(step))


def saved_at_block(step: StepSizes, index: int) -> int:
    """What is still saved when backward enters the MLP of block `index`."""
    before = outside_bytes(step) - after_blocks_bytes(step)
    inside = block_bytes(step) - stream_bytes(step)  # its output is done with
    if step.recompute:
        kept = index * stream_bytes(step) + block_casts_bytes(step)
    else:
        kept = index * block_bytes(step) + (index + 1) * block_casts_bytes(step)
    return before + inside + kept + SEED


def targets_bytes(step: StepSizes) -> int:
    """Targets, copied to stand in a row; a single row or column already does."""
    return 8 * step.batch * step.seq if step.batch > 1 and step.seq > 1 else 0


def data_bytes(step: StepSizes) -> int:
    """Sequences of one more token, and positions where the model reads them."""
    positions = 8 * step.seq if step.positions else 0
    return 8 * step.batch * (step.seq + 1) + positions


# What is live at each moment, beside what lasts


def summed(step: StepSizes, live: Live, again: int) -> Live:
    """The moment in a second micro-batch, if there is one: all gradients are there.

    A new gradient is added to the one that is kept, and freed: `again` is one that is
    alive twice at this moment.
    """
    gradients, activations, other = live
    if step.accumulating:
        return gradients_bytes(step), activations, other + again
    return gradients, activations, other


def at_loss(step: StepSizes) -> Live:
    """Log-probabilities, their gradient, and the gradient of the logits."""
    saved = forward_bytes(step) + scores_bytes(step) + SEED
    live = 0, saved, data_bytes(step) + SCALARS + 2 * scores_bytes(step)
    return summed(step, live, 0)


def at_head(step: StepSizes) -> Live:
    """The head has its gradients: of its weight, and of what it read."""
    tokens = step.batch * step.seq
    weight = step.matmul_bytes * step.vocab * step.hidden
    read = step.matmul_bytes * tokens * step.hidden
    logits = step.matmul_bytes * tokens * step.vocab
    other = data_bytes(step) + SCALARS + logits + read
    saved = forward_bytes(step) + SEED
    if casts(step) or step.tied:  # not yet the gradient that is kept
        return summed(step, (0, saved, other + weight), 0)
    return summed(step, (weight, saved, other), weight)


def at_block(step: StepSizes, index: int) -> Live:
    """The MLP of block `index` has the gradient of its activation function's input."""
    table = step.gradient_bytes * step.vocab * step.hidden
    after = (step.layers - 1 - index) * formulas.block_parameters(
        step.hidden,
        step.heads,
        step.kv_heads,
        step.head_dim,
        step.ffn,
        step.gated,
        step.centred,
        step.bias,
        step.parallel,
    )
    norm = formulas.norm_parameters(step.hidden, step.centred, step.bias)
    down = step.hidden * step.ffn + step.bias * step.hidden
    gradients = step.gradient_bytes * (norm + after + down)
    if not step.tied:
        gradients = gradients + table
    partial = table if step.tied else 0
    freed = wide_bytes(step) if step.kept > 1 else 0
    if casts(step):
        freed = freed + 2 * step.hidden * step.ffn
    live = (2 + step.gated) * wide_bytes(step)
    other = data_bytes(step) + SCALARS + partial + stream_bytes(step) + live
    saved = saved_at_block(step, index) - freed
    return summed(step, (gradients, saved, other), 0)


def at_embedding(step: StepSizes) -> Live:
    """Every gradient is there; a tied table's two parts are added into a third."""
    table = step.gradient_bytes * step.vocab * step.hidden
    other = 2 * table if step.tied else stream_bytes(step)
    live = gradients_bytes(step), SEED, data_bytes(step) + SCALARS + other
    return summed(step, live, 0 if step.tied else table)


def at_update(step: StepSizes) -> Live:
    """Every gradient, and the optimizer's temporaries."""
    return gradients_bytes(step), 0, data_bytes(step) + step.scratch_bytes


def moments(step: StepSizes) -> tuple[Live, Live, Live, Live, Live, Live]:
    """What is live at each of `MOMENTS`."""
    return (
        at_loss(step),
        at_head(step),
        at_block(step, step.layers - 1),
        at_block(step, 0),
        at_embedding(step),
        at_update(step),
    )
