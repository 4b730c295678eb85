"""Fit the few residuals of a framework on whole steps: `fit_steps.py DATA_FOLDER`.

DATA_FOLDER holds `calibration.csv`, a table of published runs (the columns of
`minitrain.simulate.published`), `stage_times.csv`, measured stages of a pipeline, and
`validation.csv`, of which only the 1F1B rows of zero-bubble schedules are used. For
each framework, accelerator and precision at most four numbers are fitted, each within
`BOUNDS`, and each drawn towards what it is without a fit. Prints `residuals.py`.
"""

from __future__ import annotations

import csv
import datetime
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from minitrain.simulate import step
from minitrain.simulate.estimate import machine_records
from minitrain.simulate.hardware import cluster
from minitrain.simulate.plan import Plan
from minitrain.simulate.published import RefusedError, Run, read_run
from minitrain.simulate.residuals import BOUNDS
from minitrain.simulate.sizes import sizes
from minitrain.simulate.software import SOFTWARE, Software
from minitrain.simulate.validation import MEMORY, predict
from minitrain.workload.config import ModelConfig

WIDTH = {
    "gemm_share": 0.10,
    "traffic": 0.5,
    "launch_seconds": 5e-6,
    "network_share": 0.25,
    "inside_share": 0.25,
    "tensor_hidden": 0.25,
}
"""How far a residual may stray for the price of an error of `SPREAD` in one row."""
SPREAD = 0.04

Key = tuple[str, str, str]


def main(folder: str) -> None:
    """Fit and print."""
    print(HEAD.format(date=datetime.date.today().isoformat()))
    for name, (low, high) in BOUNDS.items():
        print(f'        "{name}": ({low}, {high}),')
    print(MIDDLE)
    done: dict[Key, Software] = {}
    for key, runs in sorted(read_groups(Path(folder)).items()):
        rules = done.get((*key[:2], "bf16"), SOFTWARE[key[0]])
        narrow = float(key[2] == "fp8")
        rules = replace(SOFTWARE[key[0]], narrow=1.0) if narrow else rules
        names = names_of(key, runs)
        done[key] = print_group(key, rules, _steps(runs), names, len(runs))
    stages = list(csv.DictReader((Path(folder) / "stage_times.csv").open()))
    key = ("megatron-flash", "A100", "bf16")
    count = sum(row["method"] == "base" for row in stages)
    print_group(key, SOFTWARE[key[0]], _stages(stages), STAGES, count)
    print(TAIL)


def read_groups(folder: Path) -> dict[Key, list[Run]]:
    """Runs of a step's time, by framework, accelerator and precision."""
    groups: dict[Key, list[Run]] = defaultdict(list)
    for name in ("calibration.csv", "validation.csv"):
        for row in csv.DictReader((folder / name).open()):
            try:
                run = read_run(row)
            except RefusedError:
                continue
            plain = run.source == "zb-t4" and run.plan.schedule == "1f1b"
            if run.experts:
                continue
            if run.quantity in MEMORY or (name == "validation.csv" and not plain):
                continue
            kind = "fp8" if run.plan.precision in ("fp8", "fp4") else "bf16"
            device = run.cluster.accelerator.name
            groups[str(run.software), device, run.fabric or kind].append(run)
    return groups


def names_of(key: Key, runs: Sequence[Run]) -> tuple[str, ...]:
    """Which residuals the runs of a group can tell of."""
    software, _, kind = key
    if kind not in ("bf16", "fp8"):
        return "network_share", "inside_share"
    if software == "megatron-zb":
        return "gemm_share", "traffic", "loss_bytes"
    if len(runs) < 4:
        return ("gemm_share",)
    if software == "megatron-deepspeed":
        return "gemm_share", "traffic"
    if software == "internevo":
        return "gemm_share", "network_share"
    return "gemm_share", "traffic", "network_share", "tensor_hidden"


def _steps(runs: Sequence[Run]) -> Callable[[Software], np.ndarray]:
    """Errors of whole steps: logarithms of predicted over reported time."""
    found = [predict(run) for run in runs]
    fixed = [
        replace(p.run, plan=p.estimate.plan, choices=[]) for p in found
    ]  # the same plan throughout a fit

    def errors(soft: Software) -> np.ndarray:
        made = [predict(replace(run, software=soft)) for run in fixed]
        return np.array([math.log1p(p.error) for p in made])

    return errors


