"""`python -m minitrain simulate`: what one training step takes on a cluster."""

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from minitrain import options
from minitrain.commands import page
from minitrain.commands.question import Given, Question, given
from minitrain.simulate.estimate import GUARD, Estimate, estimate
from minitrain.simulate.plan import Plan, Recompute
from minitrain.simulate.software import is_borrowed
from minitrain.simulate.timeline import pipeline_of

SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True)
class SimulateConfig(Question):
    """Predict the time and the memory of a training step on a cluster."""

    dp: int = 0
    """Data-parallel ranks; 0: as many as the cluster has devices for."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks."""
    micro_batch: int = 1
    """Sequences in one forward pass of a rank."""
    schedule: str = "1f1b"
    """Of the pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, ..."""
    interleave: int = 1
    """Model chunks of a stage, with the schedule interleaved."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks."""
    zero: int = 0
    """Stage of ZeRO: 1 optimizer state, 2 gradients too, 3 weights too (FSDP)."""
    recompute: Recompute = "none"
    """What the backward pass computes again: nothing, attention, every block."""
    stage_layers: tuple[int, ...] = ()
    """Blocks of each stage; none: an even split."""
    tokens: float = 0.0
    """Tokens of the whole training, for its length in days."""
    trace: Path | None = None
    """Write the pipeline, task by task, as a file for ui.perfetto.dev."""


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code: 2 where the question makes no sense."""
    try:
        read = partial(options.parse, SimulateConfig, args, prog="minitrain simulate")
        asked = read()
        if asked.config:
            asked = read(options.read_toml(asked.config))
        if not 0 <= asked.tokens < math.inf:
            raise ValueError(f"--tokens {asked.tokens}: 0 or more, please")
        about = given(asked)
        made = estimate(
            about.model,
            plan_of(asked, about),
            about.machines,
            asked.software,
            about.experts,
        )
        if asked.trace:
            write_trace(made, asked.trace)
    except ValueError as error:
        return page.complain(error)
    if asked.json:
        print(json.dumps(facts(made, asked)))
    else:
        show(made, asked, about)
    return 0


def plan_of(asked: SimulateConfig, about: Given) -> Plan:
    """The plan that the options say.

    Raises:
        ValueError: The degrees do not divide the cluster's devices, or each other.
    """
    names = {field.name for field in fields(Plan)} - {"dp", "seq", "shard_ranks"}
    dp, devices = asked.dp, about.machines.world_size
    if not dp:
        others = asked.tp * asked.pp * asked.cp
        if others < 1 or devices % others:
            raise ValueError(
                f"tp*pp*cp = {asked.tp}*{asked.pp}*{asked.cp} = {others} does not "
                f"divide the cluster's {devices} devices; give other degrees"
            )
        dp = devices // others
    return Plan(dp=dp, seq=about.seq, **{name: getattr(asked, name) for name in names})


def facts(made: Estimate, asked: SimulateConfig) -> dict[str, Any]:
    """The answer as JSON has it: seconds, bytes, FLOP/s per unit, shares."""
    return {
        "model": asked.model,
        "cluster": asked.cluster,
        "software": made.software.name,
        "plan": asdict(made.plan),
        "step_seconds": made.step_seconds,
        "interval_seconds": list(made.interval),
        "mfu": made.mfu,
        "hfu": made.hfu,
        "tokens_per_second": made.tokens_per_second,
        "tokens_per_second_per_device": made.tokens_per_second_per_device,
        "parts_seconds": dict(made.parts),
        "memory_bytes": made.memory_bytes,
        "memory_by_kind_bytes": dict(made.memory),
        "capacity_bytes": made.cluster.accelerator.memory_bytes,
        "fits": made.fits,
    }


def show(made: Estimate, asked: SimulateConfig, about: Given) -> None:
    """Prints the answer as one page."""
    out = page.console()
    plan, machines, device = made.plan, made.cluster, made.cluster.accelerator
    where = (
        f"{machines.world_size:,} {device.name}"
        f" ({machines.hosts:,} host{'s' * (machines.hosts > 1)} of {machines.per_host})"
    )
    out.print(page.heading(f"{about.name} on {where}", words(plan)))
    out.print()
    low, high = made.interval
    tokens = plan.global_batch * plan.seq
    rows = {
        "step": f"{page.seconds_text(made.step_seconds)}  (four of five such steps:"
        f" {page.seconds_text(low)} to {page.seconds_text(high)})",
        "utilization": f"MFU {made.mfu:.1%}, HFU {made.hfu:.1%}",
        "tokens": f"{made.tokens_per_second:,.0f} a second,"
        f" {made.tokens_per_second_per_device:,.0f} a second and device;"
        f" {tokens:,} a step",
    }
    if asked.tokens:
        days = asked.tokens / made.tokens_per_second / SECONDS_OF_A_DAY
        rows["training"] = f"{days:,.1f} days without interruption"
    room = device.memory_bytes
    verdict = "fits" if made.fits else "does not fit"
    rows["memory"] = (
        f"{page.gib_text(made.memory_bytes)} of {page.gib_text(room)} on the fullest"
        f" rank: {verdict} ({GUARD:.0%} must stay free)"
    )
    out.print(page.pairs(rows))
    if is_borrowed(made.software.name, device.fitted_as):
        out.print(f" no run of {made.software.name} on {device.name} was there to fit")
    times = {name: page.seconds_text(s) for name, s in made.parts.items()}
    step, title = made.step_seconds, "Where the time goes"
    out.print("", page.amounts(title, made.parts, times, step, out), sep="\n")
    held = {name: page.gib_text(b) for name, b in made.memory.items()}
    title = "Memory of the fullest rank, of its capacity"
    out.print("", page.amounts(title, made.memory, held, room, out), sep="\n")
    if asked.trace:
        out.print(f"\npipeline: {asked.trace}, for ui.perfetto.dev")


def words(plan: Plan) -> str:
    """A plan in one line."""
    degrees = {
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": plan.cp,
        "ep": plan.ep,
        "dp": plan.dp,
    }
    parts = [f"{name} {size}" for name, size in degrees.items() if size > 1] or [
        "1 device"
    ]
    parts[0] += " with sequence parallelism" * (plan.sequence_parallel and plan.tp > 1)
    if plan.pp > 1:
        chunks = f" of {plan.interleave} chunks" * (plan.interleave > 1)
        parts.append(plan.schedule + chunks)
    count = plan.micro_batches
    many = f"{count} micro-batch{'es' * (count > 1)}"
    parts.append(f"{many} of {plan.micro_batch}x{plan.seq:,}")
    parts.append(plan.precision)
    parts += [f"ZeRO {plan.zero}"] * (plan.zero > 0)
    parts += [f"{plan.recompute} recomputation"] * (plan.recompute != "none")
    return ", ".join(parts)


def write_trace(made: Estimate, path: Path) -> None:
    """Writes the replay of the pipeline of an estimate.

    Raises:
        ValueError: The file cannot be written, or the plan has no pipeline to replay.
    """
    events = pipeline_of(made).events()
    try:
        path.write_text(json.dumps({"traceEvents": events}))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
