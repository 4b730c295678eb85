"""`python -m minitrain sweep`: many layouts on one cluster, the best ones first."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from minitrain import options
from minitrain.commands import page
from minitrain.commands.question import Given, Question, given
from minitrain.simulate.estimate import GUARD, evaluate, flops
from minitrain.simulate.plan import Plan, Recompute
from minitrain.simulate.sizes import sizes, stack

MOST = 500_000


@dataclass(frozen=True)
class SweepConfig(Question):
    """Predict every layout of a grid that uses all devices; print the best ones."""

    tp: tuple[int, ...] = (1, 2, 4, 8)
    """Tensor-parallel ranks to try."""
    pp: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Pipeline stages to try."""
    cp: tuple[int, ...] = (1,)
    """Context-parallel ranks to try."""
    ep: tuple[int, ...] = (1,)
    """Expert-parallel ranks to try."""
    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    """Sequences in a forward pass to try."""
    schedule: tuple[str, ...] = ("1f1b", "interleaved")
    """Pipeline schedules to try."""
    interleave: tuple[int, ...] = (2, 4)
    """Model chunks of a stage to try, with the schedule interleaved."""
    zero: tuple[int, ...] = (0, 1, 3)
    """Stages of ZeRO to try."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    """Recomputation to try."""
    best: int = 10
    """How many to print."""
    out: Path | None = None
    """Write a plot, as .svg or .png: memory and utilization of every layout."""


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code: 2 where the question makes no sense."""
    try:
        read = partial(options.parse, SweepConfig, args, prog="minitrain sweep")
        asked = read()
        if asked.config:
            asked = read(options.read_toml(asked.config))
        if asked.out and asked.out.suffix not in (".svg", ".png"):
            raise ValueError(f"--out {asked.out}: a file that ends with .svg or .png")
        if asked.best < 0:
            raise ValueError(f"--best {asked.best}: 0 or more, please")
        about = given(asked)
        swept = sweep(asked, about)
        if asked.out:
            plot(swept, about, asked.out)
    except (ValueError, OSError) as error:
        return page.complain(error)
    if asked.json:
        print(json.dumps(facts(swept, asked)))
    else:
        show(swept, asked, about)
    return 0


@dataclass(frozen=True)
class Swept:
    """Every layout of a grid, or why not.

    Attributes:
        plans: Those that can be run.
        seconds: Of a step of each.
        bytes: Of the fullest rank of each.
        mfu: Of each.
        fits: Whether each fits into memory.
        refusals: How often each reason was given.
    """

    plans: list[Plan]
    seconds: np.ndarray
    bytes: np.ndarray
    mfu: np.ndarray
    fits: np.ndarray
    refusals: Counter[str]

    @property
    def order(self) -> list[int]:
        """Positions of the plans that fit, the fastest first."""
        return [int(i) for i in np.argsort(self.seconds, kind="stable") if self.fits[i]]


def grid(asked: SweepConfig, about: Given) -> Iterator[dict[str, Any]]:
    """The fields of each layout of the grid, dp apart."""
    pipes = [(name, v) for name in asked.schedule for v in _chunks(asked, name)]
    axes = (asked.tp, asked.pp, asked.cp, asked.ep, asked.micro_batch)
    for tp, pp, cp, ep, micro, (name, v), zero, again in product(
        *axes, pipes, asked.zero, asked.recompute
    ):
        if pp == 1 and (name, v) != pipes[0]:
            continue  # without stages all schedules are one
        yield {
            "seq": about.seq,
            "global_batch": asked.global_batch,
            "micro_batch": micro,
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "ep": ep,
            "schedule": name if pp > 1 else "1f1b",
            "interleave": v if pp > 1 else 1,
            "sequence_parallel": tp > 1,
            "zero": zero,
            "recompute": again,
            "precision": asked.precision,
        }


def _chunks(asked: SweepConfig, name: str) -> tuple[int, ...]:
    return asked.interleave if name == "interleaved" else (1,)


