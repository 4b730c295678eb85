"""What a rank of a plan holds at its highest moment, by kind, in closed form.

NumPy's arithmetic, as in `step`. The fullest stage counts: the first one, whose
activations wait longest, or the last one, which has the head and the logits
(Korthikanti et al., arXiv:2205.05198, section 4).
"""

import numpy as np

from minitrain.simulate import layer
from minitrain.simulate.sizes import Number, Sizes
from minitrain.simulate.software import Software

KINDS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "buffers",
    "reserved",
)
"""What `stage_bytes` returns, in order."""


def block_activation_bytes(s: Sizes, soft: Software) -> Number:
    """What a block keeps of one micro-batch until its backward pass, on a rank.

    Of every token: the inputs of two norms and of the products behind them, and masks
    of dropout (10 hidden without gradients of heads; arXiv:2205.05198, eq. 2); queries,
    keys, values and what attention returns; the MLP's two widths. Unfused attention
    keeps the softmax's output, and with dropout a mask and what it lets through: 2 or 5
    bytes an entry. In 8 bits, inputs of products are kept at one byte.
    """
    stream = layer.stream_tokens(s) * s.hidden * (8 + 2 * soft.dropout)
    heads = layer.tokens(s) * 2 * (2 * layer.query_width(s) + 2 * layer.key_width(s))
    sums = layer.tokens(s) * 4 * s.heads / s.tp * soft.flash
    dense = layer.tokens(s) * 2 * (2 + s.gated) * s.ffn / s.tp
    shared = layer.tokens(s) * 2 * (2 + s.gated) * s.shared_ffn / s.tp
    routed = layer.routed_tokens(s) * 2 * ((2 + s.gated) * s.expert_ffn + 2 * s.hidden)
    mlp = dense * (1 - s.moe) + s.moe * (routed + shared)
    inputs = layer.stream_tokens(s) * 2 * s.hidden
    inputs = inputs + layer.tokens(s) * (layer.query_width(s) + s.ffn / s.tp)
    narrower = soft.narrow * inputs
    scores = s.micro_batch * s.heads / s.tp * s.seq / s.cp * s.seq
    matrix = scores * (2 + 3 * soft.dropout) * (1 - soft.flash) * (1 - s.recompute_core)
    return stream + heads + sums + mlp + matrix - narrower


def kept_bytes(s: Sizes, soft: Software) -> Number:
    """What stays of a block: all of it, or with full recomputation its input."""
    share = np.where(s.sp + soft.shards_input > 0, s.tp, 1)
    only = layer.tokens(s) * s.hidden * 2 / share
    kept = np.where(s.recompute_core > 0, soft.selective_keeps, 1)
    kept = kept * block_activation_bytes(s, soft)
    return np.where(s.recompute_full > 0, only, kept)


PUT_OFF = 0.75
"""Of a micro-batch's activations: what stays for gradients of weights that are put off,
where the schedule's own table counts none."""


def waiting_micro_batches(s: Sizes) -> Number:
    """Micro-batches whose activations the first stage holds at once.

    GPipe holds all, 1F1B one for each stage; interleaving (p - 1) / v more chunks;
    ZB-H2 nearly twice as many (arXiv:2401.10241, table 1); passes of the vocabulary one
    more for each barrier (arXiv:2411.05288, figures 8 and 10).
    """
    p, m = s.pp, s.micro_batches
    chunked = p * (1 + (p - 1) / (p * s.interleave))
    held: Number = np.where(s.schedule == 0, m, p)
    held = np.where((s.schedule == 2) * (s.interleave > 1), chunked, held)
    held = np.where(s.schedule == 3, p + PUT_OFF, held)
    held = np.where(s.schedule == 4, 2 * p - 1 + PUT_OFF, held)
    held = np.where(s.schedule == 6, p + 2, held)
    held = np.where(s.schedule == 7, p + 1, held)
    held = np.where(s.schedule == 8, 1.5 * p, held)
    return np.minimum(held, np.where(p > 1, m, 1))


