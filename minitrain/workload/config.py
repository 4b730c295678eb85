"""The shape of a decoder-only Transformer: one frozen value, checked when made."""

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned", "none"]
Activation = Literal["swiglu", "gelu", "relu"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a `Transformer`.

    `kv_heads`, `head_dim` and `ffn` may be left at 0, which means the usual value:
    as many key-value heads as query heads, hidden / heads, and 4 * hidden (for SwiGLU
    8/3 * hidden, rounded up to a multiple of 64, so that three matrices cost about as
    much as two). They are filled in when the value is made, and `dataclasses.replace`
    keeps what was filled in: pass 0 again to derive them from a new width.

    Raises:
        ValueError: a size is not positive, or sizes do not fit each other.
    """

    vocab_size: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    max_seq: int = 2048
    norm: Norm = "rms"
    positions: Positions = "rope"
    activation: Activation = "swiglu"
    tie_embeddings: bool = False
    bias: bool = False
    embed_norm: bool = False
    """A norm right after the token embedding (BLOOM)."""
    parallel_block: bool = False
    """Attention and MLP both read one norm of the block's input (PaLM)."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.heads > 0 and not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not divisible by heads {self.heads}; "
                "choose another number of heads or give head_dim"
            )
        wide = -(-8 * self.hidden // 3 // 64) * 64
        derived = {
            "kv_heads": self.heads,
            "head_dim": self.hidden // max(self.heads, 1),
            "ffn": wide if self.activation == "swiglu" else 4 * self.hidden,
        }
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        sizes = ("vocab_size", "layers", "hidden", "heads", "kv_heads", "head_dim")
        for name in (*sizes, "ffn", "max_seq"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        for name, allowed in (
            ("norm", ("rms", "layer")),
            ("positions", ("rope", "learned", "none")),
            ("activation", ("swiglu", "gelu", "relu")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, "
                    f"not {getattr(self, name)!r}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}: "
                "each key-value head serves the same number of query heads"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs, so head_dim {self.head_dim} must be even"
            )
