"""What a run says while it goes on: to the eye, and to a file."""

import json
import math
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minitrain import runtime

LOG_EVERY = 10  # steps between lines where there is no terminal for a bar


class Log:
    """What a run says while it goes on: a bar or lines, and `metrics.jsonl`.

    Going on from step n drops the figures of later steps from the file, so that each
    step has one line. Only rank 0 writes.

    Args:
        folder: the run's folder.
        steps: how many there will be.
        done: how many there were before.
        bar: whether there is a terminal for a bar.
        columns: its width.
    """

    def __init__(
        self, folder: Path, steps: int, done: int, bar: bool, columns: int
    ) -> None:
        self.path, self.steps = folder / "metrics.jsonl", steps
        self.active = runtime.rank() == 0
        if self.active:
            lines = _lines(self.path)
            kept = [line for line in lines if json.loads(line)["step"] <= done]
            self.path.write_text("".join(kept))
        self.bar = tqdm(
            total=steps,
            initial=done,
            unit="step",
            disable=not (bar and self.active),
            ncols=columns,
        )

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows and keeps the figures of one step."""
        if not self.active:
            return
        self._keep(metrics)
        loss = math.nan if metrics["loss"] is None else metrics["loss"]
        rate, mfu = metrics["tokens_per_second"], metrics["mfu"]
        text = f"loss {loss:.3f}, {rate:,.0f} tokens/s, MFU {mfu:.0%}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        step = metrics["step"]
        if self.bar.disable and (step % LOG_EVERY == 0 or step in (1, self.steps)):
            print(f"step {step}/{self.steps}: {text}", flush=True)

    def validation(self, step: int, loss: float) -> None:
        """Shows and keeps a validation loss."""
        self._keep({"step": step, "validation_loss": loss})
        self.say(f"step {step}/{self.steps}: validation loss {loss:.3f}")

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self.active:
            self.bar.clear()
            print(text, flush=True)
            self.bar.refresh()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self.active:
            self.bar.close()

    def _keep(self, figures: dict[str, Any]) -> None:
        if self.active:
            with self.path.open("a") as file:
                file.write(json.dumps(figures) + "\n")


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; a last one that was cut short is not one of them."""
    if not path.exists():
        return []
    return [s for s in path.read_text().splitlines(keepends=True) if s.endswith("\n")]
