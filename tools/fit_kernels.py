"""Fit the constants of minitrain.simulate to measured kernels and collectives.

    python -m tools.fit_kernels DATA_FOLDER [--write minitrain/simulate/constants.py]

DATA_FOLDER holds `gemm_full.csv.gz` (columns gpu, dtype, m, n, k, latency_us) and
`microbench.csv.gz` (kind, gpu, op, dtype, n_gpus, n_nodes, m, n, k, batch, seq, heads,
kv_heads, head_dim, size_bytes, latency_us, busbw_GBs, efficiency, note, provenance).

Every fit minimises the relative error, outliers counting less (soft L1 of the
logarithm), with every constant between bounds, on a part of the points; the error is
stated on the others. The functions that are fitted are the library's own.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitrain.simulate import kernels
from minitrain.simulate.hardware import ACCELERATORS
from tools.fit_collectives import DEVICE, across, protocols
from tools.fitting import (
    Bound,
    Fit,
    Points,
    Rows,
    columns,
    fit,
    fit_error,
    read,
    rounded,
)

DATE = "2026-11-29"
ORIGIN = "ai-dynamo/aiconfigurator 095f58a5, Apache-2.0"
SIMUMAX = "MooreThreads/SimuMax v1.2, configs/system"
# ---- matrix products ----

PRODUCT = {
    "gemm_share": Bound(0.8, 0.3, 0.95),
    "gemm_small_share": Bound(0.8, 0.5, 1),
    "gemm_ramp": Bound(100, 0, 2000),
    "gemm_quantum": Bound(0.2, 0, 1),
    "gemm_padding": Bound(0.5, 0, 1),
    "gemm_heat": Bound(0.1, 0, 0.4),
    "gemm_memory_share": Bound(0.75, 0.3, 0.95),
    "launch_seconds": Bound(3e-6, 1e-6, 20e-6),
}
CAST = {
    "cast_seconds_per_element": Bound(2e-12, 0.3e-12, 10e-12),
    "cast_launch_seconds": Bound(10e-6, 1e-6, 20e-6),
}


def products(rows: Rows, device: str, precision: str) -> Fit:
    """Constants of products, of those that training meets: no side under 512.

    The measured fp8 products bring their left input to fp8 first; that is a term of its
    own. Errors are stated where all sides are at least 1,024.
    """
    size = columns(rows, ("m", "n", "k", "latency_us"))
    m, n, k, _ = size.T
    size = size[(m >= 64) & (n >= 512) & (k >= 512)]
    large = (size[:, :3] >= 1024).all(axis=1)
    chip = kernels.chip(ACCELERATORS[device], precision)
    narrow = precision == "fp8"
    launch = {"launch_seconds": Bound(3e-6, 2e-6, 5e-6)} if narrow else {}
    none = dict.fromkeys(CAST, 0.0)

    def model(constants: Mapping[str, float], asked: Any) -> np.ndarray:
        fitted = chip._replace(**{**none, **constants})
        cast = kernels.cast_seconds(fitted, asked[:, 0] * asked[:, 2])
        return kernels.gemm_seconds(fitted, *asked.T) + cast

    points = Points(size[:, :3], size[:, 3] * 1e-6, np.where(large, 1.0, 0.2))
    bounds = {**PRODUCT, **launch, **(CAST if narrow else {})}
    what = f"products, {device}, {precision}, all sides at least 1,024"
    found = fit(what, model, bounds, points, 0.1, ORIGIN, large)
    small = fit_error(model, found.constants, points, ~large)
    found.errors["mape_smaller_sides"] = small
    return Fit({**none, **found.constants}, found.errors)


def experts(row: Mapping[str, str]) -> float:
    """Number of products of a row of SimuMax's tables."""
    return float(re.findall(r"\bng=(\d+)", row["note"])[0])


def summed_seconds(chip: kernels.Chip, *sizes: float) -> float:
    """Of products whose output is added in fp32; groups come first, if given."""
    groups, m, n, k = (1.0, *sizes)[-4:]
    return float(kernels.product_seconds(chip, groups, m, n, k, kernels.SUM_BYTES))


KINDS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "matmul TN": ("forward", kernels.gemm_seconds),
    "matmul NN": ("dgrad_share", kernels.gemm_seconds),
    "matmul NT": ("wgrad_share", summed_seconds),
    "group_matmul fwd": ("grouped_share", kernels.batched_gemm_seconds),
    "group_matmul bwd_grad_act": ("grouped_share", kernels.batched_gemm_seconds),
    "group_matmul bwd_grad_w": ("grouped_wgrad_share", summed_seconds),
}
"""SimuMax's operators: the share they tell of, and what they are priced as."""