def stage_bytes(
    s: Sizes,
    soft: Software,
    block: tuple[Number, Number],
    layers: Number,
    tables: Number,
    waiting: Number,
    logits: Number,
) -> Number:
    """Bytes by kind, in the order of `KINDS`, of one stage.

    Args:
        s: Sizes of the step.
        soft: The software.
        block: Activations of a block at work, and what stays of them.
        layers: Blocks of the stage.
        tables: Embeddings and heads that it holds.
        waiting: Micro-batches whose activations it holds.
        logits: Share of the logits that it computes.
    """
    experts = layers * s.expert_parameters
    dense = layers * (s.block_parameters - s.expert_parameters)
    dense = dense + tables * s.vocab * s.hidden / s.tp
    held = dense + experts
    shard = s.shard_ranks
    weights = soft.weight_bytes * held * np.where(s.zero > 2, 1 / shard, 1)
    gradients = soft.gradient_bytes * held * np.where(s.zero > 1, 1 / shard, 1)
    # Experts' state is spread over their own replicas only.
    alone = np.maximum(shard * s.tp / s.ep, 1)
    owned = np.where(s.zero > 0, dense / shard + experts / alone, held)
    state = soft.state_bytes * owned
    active, stays = block
    kept = waiting * layers * stays
    stream = layer.stream_tokens(s) * s.hidden * 2
    ends = (waiting + 1) * stream
    scores = logits * layer.tokens(s) * s.vocab / s.tp * soft.logit_bytes
    working = np.maximum(s.recompute_full, soft.working) * active
    activations = kept + ends + np.maximum(scores, working)
    gathered = 2 * soft.weight_bytes * s.block_parameters
    scattered = soft.reduce_bytes * s.block_parameters
    buffers = np.where(s.zero > 2, gathered + scattered, 0)
    return weights, gradients, state, activations, buffers, soft.reserved_bytes


def rank_bytes(s: Sizes, soft: Software) -> Number:
    """Bytes by kind of the fullest rank: first stage, second one, or last one."""
    spread = (s.schedule == 6) + (s.schedule == 7) + (s.schedule == 8)
    # zb-v folds the pipeline: its first rank has both ends of the model.
    alone = np.maximum(s.pp == 1, s.schedule == 5)
    part = 2 / s.pp
    waiting = waiting_micro_batches(s)
    own = np.where(alone, s.tables, np.where(spread, part, 1))
    share = np.where(alone, 1, np.where(spread, 1 / s.pp, 0))
    last = np.where(alone, 1, np.where(spread, 1 / s.pp, 1))
    middle = np.where(spread, part, 0)
    all_of_them = s.schedule == 0  # gpipe: on every stage
    later = np.where(all_of_them, waiting, np.maximum(waiting - 1, 1))
    some = np.where(s.pp > 2, s.stage_layers, 0)
    block = block_activation_bytes(s, soft), kept_bytes(s, soft)
    a0, a1, a2, a3, a4, a5 = stage_bytes(
        s, soft, block, s.first_layers, own, waiting, share
    )
    m0, m1, m2, m3, m4, m5 = stage_bytes(s, soft, block, some, middle, later, 0)
    least = np.where(
        s.interleave > 1, ((s.interleave - 1) * s.pp + 1) / s.interleave, 1
    )
    least = np.where(all_of_them, waiting, least)
    b0, b1, b2, b3, b4, b5 = stage_bytes(
        s, soft, block, s.last_layers, own, least, last
    )
    first = a0 + a1 + a2 + a3 + a4 + a5
    second = m0 + m1 + m2 + m3 + m4 + m5
    third = b0 + b1 + b2 + b3 + b4 + b5
    is_first = (first >= second) * (first >= third)
    is_second = second >= third
    return (
        np.where(is_first, a0, np.where(is_second, m0, b0)),
        np.where(is_first, a1, np.where(is_second, m1, b1)),
        np.where(is_first, a2, np.where(is_second, m2, b2)),
        np.where(is_first, a3, np.where(is_second, m3, b3)),
        np.where(is_first, a4, np.where(is_second, m4, b4)),
        np.where(is_first, a5, np.where(is_second, m5, b5)),
    )
