"""A decoder-only Transformer that knows nothing about parallelism.

The seams that every technique uses: widths and head counts come from the weights'
shapes, so a layer whose weights were sharded in place still runs; the attention core
is one attribute; positions are an input; the loss is outside; and each part of the
forward (embed, blocks, norm, head) may be absent, which makes a pipeline stage.

Legend: `hidden` is the model's width, `heads` and `kv_heads` count those present here.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.workload.config import ModelConfig

AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`core(q, k, v) -> out`, all [batch, heads, seq, head_dim]; k and v may have fewer
heads than q, each serving a run of heads / kv_heads neighbouring query heads."""

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position's angles, each [batch, 1, seq, head_dim / 2]."""

INIT_STD = 0.02  # standard deviation of initial weights (GPT-2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The default attention core: torch's fused causal attention, grouped queries."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim / 2]) by its position's angle."""
    cos, sin = rotation
    a, b = x.to(cos.dtype).chunk(2, dim=-1)  # [batch, heads, seq, head_dim / 2]
    turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return turned.to(x.dtype)  # [batch, heads, seq, head_dim]


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34)."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation for `positions` [batch, seq], in `dtype` or float32 if wider."""
        dtype = torch.promote_types(dtype, torch.float32)
        pairs = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=dtype)
        frequency = self.theta ** (-pairs / self.head_dim)  # [head_dim / 2]
        angle = positions[:, None, :, None].to(dtype) * frequency
        return angle.cos(), angle.sin()  # each [batch, 1, seq, head_dim / 2]


class Embedding(nn.Module):
    """Token embedding, plus learned positions and a norm where the model has them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        size, hidden = config.vocab_size, config.hidden
        self.tokens = nn.Embedding(size, hidden, dtype=dtype)
        learned = config.positions == "learned"
        self.positions = (
            nn.Embedding(config.max_seq, hidden, dtype=dtype) if learned else None
        )
        self.norm = make_norm(config, dtype) if config.embed_norm else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of `tokens` at `positions`, both [batch, seq]."""
        x = self.tokens(tokens)  # [batch, seq, hidden]
        if self.positions is not None:
            x = x + self.positions(positions)  # [batch, seq, hidden]
        return x if self.norm is None else self.norm(x)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=config.bias, dtype=dtype)
        self.head_dim = config.head_dim
        self.q = linear(config.hidden, config.heads * config.head_dim)
        self.k = linear(config.hidden, config.kv_heads * config.head_dim)
        self.v = linear(config.hidden, config.kv_heads * config.head_dim)
        self.o = linear(config.heads * config.head_dim, config.hidden)
        self.core: AttentionCore = causal_attention

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Each position of `x` [batch, seq, hidden] reads itself and those before."""
        q = self._heads(self.q(x))  # [batch, heads, seq, head_dim]
        k = self._heads(self.k(x))  # [batch, kv_heads, seq, head_dim]
        v = self._heads(self.v(x))  # [batch, kv_heads, seq, head_dim]
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        out = self.core(q, k, v)  # [batch, heads, seq, head_dim]
        return self.o(out.transpose(1, 2).flatten(2))  # [batch, seq, hidden]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """Feed-forward layer; with a gate it is SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=config.bias, dtype=dtype)
        gated = config.activation == "swiglu"
        self.gate = linear(config.hidden, config.ffn) if gated else None
        self.up = linear(config.hidden, config.ffn)
        self.down = linear(config.ffn, config.hidden)
        # GPT-2 and its descendants use the tanh form of GELU.
        gelu: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")
        self.activation = gelu if config.activation == "gelu" else F.relu

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each position of `x` [batch, seq, hidden] by itself."""
        up = self.up(x)  # [batch, seq, ffn]
        if self.gate is None:
            return self.down(self.activation(up))  # [batch, seq, hidden]
        return self.down(F.silu(self.gate(x)) * up)  # [batch, seq, hidden]


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = None if config.parallel_block else make_norm(config, dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """The layer's output for `x`, both [batch, seq, hidden]."""
        normed = self.attention_norm(x)  # [batch, seq, hidden]
        attended = x + self.attention(normed, rotation)  # [batch, seq, hidden]
        if self.mlp_norm is not None:
            normed = self.mlp_norm(attended)  # [batch, seq, hidden]
        return attended + self.mlp(normed)  # [batch, seq, hidden]


