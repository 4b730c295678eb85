"""Draw the landing page's figure: the memory of one real training step.

A small Transformer is trained for two steps; the second is traced, and its skyline is
drawn with the peak that the closed form predicts. The two agree to the byte.
"""

import sys
from pathlib import Path

import torch

from minitrain import trace, viz
from minitrain.runtime.tracing import Trace
from minitrain.workload.config import ModelConfig
from minitrain.workload.memory import step_memory
from minitrain.workload.model import Transformer
from minitrain.workload.step import Batch, TokenLoss, accumulate

FIGURE = Path(__file__).resolve().parent.parent / "book" / "_static" / "landing.svg"
BATCH, SEQ = 8, 256
CONFIG = ModelConfig(
    vocab_size=4096, layers=12, hidden=256, heads=8, kv_heads=4, max_seq=SEQ
)


def traced_step() -> Trace:
    """The second step of AdamW on `CONFIG`, traced."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ + 1))
    batches = [Batch.from_sequences(tokens)]

    def step() -> None:
        optimizer.zero_grad()
        accumulate(model, batches, TokenLoss(BATCH * SEQ))
        optimizer.step()

    step()  # in which the optimizer makes its state
    optimizer.zero_grad()
    with trace() as traced:
        step()
    return traced


def main() -> int:
    """Draw it, and refuse to if formula and measurement differ."""
    traced = traced_step()
    predicted = step_memory(CONFIG, BATCH, SEQ).peak_bytes
    if predicted != traced.peak_total_bytes:
        print(f"measured {traced.peak_total_bytes}, predicted {predicted}")
        return 1
    figure = viz.skyline(traced, {"closed form": predicted})
    FIGURE.write_text(figure.svg)
    print(f"{FIGURE.name}: {len(figure.svg) / 1000:.0f} kB. {figure.alt}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
