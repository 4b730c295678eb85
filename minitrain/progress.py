"""What a run says while it goes on: to the eye, and to a file."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minitrain import runtime

LOG_EVERY = 10  # steps between lines where there is no terminal for a bar


def say(text: str) -> None:
    """Prints a line at once; a character that cannot be shown becomes an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


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
            _drop_after(self.path, done)
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
        rate, mfu = metrics["tokens_per_second"], metrics["mfu"]
        text = f"loss {metrics['loss']:.3f}, {rate:,.0f} tokens/s, MFU {mfu:.0%}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        step = metrics["step"]
        if self.bar.disable and (step % LOG_EVERY == 0 or step in (1, self.steps)):
            say(f"step {step}/{self.steps}: {text}")

    def validation(self, step: int, loss: float) -> None:
        """Shows and keeps a validation loss."""
        self._keep({"step": step, "validation_loss": loss})
        self.say(f"step {step}/{self.steps}: validation loss {loss:.3f}")

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self.active:
            self.bar.clear()
            say(text)
            self.bar.refresh()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self.active:
            self.bar.close()

    def _keep(self, figures: dict[str, Any]) -> None:
        if self.active:
            finite = {
                name: value if math.isfinite(value) else None  # JSON has no NaN
                for name, value in figures.items()
            }
            with self.path.open("a") as file:
                file.write(json.dumps(finite) + "\n")


def _drop_after(path: Path, step: int) -> None:
    """Leaves the whole lines of a file up to a step; the file is whole at all times."""
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    kept = "".join(line for line in lines if _is_up_to(line, step))
    if kept != text:
        beside = path.with_name(f".{path.name}")
        beside.write_text(kept)
        beside.replace(path)


def _is_up_to(line: str, step: int) -> bool:
    """Whether this is a line of figures, not cut short, and of no later step."""
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, LookupError, TypeError):
        return False