def make_norm(config: ModelConfig, dtype: torch.dtype | None) -> nn.Module:
    """RMSNorm, or LayerNorm with a bias where the model has biases."""
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
    return nn.LayerNorm(config.hidden, config.norm_eps, bias=config.bias, dtype=dtype)


class Transformer(nn.Module):
    """The model: embed, a list of blocks, norm, head; any of them may be None.

    A pipeline stage keeps some parts and sets the rest to None. Blocks it does not
    hold are None entries of `blocks`, so that names of parameters are the same in
    every stage. Without `embed` the input is hidden states, without `head` the output.

    Built on the meta device it allocates nothing; `to_empty` and `init_weights` make
    it real. Elsewhere it is initialized at once, from `seed`.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        device = torch.device(device or torch.get_default_device())
        with torch.device("meta"):
            self.embed: Embedding | None = Embedding(config, dtype)
            layers = range(config.layers)
            self.blocks = nn.ModuleList(Block(config, dtype) for _ in layers)
            self.norm: nn.Module | None = make_norm(config, dtype)
            self.head: nn.Linear | None = nn.Linear(
                config.hidden, config.vocab_size, bias=False, dtype=dtype
            )
        rope = config.positions == "rope"
        self.rope = Rotary(config.head_dim, config.rope_theta) if rope else None
        self.tie_weights()
        if device.type != "meta":
            self._materialize(device)
            self.init_weights(seed)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Logits of the token after each position.

        Args:
            x: token ids [batch, seq]; hidden states [batch, seq, hidden] if this
                stage has no `embed`.
            positions: each token's place in its document, [batch, seq].

        Returns:
            Logits [batch, seq, vocab]; hidden states if this stage has no `head`.
        """
        if self.embed is not None:
            x = self.embed(x, positions)  # [batch, seq, hidden]
        rotation = None if self.rope is None else self.rope(positions, x.dtype)
        for block in self.blocks:
            if block is not None:
                x = block(x, rotation)  # [batch, seq, hidden]
        if self.norm is not None:
            x = self.norm(x)  # [batch, seq, hidden]
        return x if self.head is None else self.head(x)  # [batch, seq, vocab]

    def tie_weights(self) -> None:
        """Makes the head's weight the embedding's own, if the model ties them."""
        if self.config.tie_embeddings and self.embed and self.head:
            self.head.weight = self.embed.tokens.weight

    def _materialize(self, device: torch.device) -> None:
        # What `to_empty` does; it refuses to under FakeTensorMode.
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty))
        self.tie_weights()

    def _apply(self, fn: Callable, recurse: bool = True) -> "Transformer":
        # Moving a module off the meta device makes new parameters, one for each name,
        # and would silently untie the two.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Sets every parameter this module holds, each from its own seed and name."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(name, parameter, self.config.layers, seed))


def initial_value(name: str, like: Tensor, layers: int, seed: int = 0) -> Tensor:
    """The initial value of the parameter `name`, on the CPU.

    Drawn from a generator seeded by (seed, name) alone, so it does not depend on the
    device, on the other parameters, or on which stage holds it. Matrices are normal
    with deviation 0.02, those that end a residual branch 0.02 / sqrt(2 * layers)
    (Radford et al. 2019, section 2.3); biases are zero and norms' weights one.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    value = torch.zeros(like.shape, dtype=dtype, device="cpu")
    if name.endswith("bias"):
        return value
    if "norm" in name:
        return value.fill_(1.0)
    residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
    std = INIT_STD / math.sqrt(2 * layers) if residual else INIT_STD
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return value.normal_(0.0, std, generator=generator)
