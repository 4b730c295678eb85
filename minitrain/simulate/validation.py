"""Held against what others measured: predictions of published runs, and their errors.

Every row is predicted or refused with a reason. Errors are of time (of a step, or of
what the source printed turned into one), predicted over reported; of memory, bytes over
bytes. Beside them stands the baseline that any simulator must beat: one utilization for
each source, accelerator and precision, the median of its own rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minitrain.simulate.estimate import Estimate, estimate, flops
from minitrain.simulate.plan import Plan
from minitrain.simulate.published import RefusedError, Row, Run, read_run, source_of
from minitrain.simulate.software import software as find_software
from minitrain.workload import formulas
from minitrain.workload.config import ModelConfig

GIB = 2**30


@dataclass
class Prediction:
    """One row: what was reported, and what is predicted, in the source's unit."""

    run: Run
    estimate: Estimate
    reported: float
    predicted: float
    interval: tuple[float, float]
    kind: str

    @property
    def ratio(self) -> float:
        """Predicted time (or bytes) over the reported one."""
        if self.run.quantity in RATES:
            return self.reported / self.predicted
        return self.predicted / self.reported

    @property
    def error(self) -> float:
        """The same, less one."""
        return self.ratio - 1

    @property
    def covered(self) -> bool:
        """Whether the reported value lies in the interval."""
        low, high = self.interval
        return low <= self.reported <= high


@dataclass
class Report:
    """Predictions of a table of runs.

    Attributes:
        sources: Statistics by source, `{"rows":, "predicted":, "mape":, "bias":,
            "p90":, "coverage":, "tau":, "baseline_mape":}`; in per cent but for the
            counts, coverage and tau, and None where there is nothing to say. Rows of
            memory are apart, as `source (memory)`.
        rows: One record for each row of the table.
        refusals: How often each reason was given, by source.
        predictions: What was predicted.
    """

    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    refusals: dict[str, dict[str, int]] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)


RATES = (
    "tokens_per_second_per_device",
    "tokens_per_second",
    "samples_per_second",
    "tflops",
    "mfu_percent",
    "hfu_percent",
)
"""Quantities that are larger where a step is shorter."""

MEMORY = ("memory_gb", "activation_gib", "state_gib")


def validate(
    rows: Iterable[Row], progress: Callable[[int, int], None] | None = None
) -> Report:
    """Predict every row of a table of published runs.

    Args:
        rows: Records with the columns of `published.COLUMNS`, all text.
        progress: Called after each row with the number done and of all.
    """
    table = list(rows)
    report = Report()
    for number, row in enumerate(table, 1):
        source = source_of(row)
        record: dict[str, Any] = {"source_id": source, "model": row.get("model", "")}
        record["quantity"] = row.get("measured_quantity", "")
        record["reported"] = row.get("value", "")
        try:
            made = predict(read_run(row))
        except (RefusedError, ValueError) as error:
            record["refused"] = str(error)
            reasons = report.refusals.setdefault(source, {})
            reasons[str(error)] = reasons.get(str(error), 0) + 1
        else:
            report.predictions.append(made)
            record |= _record(made)
        report.rows.append(record)
        if progress:
            progress(number, len(table))
    report.sources = _sources(report)
    return report


def predict(run: Run) -> Prediction:
    """Predict one run; where the source took the best of several plans, the fastest.

    Raises:
        ValueError: No plan of the run is possible.
    """
    plans = run.choices or [run.plan]
    soft = run.software
    if isinstance(soft, str):
        name, precision = run.cluster.accelerator.fitted_as, run.plan.precision
        soft = find_software(soft, name, precision, run.fabric)
    made = [estimate(run.model, p, run.cluster, soft, run.experts) for p in plans]
    fitting = [e for e in made if e.memory_bytes <= e.cluster.accelerator.memory_bytes]
    best = min(fitting or made, key=lambda e: e.step_seconds)
    value, low, high = quantity(run, best)
    kind = "memory" if run.quantity in MEMORY else "time"
    return Prediction(run, best, run.value, value, (low, high), kind)


def quantity(run: Run, made: Estimate) -> tuple[float, float, float]:
    """What the source printed, as predicted, and its interval."""
    name = run.quantity
    if name in MEMORY:
        value = _memory(run, made)
        return value, value * (1 - MEMORY_WIDTH), value * (1 + MEMORY_WIDTH)
    if name in ("layer_forward_ms", "layer_backward_ms"):
        seconds = made.forward_seconds
        if name == "layer_backward_ms":
            seconds = made.block_backward_seconds
        wide = (made.interval[1] - made.interval[0]) / 2 / made.step_seconds
        return seconds * 1e3, seconds * 1e3 * (1 - wide), seconds * 1e3 * (1 + wide)

    def printed(seconds: float) -> float:
        return _printed(run, made, seconds)

    low, high = (printed(t) for t in made.interval)
    return printed(made.step_seconds), min(low, high), max(low, high)


