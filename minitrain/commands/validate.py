"""`python -m minitrain validate [FILE.csv]`: predictions beside published runs."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from minitrain import options
from minitrain.commands import page
from minitrain.simulate.names import COLUMNS
from minitrain.simulate.runs import published_runs
from minitrain.simulate.validation import Report, validate

SHOWN = ("rows", "predicted", "mape", "bias", "p90", "coverage", "tau", "baseline_mape")
HEADS = ("rows", "predicted", "MAPE", "bias", "p90", "in interval", "tau", "baseline")


@dataclass(frozen=True)
class ValidateConfig:
    """Predict every row of a table of published runs, and say how far off.

    A row needs model, layers, hidden, seq_len, precision, gpu, n_gpus, tp, pp, dp,
    global_batch, framework, measured_quantity (step_time_s, tokens/s, tokens/s/GPU,
    samples/s, TFLOP/s per GPU, MFU %, HFU %, peak_memory_gib) and value; of the other
    columns (heads, kv_heads, ffn_hidden, vocab, gpus_per_node, interconnect, cp, ep,
    sequence_parallel, interleave_v, schedule, zero_stage, micro_batch, recompute,
    experts, topk, moe_ffn, source_id, note, ...) an empty field is completed by a rule.
    """

    table: Annotated[Path | None, tyro.conf.Positional] = None
    """CSV file; without one, the runs that chapter 16 of the book judges."""
    out: Path | None = None
    """Write one CSV row for each row of the table: prediction, or reason to refuse."""


def main(args: list[str]) -> int:
    """Runs the command; its last line of output is one JSON object.

    Returns the exit code: 2 where the file is not such a table.
    """
    try:
        asked = options.parse(ValidateConfig, args, prog="minitrain validate")
        rows = read(asked.table) if asked.table else published_runs()
        table, out = asked.table, asked.out
        if table and out and out.exists() and out.samefile(table):
            raise ValueError(f"--out {out} is the table itself; give another")
        report = _with_bar(rows)
        if asked.out:
            write(report.rows, asked.out)
    except ValueError as error:
        return page.complain(error)
    show(report)
    print(json.dumps({"sources": report.sources}))
    return 0


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table; what a row leaves out is empty.

    Raises:
        ValueError: It cannot be read, or has none of the columns that say a run.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            names = lines.fieldnames or []
            rows = list(lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    needed = ("model", "gpu", "measured_quantity", "value")
    if missing := [name for name in needed if name not in names]:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; a table of published runs has "
            f"{', '.join(COLUMNS)}"
        )
    if not rows:
        raise ValueError(f"{path} has no rows")
    empty = dict.fromkeys(COLUMNS, "")
    return [empty | {k: v or "" for k, v in row.items() if k} for row in rows]


def _with_bar(rows: list[dict[str, str]]) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=len(rows))
        return validate(rows, lambda done, _: bar.update(task, completed=done))


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes records whose fields may differ; one that lacks a field leaves it empty.

    Raises:
        ValueError: The file cannot be written.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, names, restval="")
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error


def show(report: Report) -> None:
    """Prints a line for each source, and why rows were refused."""
    out = page.console()
    table = Table(box=None, header_style="bold")
    table.add_column("source", no_wrap=True)
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for source, numbers in report.sources.items():
        table.add_row(source, *(_text(name, numbers.get(name)) for name in SHOWN))
    out.print(table)
    for source, reasons in report.refusals.items():
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            out.print(f"{source}: {count} refused: {reason}", soft_wrap=True)
    out.print()


def _text(name: str, number: float | None) -> str:
    if number is None:
        return "-"
    if name in ("rows", "predicted"):
        return f"{number:,}"
    if name == "coverage":
        return f"{number:.0%}"
    return f"{number:.2f}" if name == "tau" else f"{number:.1f} %"
