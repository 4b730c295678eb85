"""Predict a training step from a model, a plan and a cluster, in closed form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from minitrain.simulate import bubbles, footprint, kernels, layer, network, step
from minitrain.simulate.hardware import Cluster, Link
from minitrain.simulate.hardware import cluster as read_cluster
from minitrain.simulate.kernels import Chip, chip
from minitrain.simulate.network import Wires, wires
from minitrain.simulate.plan import Experts, Plan
from minitrain.simulate.scalars import for_numbers
from minitrain.simulate.sizes import Sizes, attention_matrices, sizes, stack
from minitrain.simulate.software import Software, is_borrowed
from minitrain.simulate.software import software as find_software
from minitrain.workload import costs, formulas
from minitrain.workload.config import ModelConfig

ONE = for_numbers((kernels, network, bubbles, layer, step, footprint))
"""The closed forms, of one plan."""


@dataclass(frozen=True)
class Estimate:
    """What a plan is predicted to take.

    Attributes:
        model, experts, plan, cluster, software: What was asked.
        step_seconds: Of one optimizer step.
        interval: Seconds between which 80 % of measured steps should lie.
        parts: Seconds by cause, in the order of `PARTS`; their sum is the step.
        memory: Bytes by kind of the fullest rank, in the order of `KINDS`.
        forward_seconds, block_backward_seconds: Of one block and one micro-batch, what
            is computed again included.
        block_activation_bytes, block_state_bytes: Of the first stage's blocks alone, as
            papers state them.
    """

    model: ModelConfig
    experts: Experts | None
    plan: Plan
    cluster: Cluster
    software: Software
    step_seconds: float
    interval: tuple[float, float]
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    forward_seconds: float
    block_backward_seconds: float
    block_activation_bytes: float
    block_state_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank at its highest moment."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether they fit into the accelerator, with `GUARD` to spare."""
        return self.memory_bytes <= (1 - GUARD) * self.cluster.accelerator.memory_bytes

    @property
    def model_flops(self) -> float:
        """Operations of a step that the model needs, attention counted whole."""
        return flops(self.model, self.experts, self.plan)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: those operations over what bf16 units could do."""
        return self.model_flops / (self.step_seconds * _peak(self.cluster))

    @property
    def hfu(self) -> float:
        """The same, with what is computed again counted too."""
        plan = self.plan
        done = flops(self.model, self.experts, plan, hardware=True)
        return done / (self.step_seconds * _peak(self.cluster))

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.plan.global_batch * self.plan.seq / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        """Of one device."""
        return self.tokens_per_second / self.cluster.world_size


GUARD = 0.05
"""Share of the memory that a plan must leave free to count as fitting."""


def _peak(cluster: Cluster) -> float:
    peaks = cluster.accelerator.peak_flops
    return cluster.world_size * peaks.get("bf16", peaks.get("fp16", 0.0))


def flops(
    model: ModelConfig, experts: Experts | None, plan: Plan, hardware: bool = False
) -> float:
    """Operations of a step, attention counted whole.

    Args:
        model: The model.
        experts: Of its blocks, if it has any: those that a token passes are counted.
        plan: Of the step.
        hardware: Whether what recomputation does again is counted.
    """
    batch, seq = plan.global_batch, plan.seq
    if experts:
        matrices = 2 + int(model.activation == "swiglu")
        passed = experts.top_k * experts.ffn + experts.shared_ffn
        sparse = model.layers - experts.dense_layers
        more = matrices * model.hidden * (passed - model.ffn) * sparse
        saved = (1 - experts.latent) * attention_matrices(model) * model.layers
        extra = 2 * batch * seq * (more - saved)
    else:
        extra = 0.0
    head = formulas.matmul_flops(batch * seq, model.hidden * model.vocab_size)
    core = formulas.attention_flops(batch, seq, model.heads, model.head_dim)
    forward = costs.forward_flops(model, batch, seq) + extra
    again = 0.0
    if hardware:
        again = {"full": forward - head, "selective": core * model.layers}.get(
            plan.recompute, 0.0
        )
    return 3 * forward + again


def estimate(
    model: ModelConfig,
    plan: Plan,
    cluster: Cluster | str,
    software: Software | str = "megatron-core",
    experts: Experts | None = None,
) -> Estimate:
    """Predict a training step in closed form.

    Args:
        model: To be trained.
        plan: Its layout, batch and precision.
        cluster: Or its description, as `minitrain.simulate.cluster` reads it.
        software: A framework's name in `SOFTWARE`, or a record of one.
        experts: What replaces the MLP, in a mixture of experts.

    Raises:
        ValueError: The plan cannot be run; the message names the numbers.
    """
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    plan.check(model, cluster.world_size, experts)
    if isinstance(software, str):
        device = cluster.accelerator.fitted_as
        software = find_software(software, device, plan.precision)
    s = sizes(model, plan, cluster.hosts, experts)
    records = machine_records(cluster, plan.precision, software)
    forward = ONE.step.block_forward(s, *records, software)
    backward = ONE.step.block_backward(s, *records, software)
    parts = ONE.step.assembled_seconds(s, *records[1:], software, forward, backward)
    total = float(sum(parts))
    kinds = ONE.footprint.rank_bytes(s, software)
    low, high = interval(total, cluster, plan, experts, software)
    return Estimate(
        model=model,
        experts=experts,
        plan=plan,
        cluster=cluster,
        software=software,
        step_seconds=total,
        interval=(low, high),
        parts=dict(zip(step.PARTS, map(float, parts), strict=True)),
        memory=dict(zip(footprint.KINDS, map(float, kinds), strict=True)),
        forward_seconds=float(sum(forward)),
        block_backward_seconds=float(
            sum(backward)
            + s.recompute_full * sum(forward)
            + s.recompute_core * forward[1]
        ),
        block_activation_bytes=float(
            ONE.footprint.waiting_micro_batches(s)
            * s.first_layers
            * ONE.footprint.kept_bytes(s, software)
        ),
        block_state_bytes=float(
            s.first_layers
            * s.block_parameters
            * (software.weight_bytes + software.gradient_bytes + software.state_bytes)
        ),
    )


def machine_records(
    cluster: Cluster, precision: str, software: Software
) -> tuple[Chip, Chip, Wires]:
    """The accelerator at the products' precision and at the wide one, and the links."""
    derate = cluster.power_derate
    wide = "bf16" if precision in ("fp8", "fp4") else precision
    near, far = cluster.inside, cluster.across
    near_rate = near.bytes_per_second * software.inside_share
    far_rate = far.bytes_per_second * software.network_share
    slower = replace(
        cluster,
        inside=Link(near.latency_seconds, near_rate),
        across=Link(far.latency_seconds, far_rate),
    )
    links = wires(slower)
    return (
        chip(cluster.accelerator, precision, derate),
        chip(cluster.accelerator, wide, derate),
        links._replace(across_rails=min(links.across_rails, software.rails)),
    )


