"""What is trained to compare a technique with one device: small, and uneven.

Every problem differs in the same ways from the easy case: ranks see other sequences
(sorted, so also sequences of another kind), with unequal numbers of valid targets, and
eleven sequences do not divide by 2, 3, 4 or 8. Each adds one difficulty of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.step import IGNORED, Batch

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Builds an optimizer for the parameters, as `sgd` does."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD, in which a wrong gradient is a wrong weight."""
    return torch.optim.SGD(parameters, lr=0.5)


def uneven(step: int, row: int, seq: int) -> int:
    """Valid targets of the sequence `row` of the batch of `step`: 1 to `seq`."""
    return 1 + (5 * row + 3 * step) % seq


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its data, and how it is trained.

    Attributes:
        name: What a message calls it.
        model: Builds the model, `model(tokens, positions) -> logits [batch, seq,
            vocab]`. Its outputs and buffers must not depend on how the batch is
            split: no batch norm, no dropout.
        vocab_size: Size of the last dim of the logits.
        sequences: Sequences in the global batch.
        seq: Tokens in a sequence.
        valid: `valid(step, row, seq)`, the number of targets that count in a sequence,
            its first ones.
        micro_batches: Parts into which a rank splits its share of the batch, at most
            one for each of its sequences.
        steps: Optimizer steps.
        optimizer: Builds the plain optimizer. SGD, unless all is in float64: Adam
            hides a wrong scale, and turns rounding of a small gradient into a step.
        max_norm: To which gradients are clipped; None: they are not.
        set_to_none: What `zero_grad` is told.
        dtype: Of weights and activations.
    """

    name: str
    model: Callable[[], nn.Module]
    vocab_size: int = 37
    sequences: int = 11
    seq: int = 7
    valid: Callable[[int, int, int], int] = uneven
    micro_batches: int = 1
    steps: int = 3
    optimizer: MakeOptimizer = sgd
    max_norm: float | None = None
    set_to_none: bool = True
    dtype: torch.dtype = torch.float64

    def build(self, seed: int = 0) -> nn.Module:
        """The model, always the same for a seed; another seed has other values.

        Noise is added in float64 to what the model's own initialization gives, since
        weights that happen to be float32 numbers would hide a cast.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model().to(self.dtype)
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*model.parameters(), *model.buffers()):
            values = tensor.detach()
            if tensor.is_floating_point():
                wide = {"generator": generator, "dtype": torch.float64}
                values.add_(0.1 * torch.randn(tensor.shape, **wide))  # type: ignore[call-overload]
            else:
                values.copy_(values.roll(seed))  # a permutation stays one
        return model

    def batch(self, step: int) -> Batch:
        """The global batch of a step, [sequences, seq], sorted by the first token."""
        generator = torch.Generator().manual_seed(1000 + step)
        size = (self.sequences, self.seq + 1)
        data = torch.randint(self.vocab_size, size, generator=generator)
        whole = Batch.from_sequences(data[data[:, 0].argsort(stable=True)])
        targets = whole.targets.clone()  # [sequences, seq]
        for row in range(self.sequences):
            targets[row, self.valid(step, row, self.seq) :] = IGNORED
        return replace(whole, targets=targets)

    def split(self, share: Batch) -> list[Batch]:
        """A rank's share as its micro-batches; a rank without sequences has one."""
        sequences = len(share.tokens)
        return share.split(min(self.micro_batches, sequences)) if sequences else [share]


# ---- models


def _transformer(**options: object) -> Transformer:
    sizes = {"vocab_size": 37, "layers": 2, "hidden": 12, "heads": 2, "kv_heads": 1}
    given = {**sizes, "ffn": 13, "bias": True, **options}
    return Transformer(ModelConfig(**given))  # type: ignore[arg-type]


def _with_frozen() -> nn.Module:
    model = _transformer()
    for name, parameter in model.named_parameters():
        frozen = name.startswith("embed") or name.endswith("norm.weight")
        parameter.requires_grad = not frozen
    return model


def _with_unused() -> nn.Module:
    model = _transformer(layers=1)
    model.never = nn.Linear(5, 3)
    return model


