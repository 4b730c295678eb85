"""Will it fit, on a cluster? Time and memory of a step, from the library's closed form.

The page runs `minitrain.simulate.step.step_seconds` and `footprint.rank_bytes`, which
`estimate` runs too, as JavaScript printed by `tojs`, on the same records of numbers.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tojs import to_js

from minitrain.simulate import bubbles, footprint, kernels, layer, network, step
from minitrain.simulate.estimate import GUARD, estimate, machine_records
from minitrain.simulate.hardware import ACCELERATORS, Cluster, cluster
from minitrain.simulate.plan import SCHEDULES, Plan
from minitrain.simulate.sizes import sizes
from minitrain.simulate.software import software
from minitrain.workload import formulas
from minitrain.workload.presets import PRESETS

DEVICES = ("A100", "H100", "H200", "B200", "GB200", "MI300X", "TPUv5p")
PRECISIONS = ("bf16", "fp8")
FRAMEWORKS = ("megatron-core", "fsdp")
HOSTS = 4096
"""Of the cluster whose records are printed; the page sets hosts and domain itself."""

MODELS = [name for name in PRESETS if not name.startswith(("tiny", "laptop"))]
ONE = Plan(seq=1, global_batch=1)
BUILDERS = ("chip", "wires", "ideal")
"""They make records, and do not calculate."""


def functions() -> list[Callable[..., Any]]:
    """Every closed form of a step, and what the page needs of the model's."""
    found: list[Callable[..., Any]] = [
        formulas.block_matrices,
        formulas.matmul_flops,
        formulas.attention_flops,
    ]
    for module in (kernels, network, bubbles, layer, step, footprint):
        found += [
            function
            for _, function in inspect.getmembers(module, inspect.isfunction)
            if function.__module__ == module.__name__
            and function.__name__ not in BUILDERS
        ]
    return found


def machines(name: str) -> Cluster:
    """A large cluster of one accelerator."""
    return cluster(f"{name}:{HOSTS}x{ACCELERATORS[name].per_host}")


def records(name: str, precision: str, framework: str) -> dict[str, Any]:
    """The numbers of hardware and software, as `estimate` has them."""
    where = machines(name)
    soft = software(framework, where.accelerator.name, precision)
    narrow, wide, links = machine_records(where, precision, soft)
    numbers = {k: v for k, v in asdict(soft).items() if k != "name"}
    return {
        "c": narrow._asdict(),
        "w": wide._asdict(),
        "n": links._asdict(),
        "soft": numbers,
        "interval": relative_interval(name, precision, framework),
    }


def relative_interval(name: str, precision: str, framework: str) -> list[float]:
    """The ends of the 80 % interval over the step, which no layout changes."""
    device = ACCELERATORS[name]
    plan = Plan(
        dp=device.per_host,
        seq=1024,
        global_batch=device.per_host,
        precision=precision,  # type: ignore[arg-type]
    )
    made = estimate(PRESETS["gpt2"], plan, f"{name}:1x{device.per_host}", framework)
    return [end / made.step_seconds for end in made.interval]


def device_numbers(name: str) -> dict[str, Any]:
    """What the page must know of an accelerator beside its records."""
    device = ACCELERATORS[name]
    return {
        "per_host": device.per_host,
        "scale_up_ranks": device.scale_up_ranks,
        "scale_up_hosts": device.scale_up_hosts,
        "memory_bytes": device.memory_bytes,
        "peak_flops": device.peak_flops["bf16"],
        "precisions": list(device.peak_flops),
    }


def tables() -> dict[str, Any]:
    """Every table of the page, by name."""
    pairs = [(n, p) for n in DEVICES for p in PRECISIONS]
    known = [(n, p) for n, p in pairs if p in ACCELERATORS[n].peak_flops]
    return {
        "MODELS": {n: asdict(sizes(PRESETS[n], ONE, 1)) for n in MODELS},
        "DEVICES": {name: device_numbers(name) for name in DEVICES},
        "FRAMEWORKS": FRAMEWORKS,
        "RECORDS": {
            f"{n} {p} {f}": records(n, p, f) for n, p in known for f in FRAMEWORKS
        },
        "PRECISIONS": PRECISIONS,
        "SCHEDULES": SCHEDULES,
        "PARTS": step.PARTS,
        "KINDS": footprint.KINDS,
        "GUARD": GUARD,
    }


def javascript() -> str:
    """One object `LAYOUT` with tables and functions; it adds no other name."""
    printed = functions()
    names = [*tables(), *(function.__name__ for function in printed)]
    lines = [f"const {name} = {json.dumps(t)};" for name, t in tables().items()]
    body = "\n".join([*lines, to_js(*printed), f"return {{ {', '.join(names)} }};"])
    return f"const LAYOUT = (() => {{\n{body}\n}})();"