def sweep(asked: SweepConfig, about: Given) -> Swept:
    """Predict a grid.

    Raises:
        ValueError: It has no layout, or too many, or none can be run.
    """
    devices, experts = about.machines.world_size, about.experts
    plans, refusals = [], Counter[str]()
    for number, fields in enumerate(grid(asked, about)):
        if number >= MOST:
            raise ValueError(f"the grid has more than {MOST:,} layouts; try fewer")
        others = fields["tp"] * fields["pp"] * fields["cp"]
        if others < 1 or devices % others:
            refusals[f"tp*pp*cp does not divide {devices:,} devices"] += 1
            continue
        try:
            plan = Plan(dp=devices // others, **fields)
            plan.check(about.model, devices, experts)
        except ValueError as error:
            refusals[_kind(str(error))] += 1
            continue
        plans.append(plan)
    if not plans:
        words = "; ".join(f"{count} times: {why}" for why, count in refusals.items())
        raise ValueError(f"no layout of the grid can be run: {words or 'it is empty'}")
    columns = [sizes(about.model, p, about.machines.hosts, experts) for p in plans]
    found = evaluate(stack(columns), about.machines, asked.precision, asked.software)
    shape = (len(plans),)
    seconds = np.broadcast_to(found["step_seconds"], shape)
    held = np.broadcast_to(found["memory_bytes"], shape)
    device = about.machines.accelerator
    fits = held <= (1 - GUARD) * device.memory_bytes
    peak = device.peak_flops.get("bf16") or device.peak_flops["fp16"]
    mfu = flops(about.model, experts, plans[0]) / seconds / devices / peak
    return Swept(plans, seconds, held, mfu, fits, refusals)


def _kind(reason: str) -> str:
    """A reason without its numbers, so that equal ones can be counted."""
    text = reason.partition(";")[0]
    if text.startswith("global_batch="):
        return "the global batch is no multiple of dp times the micro-batch"
    return re.sub(r"(?<=[=*( ])\d+(?![\w])", "N", text)


COLUMNS = ("tp", "pp", "cp", "ep", "dp", "micro", "schedule", "ZeRO", "recompute")


def cells(plan: Plan) -> list[str]:
    """A plan in the columns of the table."""
    chunks = f" x{plan.interleave}" * (plan.interleave > 1)
    degrees = (plan.tp, plan.pp, plan.cp, plan.ep, plan.dp)
    schedule = plan.schedule + chunks if plan.pp > 1 else "-"
    row = [*map(str, degrees), f"{plan.micro_batches} x {plan.micro_batch}"]
    return [*row, schedule, str(plan.zero), plan.recompute]


def show(swept: Swept, asked: SweepConfig, about: Given) -> None:
    """Prints the best layouts and why others are not among them."""
    from rich.table import Table

    out = page.console()
    device, fitting = about.machines.accelerator, swept.order
    refused = sum(swept.refusals.values())
    where = f"{about.machines.world_size:,} {device.name}"
    said = (
        f"{asked.global_batch:,} sequences of {about.seq:,}, {asked.precision}: "
        f"{len(swept.plans) + refused:,} layouts, {len(fitting):,} fit"
    )
    out.print(page.heading(f"{about.name} on {where}", said))
    rows = [cells(swept.plans[i]) for i in fitting[: asked.best]]
    used = [
        k
        for k, c in enumerate(COLUMNS)
        if c not in ("cp", "ep") or any(r[k] != "1" for r in rows)
    ]
    table = Table(box=None, header_style="bold")
    for name in [COLUMNS[k] for k in used] + ["step", "MFU", "memory"]:
        words = name in ("schedule", "recompute")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    for i, row in zip(fitting, rows, strict=False):
        amounts = [page.seconds_text(swept.seconds[i]), f"{swept.mfu[i]:.1%}"]
        table.add_row(*(row[k] for k in used), *amounts, page.gib_text(swept.bytes[i]))
    if rows:
        out.print("", table, sep="\n")
        out.print("\nWith sequence parallelism where tp is more than 1. The first one:")
        out.print(command(swept.plans[fitting[0]], asked), soft_wrap=True)
    out.print()
    large, room = len(swept.plans) - len(fitting), page.gib_text(device.memory_bytes)
    if large:
        out.print(f"{large:,} do not fit into {room} less {GUARD:.0%}")
    if large and not fitting:
        out.print(f"the smallest needs {page.gib_text(swept.bytes.min())}")
    for reason, count in swept.refusals.most_common():
        out.print(f"{count:,} refused: {reason}")
    if asked.out:
        out.print(f"plot: {asked.out}")


def command(plan: Plan, asked: SweepConfig) -> str:
    """The line that asks `simulate` for one layout of the grid."""
    said: dict[str, object] = {
        "model": asked.model,
        "cluster": asked.cluster,
        "seq": plan.seq,
        "global-batch": plan.global_batch,
        "precision": plan.precision,
        "software": asked.software,
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": plan.cp,
        "ep": plan.ep,
        "micro-batch": plan.micro_batch,
        "schedule": plan.schedule,
        "interleave": plan.interleave,
        "zero": plan.zero,
        "recompute": plan.recompute,
    }
    usual: dict[str, object] = {
        "precision": "bf16",
        "software": "megatron-core",
        "schedule": "1f1b",
        "recompute": "none",
        "zero": 0,
    }
    options = [
        f"--{name} {value}"
        for name, value in said.items()
        if value != usual.get(name, 1)
    ]
    options += ["--sequence-parallel"] * plan.sequence_parallel
    return " ".join(["python -m minitrain simulate", *options])


def facts(swept: Swept, asked: SweepConfig) -> dict[str, Any]:
    """The answer as JSON has it."""
    return {
        "model": asked.model,
        "cluster": asked.cluster,
        "layouts": len(swept.plans) + sum(swept.refusals.values()),
        "fit": len(swept.order),
        "too_large": len(swept.plans) - len(swept.order),
        "refused": dict(swept.refusals),
        "best": [
            {
                "plan": asdict(swept.plans[i]),
                "step_seconds": float(swept.seconds[i]),
                "mfu": float(swept.mfu[i]),
                "memory_bytes": float(swept.bytes[i]),
            }
            for i in swept.order[: asked.best]
        ],
    }


def plot(swept: Swept, about: Given, path: Path) -> None:
    """Writes memory against utilization, a point for each layout.

    Raises:
        OSError: The file cannot be written.
    """
    from minitrain.viz.scatter import layouts

    points = list(zip(swept.bytes.tolist(), swept.mfu.tolist(), strict=True))
    groups = {
        f"tp {tp}": [points[i] for i, p in enumerate(swept.plans) if p.tp == tp]
        for tp in sorted({p.tp for p in swept.plans})
    }
    best = None
    if swept.order:
        plan = swept.plans[swept.order[0]]
        name = f"tp {plan.tp}, pp {plan.pp}, dp {plan.dp}"
        best = (*points[swept.order[0]], name)
    png = path if path.suffix == ".png" else None
    figure = layouts(groups, about.machines.accelerator.memory_bytes, best, png)
    if not png:
        path.write_text(figure.svg)
