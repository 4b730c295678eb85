"""What one Transformer block takes on one rank: products, attention, bytes, messages.

Closed forms in NumPy's arithmetic, so that one source serves a single plan, an array of
plans and the browser. Each reads four flat records: the sizes of a step (`Sizes`), two
chips (`c` at the precision of the matrix products, `w` at the wide one of attention,
norms and the head) and the software that runs (`Software`).

A rank holds heads / tp heads, kv_heads / tp, ffn / tp columns (Megatron-LM,
arXiv:1909.08053) and seq / cp tokens of each sequence.
"""

import numpy as np

from minitrain.simulate.kernels import (
    Chip,
    attention_seconds,
    dgrad_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    grouped_wgrad_seconds,
    unfused_attention_seconds,
    wgrad_seconds,
)
from minitrain.simulate.network import (
    Wires,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from minitrain.simulate.sizes import Number, Sizes
from minitrain.simulate.software import Software


def tokens(s: Sizes) -> Number:
    """Tokens of a micro-batch on one rank."""
    return s.micro_batch * s.seq / s.cp


def stream_tokens(s: Sizes) -> Number:
    """Tokens whose norms and residuals a rank computes; sequence parallelism splits."""
    return tokens(s) / np.where(s.sp > 0, s.tp, 1)


def query_width(s: Sizes) -> Number:
    """Columns of the queries on a rank."""
    return s.heads * s.head_dim / s.tp


def key_width(s: Sizes) -> Number:
    """Columns of the keys on a rank; where heads are too few they are copied."""
    return np.maximum(s.kv_heads / s.tp, 1) * s.head_dim


# Matrix products


def attention_products_seconds(s: Sizes, c: Chip) -> Number:
    """Forward projections of attention: q, k and v in one product, and the output."""
    t, q, k = tokens(s), query_width(s), key_width(s)
    plain = gemm_seconds(c, t, q + 2 * k, s.hidden) + gemm_seconds(c, t, s.hidden, q)
    return s.latent * plain


def attention_products_backward_seconds(s: Sizes, c: Chip) -> Number:
    """Their gradients, of inputs and of weights."""
    t, q, k = tokens(s), query_width(s), key_width(s)
    into = backward_seconds(c, t, q + 2 * k, s.hidden)
    return s.latent * (into + backward_seconds(c, t, s.hidden, q))


def backward_seconds(c: Chip, m: Number, n: Number, k: Number) -> Number:
    """Both gradients of a product [m, k] x [k, n]."""
    return dgrad_seconds(c, m, n, k) + wgrad_seconds(c, m, n, k)


def mlp_products_seconds(s: Sizes, c: Chip, width: Number) -> Number:
    """Forward products of an MLP of so many columns on a rank."""
    t = tokens(s)
    up = gemm_seconds(c, t, (1 + s.gated) * width, s.hidden)
    return up + gemm_seconds(c, t, s.hidden, width)


def mlp_products_backward_seconds(s: Sizes, c: Chip, width: Number) -> Number:
    """Gradients of an MLP's input and weights."""
    t = tokens(s)
    up = backward_seconds(c, t, (1 + s.gated) * width, s.hidden)
    return up + backward_seconds(c, t, s.hidden, width)


def mlp_seconds(s: Sizes, c: Chip, soft: Software) -> Number:
    """Forward products of a block's MLP, or of its experts, on average over blocks."""
    dense = mlp_products_seconds(s, c, s.ffn / s.tp)
    if not s.moe:
        return dense
    routed = expert_products_seconds(s, c) / soft.expert_share
    if s.shared_ffn:
        routed = routed + mlp_products_seconds(s, c, s.shared_ffn / s.tp)
    return dense * (1 - s.moe) + routed * s.moe


def mlp_backward_seconds(s: Sizes, c: Chip, soft: Software) -> Number:
    """Their gradients."""
    dense = mlp_products_backward_seconds(s, c, s.ffn / s.tp)
    if not s.moe:
        return dense
    routed = expert_products_backward_seconds(s, c) / soft.expert_share
    if s.shared_ffn:
        routed = routed + mlp_products_backward_seconds(s, c, s.shared_ffn / s.tp)
    return dense * (1 - s.moe) + routed * s.moe


def routed_tokens(s: Sizes) -> Number:
    """Tokens that the experts of a rank receive: every token goes to top_k of them."""
    return stream_tokens(s) * s.top_k * s.imbalance


def expert_products_seconds(s: Sizes, c: Chip) -> Number:
    """Forward products of the experts of a rank."""
    here = np.maximum(s.experts / s.ep, 1)
    each = routed_tokens(s) / here
    up = grouped_gemm_seconds(c, here, each, (1 + s.gated) * s.expert_ffn, s.hidden)
    return up + grouped_gemm_seconds(c, here, each, s.hidden, s.expert_ffn)


def expert_products_backward_seconds(s: Sizes, c: Chip) -> Number:
    """Gradients of the experts' inputs and weights."""
    here = np.maximum(s.experts / s.ep, 1)
    each, wide = routed_tokens(s) / here, (1 + s.gated) * s.expert_ffn
    into = grouped_gemm_seconds(c, here, each, s.hidden, wide)
    into = into + grouped_gemm_seconds(c, here, each, s.expert_ffn, s.hidden)
    weight = grouped_wgrad_seconds(c, here, each, wide, s.hidden)
    weight = weight + grouped_wgrad_seconds(c, here, each, s.hidden, s.expert_ffn)
    return into + weight


# The attention core


UNALIGNED = 16
"""Peak of tensor cores over that of plain cores: rows that are not a multiple of eight
16-bit numbers cannot be read by the former (A100: 312 and 19.5 TFLOP/s)."""


def core_seconds(s: Sizes, w: Chip, soft: Software, backward: Number) -> Number:
    """Attention without its projections: fused, or with its matrix in memory."""
    batch, heads = s.micro_batch, s.heads / s.tp
    rows, width = s.seq / s.cp, s.head_dim
    if soft.flash:
        keys = np.maximum(s.kv_heads / s.tp, 1)
        fused = attention_seconds(
            w, batch, heads, keys, rows, s.seq, width, 1, backward
        )
        return soft.core_time * fused
    fused, dropout = soft.fused_softmax, soft.dropout
    core = unfused_attention_seconds(
        w, batch, heads, rows, s.seq, width, fused, dropout, backward
    )
    flops = np.where(backward > 0, 2, 1) * 4 * batch * heads * rows * s.seq * width
    return core + np.where(width % 8 > 0, flops * UNALIGNED / w.flops, 0)


# Everything else that moves bytes


def stream_bytes(s: Sizes, soft: Software) -> Number:
    """Bytes moved in a forward pass beside the products: what norms and sums read.

    Two norms read and write the stream; two residual sums read two and write one, with
    a mask of one byte where there is dropout. The gate or activation reads what the
    first product wrote and writes what the second reads; rotation reads and writes
    queries and keys.
    """
    stream = stream_tokens(s) * s.hidden * (2 * 2 + 2 * 3) * 2
    masks = stream_tokens(s) * s.hidden * 2 * soft.dropout
    rotated = tokens(s) * (query_width(s) + key_width(s)) * 2 * 2 * s.rope
    return stream + masks + rotated


def activation_bytes(s: Sizes, width: Number) -> Number:
    """Bytes of an activation function of so many columns, forward."""
    return tokens(s) * width * (2 + s.gated) * 2


def moved_bytes(s: Sizes, soft: Software) -> Number:
    """Bytes that a block moves forward beside its products."""
    moved = stream_bytes(s, soft) + narrow_bytes(s, soft)
    dense = activation_bytes(s, s.ffn / s.tp)
    if not s.moe:
        return moved + dense
    routed = routed_tokens(s) * s.expert_ffn * (2 + s.gated) * 2 + permuted_bytes(s)
    shared = activation_bytes(s, s.shared_ffn / s.tp)
    return moved + dense * (1 - s.moe) + s.moe * (routed + shared)


def permuted_bytes(s: Sizes) -> Number:
    """Bytes moved to sort tokens by expert, and back, with their weights."""
    return routed_tokens(s) * s.hidden * 2 * (2 + 3)


def narrow_bytes(s: Sizes, soft: Software) -> Number:
    """Bytes moved to write operands in 8 bits: read twice for the maximum and the cast.

    Every input of a product is read at 16 bits and written at 8, twice: as it is and
    transposed, for the gradient of the weight.
    """
    inputs = 2 * s.hidden + query_width(s) + s.ffn / s.tp
    return soft.narrow * tokens(s) * inputs * (2 + 2)


# Messages


def tensor_message_seconds(s: Sizes, n: Wires) -> Number:
    """One exchange of the stream between the tensor ranks of a block's half.

    An all-reduce, or with sequence parallelism an all-gather and a reduce-scatter,
    which take as long on a ring.
    """
    buffer = tokens(s) * s.hidden * 2
    inside = np.minimum(s.tp, n.domain_ranks)
    whole = all_reduce_seconds(n, buffer, s.tp, inside)
    halves = 2 * all_gather_seconds(n, buffer, s.tp, inside)
    return np.where(s.sp > 0, halves, whole)


def context_message_seconds(s: Sizes, n: Wires) -> Number:
    """Keys and values of a block, passed around the ring of context ranks."""
    inside = s.tp * s.cp <= n.domain_ranks
    block = tokens(s) * 2 * key_width(s) * 2
    return (s.cp - 1) * send_seconds(n, block, inside)


def expert_message_seconds(s: Sizes, n: Wires) -> Number:
    """One all-to-all of the routed tokens.

    Inside a domain a token travels once for each of its experts; over the network once
    for each domain that has any of them, and is spread there (DeepEP). With D domains
    that are D (1 - (1 - 1 / D)^top_k) on average.
    """
    inside = np.minimum(s.ep, np.maximum(n.domain_ranks / s.tp, 1))
    domains = s.ep / inside
    once = stream_tokens(s) * s.hidden * 2 * s.imbalance
    visited = domains * (1 - (1 - 1 / domains) ** s.top_k)
    near = all_to_all_seconds(n, s.top_k * once, inside, inside)
    far = all_to_all_seconds(n, visited * once, domains, 1)
    return np.maximum(near, far)
