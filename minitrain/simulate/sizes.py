"""A training step in numbers: what every closed form of this package reads.

A field is a number, or an array with one entry for each plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minitrain.simulate.plan import SCHEDULES, Experts, Plan
from minitrain.workload import formulas
from minitrain.workload.config import ModelConfig

Number = Any
"""A number, or an array of numbers."""


@dataclass
class Sizes:
    """A step; yes and no are 1 and 0.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: Of the model.
        gated: The MLP has a gate.
        rope: Positions are rotated in.
        tables: Embedding and head; 1 where they are one.
        moe: Share of the blocks that have experts.
        experts, top_k, expert_ffn, shared_ffn, imbalance, latent: As in `Experts`.
        seq, micro_batch, micro_batches: Tokens of a sequence, sequences of a
            micro-batch, micro-batches of a step on a rank.
        tp, pp, dp, cp, ep: Degrees.
        sp: Sequence parallelism.
        zero, shard_ranks: Stage of ZeRO, and over how many ranks it shards.
        interleave, schedule: Chunks of a stage; position in `SCHEDULES`.
        first_layers, last_layers, stage_layers: Blocks of the first stage, of the last
            one, and the most of any.
        recompute_full, recompute_core: What is computed again: blocks, attention.
        block_parameters: Of one block on a rank, on average.
        expert_parameters: Of them, its experts'.
        stage_parameters: Of the fullest stage on a rank.
        hosts: Of the cluster.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn: Number
    gated: Number
    rope: Number
    vocab: Number
    tables: Number
    moe: Number
    experts: Number
    top_k: Number
    expert_ffn: Number
    shared_ffn: Number
    imbalance: Number
    latent: Number
    seq: Number
    micro_batch: Number
    micro_batches: Number
    tp: Number
    pp: Number
    dp: Number
    cp: Number
    ep: Number
    sp: Number
    zero: Number
    shard_ranks: Number
    interleave: Number
    schedule: Number
    first_layers: Number
    last_layers: Number
    stage_layers: Number
    recompute_full: Number
    recompute_core: Number
    block_parameters: Number
    expert_parameters: Number
    stage_parameters: Number
    hosts: Number


def sizes(
    model: ModelConfig, plan: Plan, hosts: int, experts: Experts | None = None
) -> Sizes:
    """The numbers of a plan."""
    stages = plan.layers_of_stages(model.layers)
    dense: float = formulas.block_matrices(
        model.hidden,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.ffn,
        int(model.activation == "swiglu"),
    )
    gated = int(model.activation == "swiglu")
    block = dense / plan.tp
    moe, routed = 0.0, 0.0
    if experts:
        dense -= (1 - experts.latent) * attention_matrices(model)
        block = dense / plan.tp
        moe = (model.layers - experts.dense_layers) / model.layers
        mlp = (2 + gated) * model.hidden * model.ffn
        each = (2 + gated) * model.hidden * experts.ffn
        shared = (2 + gated) * model.hidden * experts.shared_ffn
        routed = moe * each * experts.count / plan.ep
        block = (dense - moe * mlp + moe * shared) / plan.tp + routed
    table = model.vocab_size * model.hidden / plan.tp
    both_ends = plan.pp == 1 or plan.schedule == "zb-v"  # on one rank
    tables = 2 * table if both_ends and not model.tie_embeddings else table
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
        latent=experts.latent if experts else 1.0,
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
        expert_parameters=routed,
        tables=1 if model.tie_embeddings else 2,
        hosts=hosts,
    )


def attention_matrices(model: ModelConfig) -> int:
    """Elements of attention's matrices in one block."""
    width = model.heads + model.kv_heads
    return 2 * model.hidden * width * model.head_dim


def stack(rows: Sequence[Sizes]) -> Sizes:
    """Many steps as one record: a number where all agree, else an array."""
    names = [f.name for f in fields(Sizes)]
    table = np.array([[getattr(row, n) for n in names] for row in rows], dtype=float)
    same = (table == table[0]).all(axis=0)
    columns = [
        float(column[0]) if one else np.ascontiguousarray(column)
        for column, one in zip(table.T, same, strict=True)
    ]
    return Sizes(**dict(zip(names, columns, strict=True)))
