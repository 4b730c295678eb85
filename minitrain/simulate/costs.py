"""What the lines of a program take on a cluster: every number that times them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from minitrain.runtime.operators import BACKWARD
from minitrain.simulate import network
from minitrain.simulate.events import Sharing
from minitrain.simulate.hardware import Cluster
from minitrain.simulate.kernels import (
    Chip,
    attention_seconds,
    batched_gemm_seconds,
    chip,
    memory_seconds,
)
from minitrain.simulate.matching import Meeting
from minitrain.simulate.network import Wires, wires
from minitrain.simulate.program import FLASH, PRODUCTS, Kernel

LAUNCH_SECONDS = 5e-6
"""What the host takes to launch a kernel from PyTorch: 4 to 8 microseconds."""

PRECISION: Mapping[str, str] = MappingProxyType(
    {
        "float64": "fp32",
        "float32": "fp32",
        "float16": "fp16",
        "bfloat16": "bf16",
        "float8_e4m3fn": "fp8",
        "float8_e5m2": "fp8",
    }
)
_COLLECTIVES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "all_reduce": network.all_reduce_seconds,
        "all_gather": network.all_gather_seconds,
        "reduce_scatter": network.reduce_scatter_seconds,
        "all_to_all": network.all_to_all_seconds,
        "broadcast": network.broadcast_seconds,
        "reduce": network.broadcast_seconds,
        "gather": network.all_gather_seconds,
        "scatter": network.all_gather_seconds,
        "barrier": network.all_reduce_seconds,
    }
)


@dataclass(frozen=True)
class Costs:
    """The numbers that time a program.

    Attributes:
        chips: The accelerator by precision.
        wires: The links.
        sharing: What messages and computing take from each other.
        launch_seconds: Of the host, for each kernel.
        tf32: Whether products in float32 run in TF32.
    """

    chips: Mapping[str, Chip]
    wires: Wires
    sharing: Sharing
    launch_seconds: float
    tf32: bool
    _known: dict[Kernel, float] = field(default_factory=dict, compare=False)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Device time of one kernel."""
        if kernel not in self._known:
            self._known[kernel] = float(self._price(kernel))
        return self._known[kernel]

    def _price(self, kernel: Kernel) -> float:
        c = self.chips[PRECISION.get(kernel.dtype, "fp32")]
        if kernel.kind == PRODUCTS:
            groups, m, n, k = kernel.sizes
            seconds = batched_gemm_seconds(c, groups, m, n, k)
            shares = {"dgrad": c.dgrad_share, "wgrad": c.wgrad_share}
            return seconds / shares.get(kernel.variant, 1.0)
        if kernel.kind == FLASH:
            backward = int(kernel.phase == BACKWARD)
            causal = int(kernel.variant == "causal")
            batch, heads, kv_heads, seq_q, seq_k, head_dim = kernel.sizes
            return attention_seconds(
                c, batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, backward
            )
        return memory_seconds(c, kernel.sizes[0])

    def message_seconds(self, meeting: Meeting) -> float:
        """Time of one message that has its links to itself."""
        m, ranks = meeting.message, len(meeting.message.group)
        if m.op == "send":
            near = int(meeting.domains == 1)
            return float(network.send_seconds(self.wires, m.payload_bytes, near))
        price = _COLLECTIVES[m.op]
        inside = ranks / meeting.domains
        return float(price(self.wires, m.payload_bytes, ranks, inside))

    def on(self, cluster: Cluster) -> Costs:
        """The same on another cluster."""
        return costs(cluster, self.sharing, self.launch_seconds, self.tf32)

    def better(self, number: str, factor: float = 1.1) -> Costs:
        """The same with one number of the hardware better by a factor."""
        if number not in HARDWARE:
            raise ValueError(f"no {number!r} to better; there is {', '.join(HARDWARE)}")
        if not 0 < factor < math.inf:
            raise ValueError(f"factor={factor}: a finite number above 0, please")
        return HARDWARE[number](self, factor)


def costs(
    cluster: Cluster, sharing: Sharing, launch_seconds: float, tf32: bool
) -> Costs:
    """The numbers of a cluster.

    Args:
        cluster: The hardware.
        sharing: What messages and computing take from each other.
        launch_seconds: Of the host, for each kernel.
        tf32: Whether products in float32 run in TF32, where there is such a thing.

    Raises:
        ValueError: A number that no machine has.
    """
    if not 0 <= launch_seconds < math.inf:
        raise ValueError(f"launch_seconds={launch_seconds}: finite, and not negative")
    for name, share in sharing._asdict().items():
        if not 0 <= share < 1:
            raise ValueError(f"sharing: {name}={share} is no share between 0 and 1")
    device = cluster.accelerator
    known = {p: chip(device, p, cluster.power_derate) for p in device.peak_flops}
    least = known.get("fp32") or known.get("tf32") or next(iter(known.values()))
    chips = {p: known.get(p, least) for p in PRECISION.values()}
    if tf32 and "tf32" in known:
        chips["fp32"] = known["tf32"]
    return Costs(chips, wires(cluster), sharing, launch_seconds, tf32)


def _chips(costs: Costs, factor: float, names: tuple[str, ...]) -> Costs:
    chips = {
        p: c._replace(**{n: getattr(c, n) * factor for n in names})
        for p, c in costs.chips.items()
    }
    return replace(costs, chips=chips, _known={})


def _wires(costs: Costs, factor: float, names: tuple[str, ...]) -> Costs:
    changed = {n: getattr(costs.wires, n) * factor for n in names}
    return replace(costs, wires=costs.wires._replace(**changed), _known={})


def _sooner(names: tuple[str, ...], costs: Costs, factor: float) -> Costs:
    return _wires(costs, 1 / factor, names)


def _launches(costs: Costs, factor: float) -> Costs:
    return replace(costs, launch_seconds=costs.launch_seconds / factor, _known={})


_LATENCIES = tuple(
    name
    for name in Wires._fields
    if name.endswith("_seconds") and not name.startswith("across")
)
HARDWARE: Mapping[str, Callable[[Costs, float], Costs]] = MappingProxyType(
    {
        "matrix units": partial(_chips, names=("flops", "attention_flops")),
        "memory bandwidth": partial(_chips, names=("memory_bytes_per_second",)),
        "bandwidth inside a domain": partial(
            _wires, names=("inside_bytes_per_second",)
        ),
        "latency inside a domain": partial(_sooner, _LATENCIES),
        "network bandwidth": partial(_wires, names=("across_bytes_per_second",)),
        "network latency": partial(_sooner, ("across_step_seconds",)),
        "launches by the host": _launches,
    }
)
"""Numbers of the hardware that can be made better, each by one factor."""
