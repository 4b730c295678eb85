"""Predict a training step from a model, a plan and a cluster, in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from minitrain.simulate import step
from minitrain.simulate.hardware import Cluster, cluster as read_cluster
from minitrain.simulate.kernels import chip
from minitrain.simulate.network import wires
from minitrain.simulate.plan import SCHEDULES, Experts, Plan
from minitrain.simulate.software import Software, software as find_software
from minitrain.workload import costs, formulas
from minitrain.workload.config import ModelConfig


@dataclass
class Sizes:
    """A step in numbers, or in arrays of them; what the closed forms read."""

    layers: Any
    hidden: Any
    heads: Any
    kv_heads: Any
    head_dim: Any
    ffn: Any
    gated: Any
    rope: Any
    vocab: Any
    moe: Any
    experts: Any
    top_k: Any
    expert_ffn: Any
    shared_ffn: Any
    imbalance: Any
    seq: Any
    micro_batch: Any
    micro_batches: Any
    tp: Any
    pp: Any
    dp: Any
    cp: Any
    ep: Any
    sp: Any
    zero: Any
    shard_ranks: Any
    interleave: Any
    schedule: Any
    first_layers: Any
    last_layers: Any
    stage_layers: Any
    recompute_full: Any
    recompute_core: Any
    block_parameters: Any
    stage_parameters: Any
    gather_times: Any
    hosts: Any


def sizes(
    model: ModelConfig, plan: Plan, hosts: int, experts: Experts | None = None
) -> Sizes:
    """The numbers of a plan."""
    stages = plan.layers_of_stages(model.layers)
    dense = formulas.block_matrices(
        model.hidden,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.ffn,
        int(model.activation == "swiglu"),
    )
    gated = int(model.activation == "swiglu")
    block = dense / plan.tp
    moe = 0.0
    if experts:
        moe = (model.layers - experts.dense_layers) / model.layers
        mlp = (2 + gated) * model.hidden * model.ffn
        each = (2 + gated) * model.hidden * experts.ffn
        shared = (2 + gated) * model.hidden * experts.shared_ffn
        routed = each * experts.count / plan.ep
        block = (dense - moe * mlp + moe * shared) / plan.tp + moe * routed
    table = model.vocab_size * model.hidden / plan.tp
    tables = table if plan.pp > 1 or model.tie_embeddings else 2 * table
    return Sizes(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        gated=gated,
        rope=int(model.positions == "rope"),
        vocab=model.vocab_size,
        moe=moe,
        experts=experts.count if experts else 1,
        top_k=experts.top_k if experts else 1,
        expert_ffn=experts.ffn if experts else 1,
        shared_ffn=experts.shared_ffn if experts else 0,
        imbalance=experts.imbalance if experts else 1.0,
        seq=plan.seq,
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        cp=plan.cp,
        ep=plan.ep,
        sp=int(plan.sequence_parallel),
        zero=plan.zero,
        shard_ranks=plan.shard_ranks or plan.dp * plan.cp,
        interleave=plan.interleave,
        schedule=SCHEDULES.index(plan.schedule),
        first_layers=stages[0],
        last_layers=stages[-1],
        stage_layers=max(stages),
        recompute_full=int(plan.recompute == "full"),
        recompute_core=int(plan.recompute == "selective"),
        block_parameters=block,
        stage_parameters=max(stages) * block + tables,
        gather_times=1,
        hosts=hosts,
    )


def step_parts(
    model: ModelConfig,
    plan: Plan,
    cluster: Cluster | str,
    soft: Software,
    experts: Experts | None = None,
) -> dict[str, float]:
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    s = sizes(model, plan, cluster.hosts, experts)
    c = chip(cluster.accelerator, plan.precision)
    w = chip(cluster.accelerator, "bf16" if plan.precision == "fp8" else plan.precision)
    n = wires(cluster)
    parts = step.step_seconds(s, c, w, n, soft)
    return dict(zip(step.PARTS, map(float, parts), strict=True))
