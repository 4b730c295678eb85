"""The fit of collectives, for tools/fit_kernels.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minitrain.simulate import network
from minitrain.simulate.hardware import ACCELERATORS, cluster
from tools.fitting import Bound, Fit, Points, Rows, fit

NCCL = "aiconfigurator 095f58a5; vTrain f8dda84; stas00/ml-engineering"
COREWEAVE = "coreweave/nccl-tests: 8 hosts of H100; 1, 2 and 20 racks of GB200"
DEVICE = {
    "A100-SXM-80G": "A100",
    "A100-SXM4": "A100",
    "A100-PCIe-80G": "A100-PCIe",
    "H100-SXM-80G": "H100",
    "H200": "H200",
    "B200": "B200",
    "B300": "B300",
    "GB200": "GB200",
}
"""Names in the tables, and ours."""
COLLECTIVES = {
    "all_reduce": network.all_reduce_seconds,
    "all_gather": network.all_gather_seconds,
    "reduce_scatter": network.reduce_scatter_seconds,
    "alltoall": network.all_to_all_seconds,
}


def protocol_bounds(adding: bool) -> dict[str, Bound]:
    """Of the constants of collectives inside a domain."""
    bounds = {
        "low_share": Bound(0.25, 0.02, 1),
        "middle_share": Bound(0.8, 0.1, 1),
        "middle_start": Bound(0.4, 0, 1),
        "lone": Bound(0.5, 0, 0.95),
        "lone_all_to_all": Bound(0.3, 0, 0.95),
    }
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        bounds |= {
            f"{name}_base_seconds": Bound(8e-6, 1e-6, 40e-6),
            f"{name}_step_seconds": Bound(0.8e-6, 0, 4e-6),
            f"{name}_start_seconds": Bound(30e-6, 0, 200e-6),
            f"{name}_share": Bound(0.75, 0.3, 1),
        }
    if adding:
        bounds["nvls_start_seconds"] = Bound(30e-6, 0, 200e-6)
        bounds["nvls_share"] = Bound(0.55, 0.2, 1)
    return bounds


def protocols(rows: Rows, devices: Sequence[str]) -> Fit:
    """Constants inside one domain, of messages from 64 KiB; half of the points fitted.

    The many points of vTrain, of one collective, count less than the others.
    """
    asked, seconds, weight = [], [], []
    names = list(COLLECTIVES)
    for row in rows:
        size = float(row["size_bytes"] or 0)
        one = float(row["n_nodes"] or 0) == 1
        if DEVICE.get(row["gpu"]) not in devices or not one or size < 2**16:
            continue
        if "stas00" in row["provenance"] and size < 2**29:
            continue  # another machine, whose start differs; its large messages agree
        asked.append((names.index(row["op"]), size, float(row["n_gpus"])))
        seconds.append(measured_seconds(row))
        weight.append(0.4 if "vTrain" in row["provenance"] else 1.0)
    adding = "A100" not in devices
    base = network.wires(cluster(f"{devices[0]}:1x8"))

    def model(constants: Mapping[str, float], asked: Any) -> np.ndarray:
        wires = base._replace(**constants)
        kind, size, ranks = asked.T
        priced = [f(wires, size, ranks, ranks) for f in COLLECTIVES.values()]
        return np.choose(kind.astype(int), priced)

    points = Points(np.array(asked), np.array(seconds), np.array(weight))
    what = f"collectives in a domain, {', '.join(devices)}, from 64 KiB"
    return fit(what, model, protocol_bounds(adding), points, 0.5, NCCL)


def measured_seconds(row: Mapping[str, str]) -> float:
    """From the latency, or from the bus bandwidth of an all-reduce."""
    if row["latency_us"]:
        return float(row["latency_us"]) * 1e-6
    ranks, size = float(row["n_gpus"]), float(row["size_bytes"])
    return 2 * size * (ranks - 1) / ranks / (float(row["busbw_GBs"]) * 1e9)


ACROSS = {
    "across_share": Bound(0.8, 0.5, 0.95),
    "across_step_seconds": Bound(9e-6, 2e-6, 15e-6),
    "across_rails": Bound(10, 8, 72),
}
"""H100 on InfiniBand, GB200 in one, two and twenty racks."""
TREE_SHARE = 0.5
"""Of the ring's bandwidth: the most that measurements of 20 racks allow. NCCL's own
tuning takes 0.92 (src/graph/tuning.cc), and with that they are predicted up to 50 %
too fast."""


def across(rows: Rows, fitted: Mapping[str, Mapping[str, float]]) -> Fit:
    """Constants across domains: all-reduces of 512 MiB to 16 GiB."""
    some = [r for r in rows if "coreweave" in r["provenance"]]
    bases: list[network.Wires] = []
    asked: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for row in some:
        device, ranks = DEVICE[row["gpu"]], int(row["n_gpus"])
        family = ACCELERATORS[device].family
        made = network.wires(cluster(f"{device}:{ranks // 4}x4"))
        made = made if device == "GB200" else network.wires(cluster("h100:8x8"))
        known = fitted["B200" if family == "GB200" else family]
        bases.append(made._replace(**known, tree_share=TREE_SHARE))
        inside = 72 if device == "GB200" else 8
        asked.append((len(asked), float(row["size_bytes"]), ranks, inside))
        seconds.append(measured_seconds(row))

    def model(constants: Mapping[str, float], asked: Any) -> np.ndarray:
        return np.array(
            [
                float(
                    network.all_reduce_seconds(
                        bases[int(i)]._replace(**constants), *size
                    )
                )
                for i, *size in asked
            ]
        )

    points = Points(np.array(asked), np.array(seconds), np.ones(len(asked)))
    what = "all-reduces across domains, H100 and GB200, from 512 MiB"
    found = fit(what, model, ACROSS, points, 0.7, COREWEAVE)
    return Fit({**found.constants, "tree_share": TREE_SHARE}, found.errors)
