"""The fit finds constants that are known, and says when there are none to find."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from minitrain.simulate import constants, kernels, network  # noqa: E402
from minitrain.simulate.hardware import ACCELERATORS, cluster  # noqa: E402
from tools import fit_collectives, fit_kernels  # noqa: E402
from tools.fitting import Bound, Points, fit  # noqa: E402

NOISE = 0.02


def noisy(seconds, seed=0):
    """Times as a machine would give them, in microseconds."""
    rng = np.random.default_rng(seed)
    return 1e6 * seconds * np.exp(NOISE * rng.standard_normal(np.shape(seconds)))


def table(names, *columns):
    """Rows as a table gives them: words."""
    return [
        {name: str(value) for name, value in zip(names, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]


def test_a_line_is_found_within_its_bounds():
    x = np.linspace(1, 100, 200)
    points = Points(x, 3 + 2 * x, np.ones(200))

    def line(c, asked):
        return c["a"] + c["b"] * asked

    bounds = {"a": Bound(1, 0, 10), "b": Bound(1, 0, 10)}
    found = fit("line", line, bounds, points, 0.5, "here")
    assert found.constants == pytest.approx({"a": 3, "b": 2}, rel=1e-2)
    assert found.errors["mape_held_out"] < 0.1
    assert (found.errors["points"], found.errors["origin"]) == (200, "here")
    bounds["b"] = Bound(0.5, 0, 1)
    found = fit("bounded", line, bounds, points, 0.5, "here")
    assert found.constants["b"] <= 1 and found.errors["mape_held_out"] > 20


# ---- products ----

KNOWN = {
    "gemm_share": 0.72,
    "gemm_small_share": 0.7,
    "gemm_ramp": 250.0,
    "gemm_quantum": 0.4,
    "gemm_padding": 0.6,
    "gemm_heat": 0.2,
    "gemm_memory_share": 0.7,
    "launch_seconds": 4e-6,
}
CASTS = {"cast_seconds_per_element": 2e-12, "cast_launch_seconds": 9e-6}


def measured_products(precision, factor=1.0):
    rng = np.random.default_rng(1)
    m, n, k = 2.0 ** rng.integers(9, 15, (3, 3000)) + 128 * rng.integers(
        0, 9, (3, 3000)
    )
    m[:500] /= 8
    chip = kernels.chip(ACCELERATORS["H100"], precision)._replace(**KNOWN)
    seconds = kernels.gemm_seconds(chip, m, n, k)
    if precision == "fp8":
        seconds += kernels.cast_seconds(chip._replace(**CASTS), m * k)
    return table(("m", "n", "k", "latency_us"), m, n, k, factor * noisy(seconds))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_constants_of_products_are_found(precision):
    found = fit_kernels.products(measured_products(precision), "H100", precision)
    assert found.errors["mape_held_out"] < 1.3 * 100 * NOISE
    for name in ("gemm_share", "gemm_memory_share"):
        assert found.constants[name] == pytest.approx(KNOWN[name], rel=0.06)
    if precision == "fp8":
        cast = found.constants["cast_seconds_per_element"]
        assert cast == pytest.approx(CASTS["cast_seconds_per_element"], rel=0.06)
    else:
        assert found.constants["cast_seconds_per_element"] == 0


def test_a_slip_of_a_unit_cannot_be_fitted_away():
    for factor in (1e3, 1e-3, 8):
        found = fit_kernels.products(measured_products("bf16", factor), "H100", "bf16")
        assert found.errors["mape_held_out"] > 30


# ---- attention ----


def test_constants_of_attention_are_found_beside_what_serving_does():
    rng = np.random.default_rng(2)
    b, h = 2.0 ** rng.integers(0, 5, 1500), 2.0 ** rng.integers(0, 6, 1500)
    s, kv = 1024.0 * rng.integers(1, 16, 1500), np.minimum(h, 4.0)
    known = {
        "flash_share": 0.55,
        "flash_ramp": 300.0,
        "flash_tail": 0.9,
        "flash_launch_seconds": 9e-6,
    }
    chip = kernels.chip(ACCELERATORS["H100"], "bf16")._replace(**known)
    seconds = kernels.attention_seconds(chip, b, h, kv, s, s, 128, 1, 0)
    seconds = seconds + 5e-12 * b * s * kv * 128
    names = ("batch", "seq", "heads", "kv_heads", "latency_us")
    found = fit_kernels.attention(table(names, b, s, h, kv, noisy(seconds)), "H100")
    assert found.constants == pytest.approx(known, rel=0.1)


# ---- collectives ----


def test_constants_of_collectives_are_found():
    wires = network.wires(cluster("h100:1x8"))
    known = {"all_gather_share": 0.7, "nvls_share": 0.5, "lone": 0.3}
    wires = wires._replace(**known)
    rows = []
    for name, price in fit_collectives.COLLECTIVES.items():
        for ranks in (2, 4, 6, 8):
            sizes = 2.0 ** np.arange(16, 33, 0.5)
            seconds = price(wires, sizes, ranks, ranks)
            names = ("size_bytes", "latency_us")
            same = {"op": name, "gpu": "H100-SXM-80G", "n_gpus": ranks, "n_nodes": 1}
            same |= {"provenance": "here"}
            seed = len(rows)
            rows += [r | same for r in table(names, sizes, noisy(seconds, seed))]
    found = fit_collectives.protocols(rows, ["H100"])
    assert found.errors["mape_held_out"] < 1.5 * 100 * NOISE
    assert found.constants["nvls_share"] == pytest.approx(0.5, rel=0.05)
    for name in ("all_gather", "all_reduce", "all_to_all"):
        price = network.__dict__[f"{name}_seconds"]
        fitted = wires._replace(**found.constants)
        assert price(fitted, 1e9, 8, 8) == pytest.approx(
            price(wires, 1e9, 8, 8), rel=0.05
        )


def test_a_bandwidth_gives_the_time_that_it_was_computed_from():
    row = {"latency_us": "", "n_gpus": "8", "size_bytes": "1e9", "busbw_GBs": "350"}
    assert fit_collectives.measured_seconds(row) == pytest.approx(1.75 / 350)
    row["latency_us"] = "7.5"
    assert fit_collectives.measured_seconds(row) == pytest.approx(7.5e-6)


# ---- the module that is printed ----


def test_the_printed_module_gives_the_tables_back():
    tables = {
        name: getattr(constants, name)
        for name in ("PRODUCTS", "ATTENTION", "PROTOCOLS", "ACROSS")
    }
    printed: dict = {}
    exec(fit_kernels.source(tables, constants.ERRORS), printed)
    assert {name: printed[name] for name in tables} == tables
    assert printed["ERRORS"] == constants.ERRORS
    assert printed["__doc__"] == constants.__doc__


def test_fitted_constants_lie_within_their_bounds():
    bounds = {**fit_kernels.PRODUCT, **fit_kernels.FORWARD, **fit_kernels.BACKWARD}
    bounds |= {**fit_collectives.protocol_bounds(True), **fit_collectives.ACROSS}
    tables = (constants.PRODUCTS, constants.ATTENTION, constants.PROTOCOLS)
    rows = [row for table in tables for row in table.values()]
    for row in [*rows, constants.ACROSS]:
        for name, value in row.items():
            if name in bounds and not (name.startswith("nvls") and value in (0, 1)):
                assert bounds[name].low <= value <= bounds[name].high, name
