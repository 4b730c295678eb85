"""What a training step takes, in closed form: blocks, stages, bubble, sums, update.

As in `layer`, the arithmetic is NumPy's: a field of a record is a number, or an array
with one entry for each plan. `estimate` makes the records from a model, a plan and a
cluster; `SCHEDULES` numbers the pipeline schedules.
"""

import numpy as np

from minitrain.simulate import layer
from minitrain.simulate.bubbles import pipeline_span_seconds
from minitrain.simulate.kernels import Chip, gemm_seconds, memory_seconds
from minitrain.simulate.network import (
    Wires,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from minitrain.simulate.sizes import Number, Sizes
from minitrain.simulate.software import Software

# A block, in parts


def block_forward(s: Sizes, c: Chip, w: Chip, n: Wires, soft: Software) -> Number:
    """Seconds of a block forward: products, attention, traffic, messages, launches."""
    products = layer.attention_products_seconds(s, c) + layer.mlp_seconds(s, c, soft)
    products = products / soft.gemm_share
    core = layer.core_seconds(s, w, soft, 0)
    moved = memory_seconds(w, soft.traffic * layer.moved_bytes(s, soft))
    tensor = layer.tensor_message_seconds(s, n) * (1 - soft.tensor_hidden)
    ring = layer.context_message_seconds(s, n)
    floor = (1 + s.moe * soft.expert_kernels) * soft.kernels * soft.launch_seconds
    idle = np.maximum(0, floor - products - core - moved)
    window = soft.context_hidden * (products + core + idle)
    messages = 2 * tensor + hidden_behind(ring, window)
    if s.moe:
        messages = messages + experts_messages(s, n, soft)
    return products, core, moved, messages, idle


def experts_messages(s: Sizes, n: Wires, soft: Software) -> Number:
    """Two all-to-alls of a block's routed tokens: to the experts and back."""
    return s.moe * 2 * layer.expert_message_seconds(s, n) * (1 - soft.expert_hidden)


def hidden_behind(message: Number, window: Number) -> Number:
    """What a window of computation leaves of a message."""
    return np.maximum(message - window, 0)


def block_backward(s: Sizes, c: Chip, w: Chip, n: Wires, soft: Software) -> Number:
    """Seconds of one block backward, without what is computed again; as forward.

    The exchange of a block's input gradient hides behind the product of the weight's
    where the software overlaps the two. Gradients are added to what is there: read and
    written at `added_bytes` a parameter.
    """
    products = layer.attention_products_backward_seconds(s, c)
    products = (products + layer.mlp_backward_seconds(s, c, soft)) / soft.gemm_share
    core = layer.core_seconds(s, w, soft, 1)
    moved = soft.traffic_backward * layer.moved_bytes(s, soft)
    moved = memory_seconds(w, moved + added_bytes(s, soft) * s.block_parameters)
    tensor = layer.tensor_message_seconds(s, n) * (1 - soft.tensor_hidden_backward)
    ring = 2 * layer.context_message_seconds(s, n)
    floor = (2 + 2 * s.moe * soft.expert_kernels) * soft.kernels * soft.launch_seconds
    idle = np.maximum(0, floor - products - core - moved)
    window = soft.context_hidden * (products + core + idle)
    messages = 2 * tensor + hidden_behind(ring, window)
    if s.moe:
        messages = messages + experts_messages(s, n, soft)
    return products, core, moved, messages, idle


def added_bytes(s: Sizes, soft: Software) -> Number:
    """Bytes a parameter moved to add gradients, on average over the micro-batches."""
    return soft.added_bytes * (s.micro_batches - soft.first_free) / s.micro_batches


def head_seconds(s: Sizes, w: Chip, soft: Software) -> Number:
    """The head and the loss, forward and backward, on the stage that has them."""
    t, columns = layer.tokens(s), s.vocab / s.tp
    forward = gemm_seconds(w, t, columns, s.hidden)
    backward = layer.backward_seconds(w, t, columns, s.hidden)
    added = added_bytes(s, soft) * columns * s.hidden
    f = forward / soft.gemm_share + memory_seconds(w, soft.loss_bytes * t * columns)
    b = backward / soft.gemm_share
    b = b + memory_seconds(w, soft.loss_back_bytes * t * columns + added)
    return f, b


def embedding_seconds(s: Sizes, w: Chip, soft: Software) -> Number:
    """The embedding, forward and backward: rows read, and a gradient of the table."""
    rows = layer.tokens(s) * s.hidden * 2
    table = soft.table_bytes * s.vocab / s.tp * s.hidden
    return memory_seconds(w, 2 * rows), memory_seconds(w, 2 * rows + table)


# The stages and the pipeline


def span_seconds(
    s: Sizes,
    forward: Number,
    backward: Number,
    weight: Number,
    ends: Number,
    sends: Number,
) -> Number:
    """Seconds from the first micro-batch's start to the last one's end.

    Args:
        s: Sizes of the step.
        forward: Of one block and one micro-batch.
        backward: The same, gradients of inputs and weights.
        weight: The part of `backward` that gives gradients of weights.
        ends: What the embedding takes forward and backward, and the head; a part of it
            where every stage has a part of them.
        sends: Of a message between stages, and what of it a stage waits for.
    """
    table_f, table_b, head_f, head_b = ends
    send, wait = sends
    layers, chunks = s.stage_layers, s.interleave
    spread = s.schedule > 5
    part = np.where(spread, 1 / s.pp, 0)
    each_f, each_b = part * (table_f + head_f), part * (table_b + head_b)
    slowed = np.where(spread, np.where(s.schedule == 8, 1.03, SPREAD_SLOWDOWN), 1)
    first, last = s.first_layers - layers, s.last_layers - layers
    alone = np.where(spread, 0, 1)
    return pipeline_span_seconds(
        np.where(spread, 1, s.schedule),
        s.pp,
        s.micro_batches,
        chunks,
        slowed * (layers * forward + each_f) + wait * chunks,
        slowed * (layers * (backward - weight) + each_b) + wait * chunks,
        slowed * layers * weight,
        first * forward + alone * table_f,
        first * backward + alone * table_b,
        last * forward + alone * head_f,
        last * backward + alone * head_b,
        send,
    )


SPREAD_SLOWDOWN = 1.07
"""Of a stage, by the passes of a spread vocabulary and their all-reduces beside it: the
median of measured stages (arXiv:2411.05288, its artifact); 1.03 if they interlace."""


def data_seconds(
    s: Sizes, n: Wires, soft: Software, gradient_window: Number, gather_window: Number
) -> Number:
    """Messages of data parallelism in a step that nothing hides.

    Without ZeRO one all-reduce of the gradients; with stages 1 and 2 a reduce-scatter
    of them and an all-gather of the weights, the first during a backward pass, the
    second during the next forward pass. Stage 2 keeps its share of the gradients only,
    so it scatters them after every micro-batch. Stage 3 is in `sharded_seconds`.
    """
    ranks = s.shard_ranks
    inside = np.minimum(ranks, np.maximum(n.domain_ranks / s.tp, 1))
    experts = s.stage_layers * s.expert_parameters
    sent = sent_parameters(s, s.stage_parameters, experts, s.dp * s.cp)
    gradients = soft.message_bytes * sent
    weights = soft.weight_bytes * sent
    summed = all_reduce_seconds(n, gradients, s.dp * s.cp, layer_inside(s, n))
    across = all_reduce_seconds(
        n, gradients / ranks, s.dp * s.cp / ranks, layer_inside(s, n) / inside
    )
    scattered = reduce_scatter_seconds(n, gradients, ranks, inside)
    scattered = scattered + np.where(ranks < s.dp * s.cp, across, 0)
    gathered = all_gather_seconds(n, weights, ranks, inside)
    reduced = np.where(s.zero > 0, scattered, summed)
    late = exposed(reduced, soft.data_hidden * gradient_window, soft)
    late = late * np.where(s.zero == 2, s.micro_batches, 1)
    if soft.bucket_bytes:
        late = bucketed_seconds(s, n, soft, gradients, gradient_window)
    early = exposed(gathered, soft.gather_hidden * gather_window, soft)
    none = s.zero > 2
    return np.where(none, 0, late + np.where(s.zero > 0, early, 0)) * (s.dp * s.cp > 1)


def sent_parameters(s: Sizes, whole: Number, experts: Number, ranks: Number) -> Number:
    """Of `whole` parameters, those of experts included, what crosses `ranks` ranks.

    An expert meets its own replicas only, n of them, and a collective moves (n - 1) / n
    of its payload: each of its parameters counts as that share of another one's.
    """
    replicas = np.maximum(ranks * s.tp / s.ep, 1)
    share = (1 - 1 / replicas) / (1 - 1 / np.maximum(ranks, 2))
    return whole - (1 - np.minimum(share, 1)) * experts


def bucketed_seconds(
    s: Sizes, n: Wires, soft: Software, gradients: Number, window: Number
) -> Number:
    """What backward leaves of sums in buckets; the embedding's is the last one.

    A bucket pays its own latency, and slows what computes beside it. It is closed when
    it is full, so a matrix that is larger fills one by itself.
    """
    ranks, inside = s.dp * s.cp, layer_inside(s, n)
    table = soft.message_bytes * s.vocab * s.hidden / s.tp
    rest = gradients - table
    matrices = s.stage_layers * (6 + s.gated)
    count = np.minimum(np.ceil(rest / soft.bucket_bytes), matrices)
    early = count * all_reduce_seconds(n, rest / count, ranks, inside)
    last = all_reduce_seconds(n, table, ranks, inside)
    beside = np.minimum(early, soft.data_hidden * window)
    return early - beside + last + soft.slowed * beside


def layer_inside(s: Sizes, n: Wires) -> Number:
    """Data ranks of one scale-up domain."""
    return np.minimum(s.dp * s.cp, np.maximum(n.domain_ranks / s.tp, 1))


def exposed(message: Number, window: Number, soft: Software) -> Number:
    """What a window of computation leaves of a message; its last bucket stays."""
    return np.maximum(message - window, message * soft.last_bucket)


def sharded_seconds(
    s: Sizes, n: Wires, soft: Software, forward: Number, backward: Number
) -> Number:
    """Messages of ZeRO-3 in one micro-batch that computation does not hide.

    Each block is gathered before it is used, forward and backward, and its gradients
    are scattered; the gather of the next block travels while this one computes.
    """
    inside = np.minimum(s.shard_ranks, np.maximum(n.domain_ranks / s.tp, 1))
    sent = sent_parameters(s, s.block_parameters, s.expert_parameters, s.shard_ranks)
    weights = soft.weight_bytes * sent
    gradients = soft.reduce_bytes * sent
    gather = all_gather_seconds(n, weights, s.shard_ranks, inside)
    scatter = reduce_scatter_seconds(n, gradients, s.shard_ranks, inside)
    first = np.maximum(gather - soft.shard_hidden * forward, 0)
    second = np.maximum(gather + scatter - soft.shard_hidden * backward, 0)
    whole = s.stage_layers * (first + second) + gather
    return np.where(s.zero > 2, whole, 0) * (s.shard_ranks > 1)


def update_seconds(s: Sizes, w: Chip, soft: Software) -> Number:
    """The optimizer's step on what a rank owns, and the passes of the norm.

    Experts' state is spread over their own replicas only.
    """
    experts = s.stage_layers * s.expert_parameters
    alone = np.maximum(s.shard_ranks * s.tp / s.ep, 1)
    shared = (s.stage_parameters - experts) / s.shard_ranks + experts / alone
    owned = np.where(s.zero > 0, shared, s.stage_parameters)
    return memory_seconds(w, soft.update_bytes * owned)


def step_seconds(s: Sizes, c: Chip, w: Chip, n: Wires, soft: Software) -> Number:
    """Seconds of a step by part, in the order of `PARTS`; their sum is the step."""
    f = block_forward(s, c, w, n, soft)
    b = block_backward(s, c, w, n, soft)
    return assembled_seconds(s, w, n, soft, f, b)


def assembled_seconds(
    s: Sizes, w: Chip, n: Wires, soft: Software, block_f: Number, block_b: Number
) -> Number:
    """The same, from what a block takes forward and backward."""
    fp, fc, fm, ft, fi = block_f
    bp, bc, bm, bt, bi = block_b
    again = s.recompute_full * (fp + fc + fm + ft + fi) + s.recompute_core * fc
    forward = fp + fc + fm + ft + fi
    backward = bp + bc + bm + bt + bi + again
    head_f, head_b = head_seconds(s, w, soft)
    table_f, table_b = embedding_seconds(s, w, soft)
    sharded = sharded_seconds(s, n, soft, forward, backward)
    send = pipeline_message_seconds(s, n, soft)
    wait = send * (1 - soft.pipeline_hidden)
    ends = table_f, table_b, head_f, head_b
    lasting = backward + sharded / s.stage_layers
    weight = (bp + bi) / 2  # and of the host's time
    span = span_seconds(s, forward, lasting, weight, ends, (send, wait))
    m = s.micro_batches
    all_f = s.layers * forward + head_f + table_f
    all_b = s.layers * backward + head_b + table_b + s.pp * sharded
    sends = 2 * m * s.interleave * wait
    window = s.stage_layers * backward
    data = data_seconds(s, n, soft, window, s.stage_layers * forward)
    update = update_seconds(s, w, soft)
    busy = m * (all_f + all_b) / s.pp + sends
    per = m * s.layers / s.pp
    ends = m * (head_f + head_b + table_f + table_b) / s.pp
    total = span + data + update + soft.fixed_seconds
    lost = total * (soft.jitter * np.log2(np.maximum(s.hosts, 1)))
    return (
        per * (fp + bp),
        per * (fc + bc),
        per * (fm + bm),
        per * again,
        ends,
        per * (fi + bi),
        per * (ft + bt),
        span - busy,
        sends,
        data + m * sharded,
        update,
        soft.fixed_seconds + lost,
    )


PARTS = (
    "matrix products",
    "attention",
    "norms, sums, activations",
    "recomputation",
    "embedding, head and loss",
    "waiting for launches",
    "tensor, context and expert messages",
    "pipeline bubble",
    "pipeline messages",
    "data-parallel messages",
    "optimizer",
    "losses of the software",
)
"""What `step_seconds` returns, in order."""


def pipeline_message_seconds(s: Sizes, n: Wires, soft: Software) -> Number:
    """Of a micro-batch's stream from one stage to the next, over the slowest link."""
    inside = s.tp * s.cp * s.dp * s.pp <= n.domain_ranks
    scattered = np.where(s.sp + soft.scatter > 0, s.tp, 1)
    one = send_seconds(n, layer.tokens(s) * s.hidden * 2 / scattered, inside)
    return np.where(s.pp > 1, one, 0)