class Branches(nn.Module):
    """Sequences take one of two ways, by their first token.

    Since batches are sorted, the first rank uses one branch and the last the other.
    """

    def __init__(self, vocab_size: int = 37, hidden: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.low, self.high = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, seq, vocab]; a branch that no sequence takes is not run."""
        x = self.embed(tokens)  # [batch, seq, hidden]
        low = tokens[:, 0] < self.embed.num_embeddings // 2  # [batch]
        out = torch.zeros_like(x)
        for rows, branch in ((low, self.low), (~low, self.high)):
            if rows.any():
                out[rows] = branch(x[rows])
        return self.head(torch.tanh(x + out))


class Buffered(nn.Module):
    """No Transformer: buffers of three dtypes, and one layer that is applied twice."""

    scale: Tensor
    order: Tensor
    kept: Tensor

    def __init__(self, vocab_size: int = 37, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab_size)
        self.register_buffer("scale", torch.ones(hidden))
        self.register_buffer("order", torch.randperm(hidden))
        self.register_buffer("kept", torch.arange(hidden) > 0)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, seq, vocab]."""
        x = self.embed(tokens)[..., self.order] * self.scale  # [batch, seq, hidden]
        x = torch.tanh(self.mix(x)).where(self.kept, x)
        return self.head(torch.tanh(self.mix(x)))


class Empty(nn.Module):
    """A layer with no outputs: its parameters have no elements, and still a gradient.

    What an expert or a shard looks like on a rank that holds nothing of it.
    """

    def __init__(self, vocab_size: int = 37, hidden: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.weight = nn.Parameter(torch.empty(0, hidden))
        self.bias = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, seq, vocab]."""
        x = self.embed(tokens)  # [batch, seq, hidden]
        nothing = F.linear(x, self.weight, self.bias)  # [batch, seq, 0]
        return self.head(x + nothing.sum(-1, keepdim=True))


class Overflowing(nn.Module):
    """Sequences that begin with the last token have infinite logits.

    Batches are sorted, so they are on the last rank that has any sequence.
    """

    def __init__(self, vocab_size: int = 37, hidden: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, seq, vocab]."""
        logits = self.head(torch.tanh(self.embed(tokens)))
        last = self.embed.num_embeddings - 1
        scale = torch.where(tokens[:, 0] == last, torch.inf, 1.0)  # [batch]
        return logits * scale[:, None, None].to(logits.dtype)


# ---- presets


def _half_silent(step: int, row: int, seq: int) -> int:
    """No target in the later sequences, so none on some rank; in step 1 none at all."""
    return 0 if row >= 5 or step == 1 else uneven(step, row, seq)


_PLAIN = Problem(name="plain", model=_transformer)
_ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
_TIED = partial(_transformer, tie_embeddings=True)

PROBLEMS: Mapping[str, Problem] = MappingProxyType(
    {
        problem.name: problem
        for problem in (
            _PLAIN,  # odd sizes, grouped queries, biases
            replace(_PLAIN, name="tied", model=_TIED),
            replace(_PLAIN, name="frozen", model=_with_frozen),
            replace(_PLAIN, name="unused", model=_with_unused),  # on every rank
            replace(_PLAIN, name="branches", model=Branches, micro_batches=2),
            replace(_PLAIN, name="no tokens", valid=_half_silent),
            replace(_PLAIN, name="micro-batches", model=_TIED, micro_batches=3),
            replace(_PLAIN, name="few sequences", sequences=3, micro_batches=2),
            replace(_PLAIN, name="empty parameters", model=Empty),
            replace(_PLAIN, name="buffers", model=Buffered, micro_batches=2),
            replace(_PLAIN, name="clipped", max_norm=0.1),
            replace(_PLAIN, name="overflow", model=Overflowing, max_norm=0.1),
            replace(_PLAIN, name="gradients kept", set_to_none=False, micro_batches=2),
            replace(_PLAIN, name="adamw", model=_TIED, optimizer=_ADAMW),
            replace(_PLAIN, name="float32", model=_TIED, dtype=torch.float32),
        )
    }
)
"""The problems by name; a technique that can do any model should do all of them.

`dataclasses.replace` makes others: `replace(PROBLEMS["plain"], seq=8)`.
"""
