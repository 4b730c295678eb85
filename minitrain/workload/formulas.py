"""What a model costs, as plain arithmetic: parameters, operations, bytes.

Each function takes and returns numbers, with yes and no as 1 and 0, and uses nothing
but arithmetic and conditions. So the book prints these very functions as JavaScript
for its page "Will it fit?". `minitrain.workload.costs` calls them with a model's
configuration, `minitrain.workload.moments` puts the bytes of a step together; every
fact is stated once, here.

Symbols: a token is one position of one sequence of the (micro-)batch; `matmul_bytes`
is the width of what matrix products read and write, `residual_bytes` that of the
residual stream and of the norms. Float32 is (4, 4), autocast (2, 4), bfloat16 (2, 2).
`fused` kernels keep less for backward: norms keep only their statistics, and attention
takes rotated queries in any layout. PyTorch has them on GPUs and not on CPUs.
"""

# Parameters


def norm_parameters(hidden: int, centred: int, bias: int) -> int:
    """RMSNorm has a weight; LayerNorm (`centred`) a bias too, where the model has."""
    return hidden * (1 + centred * bias)


def block_matrices(
    hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, gated: int
) -> int:
    """Elements of a block's matrices: q, k, v, o, and two of the MLP, or three."""
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    return attention + (2 + gated) * hidden * ffn


def block_biases(
    hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, gated: int
) -> int:
    """Elements of the biases of those matrices, in a model that has biases."""
    return (heads + 2 * kv_heads) * head_dim + hidden + (1 + gated) * ffn + hidden


def block_parameters(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    gated: int,
    centred: int,
    bias: int,
    parallel: int,
) -> int:
    """Parameters of a block: its matrices, their biases, and two norms or one."""
    matrices = block_matrices(hidden, heads, kv_heads, head_dim, ffn, gated)
    biases = block_biases(hidden, heads, kv_heads, head_dim, ffn, gated) if bias else 0
    norm = norm_parameters(hidden, centred, bias)
    return matrices + biases + (2 - parallel) * norm


def parameter_count(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    position_rows: int,
    gated: int,
    centred: int,
    bias: int,
    tied: int,
    parallel: int,
    embed_norm: int,
) -> int:
    """Parameters of a model.

    Args:
        layers: Number of blocks.
        hidden: Width of the model.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: Width of a head.
        ffn: Width of the MLP.
        vocab: Tokens in the vocabulary.
        position_rows: Rows of the table of learned positions; 0 if there is none.
        gated: 1 for SwiGLU.
        centred: 1 for LayerNorm, 0 for RMSNorm.
        bias: 1 if matrices, and LayerNorms, have biases.
        tied: 1 if the head is the embedding.
        parallel: 1 if attention and MLP read one norm.
        embed_norm: 1 if a norm follows the embedding.
    """
    norm = norm_parameters(hidden, centred, bias)
    block = block_parameters(
        hidden, heads, kv_heads, head_dim, ffn, gated, centred, bias, parallel
    )
    embedding = (vocab + position_rows) * hidden + embed_norm * norm
    return embedding + layers * block + norm + (1 - tied) * vocab * hidden


# Operations. A multiplication and an addition are two.


def matmul_flops(tokens: int, matrices: int) -> int:
    """Operations of all products of `tokens` rows with matrices of so many elements."""
    return 2 * tokens * matrices


def attention_flops(batch: int, seq: int, heads: int, head_dim: int) -> int:
    """Operations of one layer's q k' and p v, over the whole seq x seq matrix.

    Causal masking would halve them. They are counted whole, as torch's FlopCounterMode
    and PaLM do (Chowdhery et al., arXiv:2204.02311, appendix B).
    """
    return 4 * batch * heads * seq * seq * head_dim


def step_flops(
    layers: int, block: int, attention: int, head: int, recompute: int
) -> int:
    """Operations of forward and backward, as a counter sees them.

    Backward costs each product twice: for its input and for its weight. The attention
    kernel keeps no probabilities and computes q k' again (Dao et al., arXiv:2205.14135,
    section 3.1): five products against the forward's two. With full recomputation each
    block's forward runs once more.

    Args:
        layers: Number of blocks.
        block: Forward operations of a block's matrices.
        attention: Forward operations of a block's attention.
        head: Forward operations of the head.
        recompute: 1 if backward recomputes each block.
    """
    with_scores_again = (7 + 2 * recompute) * attention // 2
    return layers * ((3 + recompute) * block + with_scores_again) + 3 * head