def interval(
    seconds: float,
    cluster: Cluster,
    plan: Plan,
    experts: Experts | None,
    software: Software,
) -> tuple[float, float]:
    """Seconds between which 80 % of measured steps should lie.

    The half width is relative: the 80th percentile of what predictions of the
    calibration rows missed by, after the fit; wider for experts, where the
    accelerator's kernels were not measured, and for frameworks of few runs or with none
    on this accelerator.
    """
    half = HALF_WIDTH
    if experts:
        half *= EXPERTS_WIDER
    if not chip(cluster.accelerator, plan.precision).measured:
        half *= UNKNOWN_WIDER
    device = cluster.accelerator.fitted_as
    if software.name in SPARSE or is_borrowed(software.name, device):
        half *= UNKNOWN_WIDER
    return seconds * (1 - half), seconds * (1 + half)


HALF_WIDTH = 0.083
"""Half of the 80 % interval, relative: 80 % of the 50 dense calibration runs are
nearer."""
EXPERTS_WIDER = 3.0
"""So many times wider for experts, whose 12 runs were missed by so much more."""
UNKNOWN_WIDER = 1.6
"""So many times wider where few measurements stand behind a constant."""
SPARSE = ("fsdp", "fsdp-unfused", "composer", "maxtext", "internevo", "minitrain")
"""Frameworks of which fewer than six runs were there to fit."""


def sweep(
    model: ModelConfig,
    plans: Sequence[Plan],
    cluster: Cluster | str,
    software: str = "megatron-core",
    experts: Experts | None = None,
) -> dict[str, np.ndarray]:
    """Predict many plans of one precision at once.

    Returns:
        `step_seconds` and `memory_bytes` [plan], `parts` and `kinds` [part, plan].

    Raises:
        ValueError: A plan cannot be run, precisions differ, or there is no plan.
    """
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    if len(precisions := {plan.precision for plan in plans}) != 1:
        words = ", ".join(sorted(precisions)) or "there is no plan"
        raise ValueError(f"sweep takes plans of one precision: {words}")
    for plan in plans:
        plan.check(model, cluster.world_size, experts)
    columns = [sizes(model, plan, cluster.hosts, experts) for plan in plans]
    found = evaluate(stack(columns), cluster, plans[0].precision, software)
    return {
        name: np.broadcast_to(value, (*value.shape[:-1], len(plans)))
        for name, value in found.items()
    }


def evaluate(
    s: Sizes, cluster: Cluster, precision: str, software: str
) -> dict[str, np.ndarray]:
    """Times and bytes of a record of arrays; nothing is checked.

    Arrays of more than `CHUNK` plans are divided among threads: numpy computes without
    Python's lock.

    Returns:
        As `sweep`; the axis of plans is of length 1 where all agree.
    """
    soft = find_software(software, cluster.accelerator.fitted_as, precision)
    records = machine_records(cluster, precision, soft)
    arrays = {k: v for k, v in vars(s).items() if isinstance(v, np.ndarray)}
    count = max(map(len, arrays.values()), default=1)
    if count <= CHUNK:
        return _evaluated(s, records, soft)

    def some(start: int) -> dict[str, np.ndarray]:
        part = {k: v[start : start + CHUNK] for k, v in arrays.items()}
        found = _evaluated(replace(s, **part), records, soft)
        ends = min(CHUNK, count - start)
        return {k: np.broadcast_to(v, (*v.shape[:-1], ends)) for k, v in found.items()}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(some, range(0, count, CHUNK)))
    return {k: np.concatenate([m[k] for m in made], axis=-1) for k in made[0]}


CHUNK = 65_536
"""Plans that a thread evaluates at once: enough for it to work by itself."""


def _evaluated(
    s: Sizes, records: tuple[Chip, Chip, Wires], soft: Software
) -> dict[str, np.ndarray]:
    rows = step.step_seconds(s, *records, soft), footprint.rank_bytes(s, soft)
    parts, kinds = (
        np.stack(np.broadcast_arrays(*map(np.atleast_1d, row))) for row in rows
    )
    return {
        "step_seconds": parts.sum(axis=0),
        "memory_bytes": kinds.sum(axis=0),
        "parts": parts,
        "kinds": kinds,
    }
