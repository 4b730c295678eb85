"""A recorded program as the kernels of an accelerator: products, attention, the rest.

PyTorch calls a kernel for each operator; a compiler, or whoever writes kernels by hand,
joins those that only move bytes. The rule here: neighbours that only move bytes are one
kernel, which reads each tensor from memory once and writes those that anyone still
needs when it ends. What it makes and drops itself never leaves the chip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal, NamedTuple

from minitrain.runtime.operators import (
    ATTENTION,
    BACKWARD,
    OPTIMIZER,
    OTHER,
    Await,
    Free,
    Operator,
    Piece,
    Program,
    Start,
)

Kind = Literal["matrix products", "attention", "memory-bound"]
PRODUCTS: Final = "matrix products"
FLASH: Final = "attention"
MEMORY: Final = "memory-bound"


class Kernel(NamedTuple):
    """One kernel, with what its time depends on.

    Attributes:
        kind: A matrix product, attention, or what only moves bytes.
        phase: As of `Operator`; never `other`.
        dtype: Of its inputs.
        sizes: Of a product (batch, m, n, k); of attention (batch, heads, kv_heads,
            seq_q, seq_k, head_dim); else the bytes that it moves.
        variant: Of a product: `forward`, `dgrad` (gradient of an input) or `wgrad` (of
            a weight). Of attention: `causal` or `full`.
        flops: Of products; attention counts all scores, seen or masked.
    """

    kind: Kind
    phase: str
    dtype: str
    sizes: tuple[int, ...]
    variant: str
    flops: int


Line = Kernel | Start | Await
"""One line of a program of kernels."""

# The operands of a product, of all that goes in.
PRODUCT_OPERANDS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
# What computes much and is not timed: a roof of bytes alone would be far too fast.
UNTIMED = re.compile(
    r"aten::(_?convolution|mkldnn_|_?slow_conv|cudnn_|miopen_|_thnn_fused|_trilinear|"
    r"_int_mm|_?grouped_mm|_sparse|linalg_|_linalg|_fft|cholesky|svd|qr|inverse)"
)
# What is overwritten without being read.
OVERWRITES = frozenset(
    {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_"}
)
# What reads as much of its first argument as it returns, at places found in another.
LOOKS_UP = frozenset(
    {
        "aten::embedding",
        "aten::gather",
        "aten::index",
        "aten::index_select",
        "aten::nll_loss_forward",
    }
)


def kernels(program: Program, fuse: bool = True) -> list[Line]:
    """The kernels of a program, with the starts and waits of messages in place.

    Args:
        program: Of a trace that kept its operators.
        fuse: Whether neighbours that only move bytes are one kernel; else each is one.
    """
    phases = _phases(program)
    lines: list[Line] = []
    run = _Run()
    for entry, phase in zip(program, phases, strict=True):
        if isinstance(entry, Free):
            run.free(entry.storage)
            continue
        if isinstance(entry, Operator) and UNTIMED.match(entry.name):
            shapes = [p.shape for p in entry.reads]
            raise ValueError(
                f"{entry.name} of {shapes} is not simulated: of what computes, only "
                "matrix products and attention are timed"
            )
        alone = not isinstance(entry, Operator) or _is_product(entry)
        if alone or not fuse or phase != run.phase:
            lines.extend(run.close())
            run = _Run(phase)
        if not isinstance(entry, Operator):
            lines.append(entry)
        elif alone:
            lines.append(_product(entry, phase))
        else:
            run.add(entry)
    return [*lines, *run.close()]


def tokens(program: Program) -> int:
    """Tokens that a rank trains on: those that it looks up in its largest embedding."""
    found: dict[int, tuple[int, int]] = {}
    for entry in program:
        if (
            isinstance(entry, Operator)
            and entry.name == "aten::embedding"
            and entry.phase in ("forward", "other")
        ):
            table, places = entry.reads[:2]
            _, before = found.get(table.storage, (0, 0))
            found[table.storage] = table.held, before + prod(places.shape)
    return max(found.values(), default=(0, 0))[1]


def _phases(program: Program) -> list[str]:
    """Phases; what was `other` is of the phase that follows, at the end optimizer."""
    phases, following = [], OPTIMIZER
    for entry in reversed(program):
        if isinstance(entry, Operator) and entry.phase != OTHER:
            following = entry.phase
        phases.append(following)
    return phases[::-1]


def _is_product(entry: Operator) -> bool:
    return entry.name in PRODUCT_OPERANDS or ATTENTION in entry.name


def _product(entry: Operator, phase: str) -> Kernel:
    if ATTENTION in entry.name:
        return _attention(entry, phase)
    a, b = (entry.reads[i] for i in PRODUCT_OPERANDS[entry.name])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = a.shape[0] if len(a.shape) == 3 else 1
    variant = "forward"
    if entry.phase == BACKWARD:
        # A weight's gradient sums over tokens: [tokens, k] transposed, times gradients.
        variant = "wgrad" if a.transposed and batch == 1 else "dgrad"
    flops = 2 * batch * m * n * k
    return Kernel(PRODUCTS, phase, a.dtype, (batch, m, n, k), variant, flops)


def _attention(entry: Operator, phase: str) -> Kernel:
    backward = "backward" in entry.name
    query, key = entry.reads[backward : backward + 2]
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_k, _) = query.shape, key.shape
    sizes = (batch, heads, kv_heads, seq_q, seq_k, head_dim)
    variant = "causal" if any(o is True for o in entry.options) else "full"
    flops = (10 if backward else 4) * batch * heads * seq_q * seq_k * head_dim
    return Kernel(FLASH, phase, query.dtype, sizes, variant, flops)


@dataclass
class _Run:
    """Neighbours that only move bytes, while they become one kernel."""

    phase: str = ""
    dtype: str = ""
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)  # read, held
    writes: dict[int, tuple[int, int]] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)  # storages that began here

    def add(self, entry: Operator) -> None:
        inputs = entry.reads
        if entry.name in LOOKS_UP:
            read = sum(p.nbytes for p in entry.writes)
            inputs = (entry.reads[0]._replace(nbytes=read), *entry.reads[1:])
        overwrites = entry.name in OVERWRITES
        before = {p.storage for p in entry.reads}
        for piece in inputs:
            if not (overwrites and piece in entry.writes):
                self._count(piece, self.reads, piece.storage in self.writes)
        for piece in entry.writes:
            if piece.storage not in before and piece.storage not in self.reads:
                self.own.add(piece.storage)
            self._count(piece, self.writes, False)
        self.dtype = self.dtype or next((p.dtype for p in entry.writes), "")

    @staticmethod
    def _count(piece: Piece, where: dict[int, tuple[int, int]], on_chip: bool) -> None:
        """Adds bytes of a storage that memory must deliver, each once."""
        if not on_chip:
            moved, _ = where.get(piece.storage, (0, 0))
            total = min(moved + piece.nbytes, piece.held)
            where[piece.storage] = total, piece.held

    def free(self, storage: int) -> None:
        if storage in self.own:  # never left the chip
            self.writes.pop(storage, None)

    def close(self) -> Iterator[Kernel]:
        moved = (*self.reads.values(), *self.writes.values())
        total = sum(count for count, _ in moved)
        if total:
            yield Kernel(MEMORY, self.phase, self.dtype, (total,), "", 0)


def flops(lines: Iterable[Any], phases: Iterable[str] | None = None) -> int:
    """Operations of the products in a program, of some phases or of all."""
    wanted = None if phases is None else set(phases)
    return sum(
        line.flops
        for line in lines
        if isinstance(line, Kernel) and (wanted is None or line.phase in wanted)
    )