def product_shares(
    rows: Rows, fitted: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Speed of other products, of the forward product of that size, by family.

    SimuMax's tables hold layout TN for forward, NN for the input's gradient and NT for
    the weight's, which is added in fp32, and products of experts. Medians of measured
    by modelled time; the model's own error drops out. Of the backward products the mean
    over devices; H100, which was not measured, has the mean of both throughout.

    Args:
        rows: Of the tables.
        fitted: Constants of products, by family.
    """
    late: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["op"] not in KINDS or row["dtype"] != "bf16":
            continue
        kind, price = KINDS[row["op"]]
        device = ACCELERATORS[DEVICE[row["gpu"]]]
        chip = kernels.chip(device, "bf16")._replace(**fitted[device.family])
        sizes = [float(row[side]) for side in ("m", "n", "k")]
        groups = [experts(row)] if "group" in row["op"] else []
        flops = 2 * float(np.prod([*groups, *sizes]))
        measured = flops / (float(row["efficiency"]) * chip.flops)
        modelled = float(price(chip, *groups, *sizes))
        late.setdefault((device.family, kind), []).append(measured / modelled)
    median = {key: float(np.median(ratios)) for key, ratios in late.items()}
    kinds = ("dgrad_share", "wgrad_share", "grouped_share", "grouped_wgrad_share")
    shares = {
        family: {k: median[family, "forward"] / median[family, k] for k in kinds}
        for family in ("A100", "B200")
    }
    mean = {k: float(np.mean([shares[f][k] for f in shares])) for k in kinds}
    shares = {f: {**own, **dict(list(mean.items())[:2])} for f, own in shares.items()}
    shares["H100"] = shares["H200"] = mean
    return {
        family: {k: rounded(min(x, 1.0)) for k, x in own.items()}
        for family, own in shares.items()
    }


# ---- attention ----

FORWARD = {
    "flash_share": Bound(0.6, 0.2, 0.9),
    "flash_ramp": Bound(200, 0, 1500),
    "flash_tail": Bound(0.6, 0, 2),
    "flash_launch_seconds": Bound(8e-6, 2e-6, 30e-6),
    "cache": Bound(4e-12, 0, 20e-12),
}
BACKWARD = {
    "flash_backward_share": Bound(0.5, 0.2, 0.9),
    "flash_backward_tail": Bound(0.6, 0, 2),
}


def attention(rows: Rows, device: str) -> Fit:
    """Constants of the forward pass, causal, width 128.

    What serving software does besides, writing keys and values into its cache, is a
    term in proportion to these; it is fitted and left out.
    """
    size = columns(rows, ("batch", "seq", "heads", "kv_heads", "latency_us"))
    size[:, 3] = np.where(size[:, 3] == 0, size[:, 2], size[:, 3])
    chip = kernels.chip(ACCELERATORS[device], "bf16")

    def model(constants: Mapping[str, float], asked: Any) -> np.ndarray:
        fitted = {k: v for k, v in constants.items() if k != "cache"}
        b, s, h, kv = asked.T
        seconds = kernels.attention_seconds(
            chip._replace(**fitted), b, h, kv, s, s, 128, 1, 0
        )
        return seconds + constants["cache"] * b * s * kv * 128

    points = Points(size[:, :4], size[:, 4] * 1e-6, np.ones(len(size)))
    what = f"attention forward, {device}"
    found = fit(what, model, FORWARD, points, 0.5, ORIGIN)
    found.constants.pop("cache")
    return found


def attention_pass(rows: Rows, device: str, op: str, fixed: Mapping[str, float]) -> Fit:
    """Constants of one pass from SimuMax's tables, whose FLOPs are those of all scores.

    Args:
        rows: Of the tables.
        device: Of the rows that are taken.
        op: `sdp_fwd` or `sdp_bwd`.
        fixed: Constants that are known.
    """
    some = [r for r in rows if r["op"] == op and DEVICE[r["gpu"]] == device]
    some = [r for r in some if "qk_head_dim=128" in r["note"]]
    size = columns(some, ("batch", "seq", "heads", "kv_heads", "efficiency"))
    size[:, 3] = np.maximum(size[:, 3], 1)
    chip = kernels.chip(ACCELERATORS[device], "bf16")._replace(**fixed)
    backward = float(op == "sdp_bwd")
    bounds = {k: v for k, v in FORWARD.items() if k != "cache" and k not in fixed}
    if backward:
        bounds = BACKWARD

    def model(constants: Mapping[str, float], asked: Any) -> np.ndarray:
        b, s, h, kv = asked.T
        fitted = chip._replace(**constants)
        return kernels.attention_seconds(fitted, b, h, kv, s, s, 128, 1, backward)

    b, s, h = size[:, 0], size[:, 1], size[:, 2]
    flops = 4 * b * h * s**2 * 128 * (2.5 if backward else 1.0)
    seconds = flops / (size[:, 4] * chip.attention_flops)
    points = Points(size[:, :4], seconds, np.ones(len(size)))
    what = f"attention {'backward' if backward else 'forward'}, {device}"
    return fit(what, model, bounds, points, 0.5, SIMUMAX)


def all_attention(rows: Rows) -> tuple[dict[str, dict[str, float]], list[dict]]:
    """Constants of both passes by family, and the errors.

    The backward pass of H100 was not measured: it has the ratio to the forward pass
    that A100 has.
    """
    errors, constants = [], {}
    for family, forward, backward in (
        ("A100", attention(rows_of(rows, "A100", "causal"), "A100"), "A100-PCIe"),
        ("H100", attention(rows_of(rows, "H100", "causal"), "H100"), ""),
        ("B200", attention_pass(rows, "B200", "sdp_fwd", {}), "B200"),
    ):
        errors.append(forward.errors)
        constants[family] = dict(forward.constants)
        if backward:
            back = attention_pass(rows, backward, "sdp_bwd", forward.constants)
            errors.append(back.errors)
            constants[family] |= back.constants
    first, second = constants["A100"], constants["H100"]
    for name in ("share", "tail"):
        ratio = first[f"flash_backward_{name}"] / first[f"flash_{name}"]
        second[f"flash_backward_{name}"] = rounded(ratio * second[f"flash_{name}"])
    return constants, errors


def rows_of(rows: Rows, device: str, op: str) -> Rows:
    """Rows of a device whose operator begins so."""
    return [
        r for r in rows if r["op"].startswith(op) and DEVICE.get(r["gpu"]) == device
    ]


# ---- the file ----


def fit_all(folder: Path) -> tuple[dict[str, Any], list[dict]]:
    """All constants, by the name of their table, and the errors of all fits."""
    gemms, micro = read(folder / "gemm_full.csv.gz"), read(folder / "microbench.csv.gz")
    table: dict[Any, dict[str, float]] = {}
    errors = []
    for device, precision, dtype in (
        ("A100", "bf16", "bfloat16"),
        ("H100", "bf16", "bfloat16"),
        ("H200", "bf16", "bfloat16"),
        ("B200", "bf16", "bfloat16"),
        ("H100", "fp8", "fp8"),
        ("B200", "fp8", "fp8"),
    ):
        some = [g for g in gemms if DEVICE[g["gpu"]] == device and g["dtype"] == dtype]
        found = products(some, device, precision)
        table[device, precision] = found.constants
        errors.append(found.errors)
    plain = {device: c for (device, p), c in table.items() if p == "bf16"}
    shares = product_shares(micro, plain)
    table = {key: {**constants, **shares[key[0]]} for key, constants in table.items()}
    flash, more = all_attention(micro)
    errors += more
    wires = {}
    for family, devices in (
        ("A100", ["A100"]),
        ("H100", ["H100", "H200"]),
        ("B200", ["B200", "B300", "GB200"]),
    ):
        found = protocols(micro, devices)
        none = (
            {} if family != "A100" else {"nvls_start_seconds": 0.0, "nvls_share": 1.0}
        )
        wires[family] = {**found.constants, **none}
        errors.append(found.errors)
    far = across(micro, wires)
    errors.append(far.errors)
    tables = {
        "PRODUCTS": table,
        "ATTENTION": flash,
        "PROTOCOLS": wires,
        "ACROSS": far.constants,
    }
    return tables, errors


HEAD = """Fitted constants and their errors, printed by tools/fit_kernels.py.

Relative errors in per cent: `mape_fitted` on the points that were fitted, and
`mape_held_out` on the others. Seconds, and shares of what a data sheet promises.
"""
MEANING = {
    "PRODUCTS": "Of matrix products, by family and precision; see `kernels.Chip`.",
    "ATTENTION": "Of attention kernels, by family; see `kernels.Chip`.",
    "PROTOCOLS": "Of collectives inside a domain, by family; see `network.Wires`.",
    "ACROSS": "Of collectives across domains; see `network.Wires`.",
}


def source(tables: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> str:
    """The text of the module of constants."""
    quotes = '"' * 3
    lines = [f"{quotes}{HEAD}{quotes}", "", f'DATE = "{DATE}"', ""]
    for name, table in tables.items():
        lines += [f"{name} = {table!r}", f"{quotes}{MEANING[name]}{quotes}", ""]
    lines += [f"ERRORS = {tuple(dict(e) for e in errors)!r}"]
    lines += [f"{quotes}What was fitted to what, and how well.{quotes}", ""]
    return "\n".join(lines)


def main() -> None:
    """Fit, and print or write the module; `ruff format` lays it out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text = source(*fit_all(arguments.folder))
    if arguments.write:
        arguments.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