STAGES = ("gemm_share", "traffic", "traffic_backward", "loss_bytes")


def _stages(rows: Sequence[dict[str, str]]) -> Callable[[Software], np.ndarray]:
    """Errors of measured stages, forward and backward: middle ones, and the last."""
    table: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row["method"] == "base":
            table[row["experiment"]].append(row)

    def errors(soft: Software) -> np.ndarray:
        return np.concatenate([_stage(stage, soft) for stage in table.values()])

    return errors


def _stage(rows: Sequence[dict[str, str]], soft: Software) -> np.ndarray:
    first = {k: int(rows[0][k]) for k in ("vocab", "seq", "hidden", "heads", "layers")}
    model = ModelConfig(
        vocab_size=first["vocab"],
        layers=first["layers"],
        hidden=first["hidden"],
        heads=first["heads"],
        max_seq=first["seq"],
        activation="gelu",
        norm="layer",
        positions="learned",
    )
    plan = Plan(seq=first["seq"], global_batch=len(rows), pp=len(rows))
    machine = cluster(f"a100:1x{len(rows)}")
    s = sizes(model, plan, 1)
    c, w, n = machine_records(machine, "bf16", soft)
    each = model.layers / len(rows)
    f = each * sum(step.block_forward(s, c, w, n, soft))
    b = each * sum(step.block_backward(s, c, w, n, soft))
    head_f, head_b = step.head_seconds(s, w, soft)
    seen_f = np.array([int(r["F_us"]) * 1e-6 for r in rows])
    seen_b = np.array([int(r["B_us"]) * 1e-6 for r in rows])
    pairs = [
        (f, seen_f[1:-1].mean()),
        (b, seen_b[1:-1].mean()),
        (f + head_f, seen_f[-1]),
        (b + head_b, seen_b[-1]),
    ]
    return np.array([math.log(made / seen) for made, seen in pairs])


def _with(rules: Software, names: Sequence[str], x: np.ndarray) -> Software:
    values: dict[str, Any] = dict(zip(names, map(float, x), strict=True))
    return replace(rules, **values)


def print_group(
    key: Key,
    rules: Software,
    errors: Callable[[Software], np.ndarray],
    names: Sequence[str],
    count: int,
) -> Software:
    """Fit one group, from these rules, print its line, and return what came out."""
    usual = np.array([getattr(rules, name) for name in names])
    widths = np.array(
        [WIDTH.get(name, 0.5 * u) for name, u in zip(names, usual, strict=True)]
    )
    low = np.array([BOUNDS[n][0] for n in names])
    high = np.array([BOUNDS[n][1] for n in names])

    def cost(x: np.ndarray) -> np.ndarray:
        soft = _with(rules, names, x)
        return np.concatenate([errors(soft) / SPREAD, (x - usual) / widths])

    start = np.clip(usual, low + 1e-9, high - 1e-9)
    fit = least_squares(cost, start, bounds=(low, high), x_scale=widths, diff_step=1e-3)
    soft = _with(rules, names, fit.x)
    left = errors(soft)
    before = errors(rules)
    print(f"        {key!r}: {{")
    for name, value in zip(names, fit.x, strict=True):
        print(f'            "{name}": {value:.3g},')
    print("        },")
    print(
        f"        # {count} rows, {100 * np.abs(np.expm1(left)).mean():.1f} % left of"
        f" {100 * np.abs(np.expm1(before)).mean():.1f} %"
    )
    return soft


HEAD = '''"""The few numbers that were fitted on whole steps, and the bounds of each.

Printed on {date} by `tools/fit_steps.py`. Of the runs that a chapter holds against
the predictions only two kinds were seen: the 1F1B rows of zero-bubble schedules, and
single stages of the runs with a spread vocabulary. Each line says on how many rows, and
what error was left. A residual at a bound says that the form lacks something there.
"""

from collections.abc import Mapping
from types import MappingProxyType

BOUNDS = MappingProxyType(
    {{'''
MIDDLE = '''    }
)
"""Between which values a residual may be fitted."""

RESIDUALS: Mapping[tuple[str, str, str], Mapping[str, float]] = MappingProxyType(
    {'''
TAIL = '''    }
)
"""By framework, accelerator, and precision of products or kind of network."""'''

if __name__ == "__main__":
    main(sys.argv[1])