MEMORY_WIDTH = 0.06
"""Half of the 80 % interval of memory, relative."""


def _memory(run: Run, made: Estimate) -> float:
    kinds = made.memory
    if run.quantity == "activation_gib":
        return made.block_activation_bytes / GIB
    if run.quantity == "state_gib":
        return made.block_state_bytes / GIB
    return sum(kinds.values()) / GIB


def _printed(run: Run, made: Estimate, seconds: float) -> float:
    plan, devices = made.plan, made.cluster.world_size
    tokens = plan.global_batch * plan.seq
    hardware = run.flops_count == "hardware" or run.quantity == "hfu_percent"
    work = flops(run.model, run.experts, plan, hardware)
    if run.flops_count == "causal":
        work -= causal_saving(run.model, plan)
    peak = made.cluster.accelerator.peak_flops
    peak_flops = peak.get("bf16", peak.get("fp16", math.nan))
    return {
        "step_seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / devices,
        "tokens_per_second": tokens / seconds,
        "samples_per_second": plan.global_batch / seconds,
        "tflops": work / seconds / devices / 1e12,
        "mfu_percent": 100 * work / seconds / devices / peak_flops,
        "hfu_percent": 100 * work / seconds / devices / peak_flops,
    }[run.quantity]


def causal_saving(model: ModelConfig, plan: Plan) -> float:
    """Half of attention's operations, forward and backward."""
    core = formulas.attention_flops(
        plan.global_batch, plan.seq, model.heads, model.head_dim
    )
    return 1.5 * core * model.layers


def _record(made: Prediction) -> dict[str, Any]:
    plan = made.estimate.plan
    return {
        "predicted": made.predicted,
        "low": made.interval[0],
        "high": made.interval[1],
        "error_percent": 100 * made.error,
        "software": made.estimate.software.name,
        "plan": str(plan),
        "assumed": "; ".join(made.run.assumed),
    }


# Statistics


def _sources(report: Report) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Prediction]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for row in report.rows:
        memory = "memory" in str(row["quantity"]).lower()
        counts[_name(row["source_id"], memory)] += 1
    for made in report.predictions:
        groups[_name(made.run.source, made.kind == "memory")].append(made)
    return {
        name: statistics(groups[name], count) for name, count in sorted(counts.items())
    }


def _name(source: str, memory: bool) -> str:
    return f"{source} (memory)" if memory else source


def statistics(made: Sequence[Prediction], rows: int | None = None) -> dict[str, Any]:
    """Errors of predictions, as `Report.sources` has them."""
    errors = [p.error for p in made]
    sizes = sorted(map(abs, errors))
    n = len(sizes)
    return {
        "rows": n if rows is None else rows,
        "predicted": n,
        "mape": 100 * sum(sizes) / n if n else None,
        "bias": 100 * sum(errors) / n if n else None,
        "p90": 100 * sizes[math.ceil(0.9 * n) - 1] if n else None,
        "coverage": sum(p.covered for p in made) / n if n else None,
        "tau": ranking(made),
        "baseline_mape": baseline(made),
    }


def ranking(made: Sequence[Prediction]) -> float | None:
    """Kendall's tau of the order of layouts, within runs of the same model.

    Pairs of one source, model, sequence, accelerator and number of devices, whose plans
    or schedules differ; by time for a token. Ties in the reports are left out.
    """
    groups: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for p in made:
        if p.kind == "memory" or p.run.quantity.startswith("layer"):
            continue
        e = p.estimate
        where = (e.cluster.accelerator.name, e.cluster.world_size)
        key = (p.run.source, e.model, e.plan.seq, e.plan.precision, where)
        tokens = e.plan.global_batch * e.plan.seq
        predicted = e.step_seconds / tokens
        groups[key].append((predicted, predicted / p.ratio))
    agree = disagree = 0
    for pairs in groups.values():
        for i, (a, x) in enumerate(pairs):
            for b, y in pairs[:i]:
                sign = (a - b) * (x - y)
                agree += sign > 0
                disagree += sign < 0
    return (agree - disagree) / (agree + disagree) if agree + disagree else None


def baseline(made: Sequence[Prediction]) -> float | None:
    """MAPE, in per cent, of one constant utilization for each group.

    A group is a source's runs on one accelerator at one precision; the constant is the
    median of what the reports imply, recomputation counted.
    """
    groups: dict[tuple, list[float]] = defaultdict(list)
    for p in made:
        if p.kind == "memory" or p.run.quantity.startswith("layer"):
            continue
        e = p.estimate
        seconds = e.step_seconds / p.ratio
        work = flops(e.model, e.experts, e.plan, hardware=True)
        key = (e.cluster.accelerator.name, e.plan.precision)
        groups[key].append(work / seconds / e.cluster.world_size)
    errors: list[float] = []
    for rates in groups.values():
        middle = sorted(rates)[len(rates) // 2]
        errors += [abs(rate / middle - 1) for rate in rates]
    return 100 * sum(errors) / len(errors) if errors else None