def model_flops(layers: int, block: int, attention: int, head: int) -> int:
    """Operations that a step cannot do without: three times the forward.

    Recomputation, of blocks or inside the attention kernel, is not work on the model:
    model FLOPs utilization leaves it out, hardware FLOPs utilization counts it
    (Korthikanti et al., arXiv:2205.05198, appendix A).
    """
    return 3 * (layers * (block + attention) + head)


# Bytes that last: weights, gradients, optimizer state


def state_bytes(
    parameters: int, weight_bytes: int, gradient_bytes: int, optimizer_bytes: int
) -> int:
    """Weights, gradients and optimizer state, so many bytes a parameter.

    AdamW in float32: 4, 4, 8. In bfloat16 with float32 master weights: 2, 2, 12, the
    16 bytes of Rajbhandari et al. (arXiv:1910.02054, section 3.1); 2, 4, 12 where
    gradients add up in float32 (Megatron).
    """
    return parameters * (weight_bytes + gradient_bytes + optimizer_bytes)


# Bytes saved for backward, for each token


def norm_saved_bytes(hidden: int, centred: int, residual_bytes: int, fused: int) -> int:
    """What a norm saves beside its input, which is the residual stream.

    LayerNorm: mean and deviation. RMSNorm: the root, and unless fused the normed
    values, which the product with the weight saves.
    """
    if centred:
        return 8
    return 4 if fused else residual_bytes * (hidden + 1)


def block_saved_bytes(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    kept: int,
    readers: int,
    norms: int,
    norm: int,
    copied: int,
    matmul_bytes: int,
    residual_bytes: int,
) -> int:
    """What a block saves for backward, in bytes for each token.

    Attention keeps q, k, v, its output and the logarithm of each row's sum. At 16 bits
    with fused kernels and GPT-2's shape this is 32 hidden + 16 + 4 heads: the 34 of
    Korthikanti et al. (arXiv:2205.05198, eq. 1) less the two bytes of dropout masks,
    and with the attention matrix (5 heads seq) replaced by its row sums.

    Args:
        hidden: Width of the model.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: Width of a head.
        ffn: Width of the MLP.
        kept: Tensors of the MLP's width: 4 in SwiGLU, 2 with GELU, 1 with ReLU.
        readers: Tensors of the model's width that matrix products read after norms.
        norms: Norms of the block, each with the residual stream that it reads.
        norm: What a norm saves beside that.
        copied: 1 if the attention's output is copied into another layout.
        matmul_bytes: Width of what matrix products read and write.
        residual_bytes: Width of the residual stream.
    """
    attention = (2 + copied) * heads * head_dim + 2 * kv_heads * head_dim
    products = matmul_bytes * (readers * hidden + attention + kept * ffn)
    return products + 4 * heads + norms * (norm + residual_bytes * hidden)


def readers_of_norms(gated: int, parallel: int, casts: int) -> int:
    """Tensors of the model's width that a block's products read after its norms.

    Products that read the same tensor share it; autocast casts it once for each.
    """
    if casts:
        return 3 + 1 + gated
    return 1 if parallel else 2


def outside_saved_bytes(
    hidden: int,
    head_dim: int,
    norm: int,
    rope: int,
    embed_norm: int,
    matmul_bytes: int,
    residual_bytes: int,
) -> int:
    """What is saved outside the blocks, without the loss, in bytes for each token.

    The embedding's output, before its norm too if it has one; the cosines and sines of
    rotary positions, in float32; the last norm, and what the head reads.
    """
    stream = residual_bytes * hidden
    embedding = stream + embed_norm * (stream + norm)
    return embedding + rope * 4 * head_dim + norm + matmul_bytes * hidden


def saved_bytes(
    layers: int, tokens: int, block: int, outside: int, stream: int, recompute: int
) -> int:
    """What the forward pass saves, without the loss and the cast copies of weights.

    Args:
        layers: Number of blocks.
        tokens: Positions in the batch.
        block: What a block saves, for each token.
        outside: What is saved outside the blocks, for each token.
        stream: Bytes of the residual stream, for each token.
        recompute: 1 if of each block only its output is kept.
    """
    return tokens * (layers * (stream if recompute else block) + outside)


def logits_bytes(tokens: int, vocab: int) -> int:
    """One tensor of logits in float32."""
    return 4 * tokens * vocab
