"""The pipeline of an estimate, task by task: the closed form's stages, replayed."""

from __future__ import annotations

from minitrain.simulate import step
from minitrain.simulate.estimate import Estimate, machine_records
from minitrain.simulate.pipeline import PipelineRun, replay_pipeline
from minitrain.simulate.schedules import schedule
from minitrain.simulate.sizes import sizes


def pipeline_of(made: Estimate) -> PipelineRun:
    """Replay the passes that `step.span_seconds` states in closed form.

    Every stage has the times of its own blocks, the first one the embedding too, the
    last one the head. A vocabulary spread over the stages is not drawn apart: each
    stage takes its share in its own passes.

    Args:
        made: Any estimate; without a pipeline there is one stage.
    """
    plan, model = made.plan, made.model
    s = sizes(model, plan, made.cluster.hosts, made.experts)
    c, w, n = machine_records(made.cluster, plan.precision, made.software)
    soft = made.software
    forward = made.forward_seconds
    weight = step.block_backward(s, c, w, n, soft)[0] / 2
    stages = plan.layers_of_stages(model.layers)
    sharded = step.sharded_seconds(s, n, soft, forward, made.block_backward_seconds)
    to_input = made.block_backward_seconds - weight + sharded / s.stage_layers
    head = step.head_seconds(s, w, soft)
    table = step.embedding_seconds(s, w, soft)
    send = step.pipeline_message_seconds(s, n, soft)
    spread = s.schedule > 5
    made_of = schedule(
        "1f1b" if spread else plan.schedule,
        *(plan.pp, plan.micro_batches),
        chunks=plan.interleave if plan.schedule == "interleaved" else 0,
    )
    places = plan.pp * made_of.chunks
    owner = {
        made_of.place(r, chunk): r
        for r in range(plan.pp)
        for chunk in range(made_of.chunks)
    }
    blocks = [stages[owner[place]] / made_of.chunks for place in range(places)]
    waits = float(send * (1 - soft.pipeline_hidden))
    f = [float(forward * b) + waits for b in blocks]
    b = [float(to_input * b) + waits for b in blocks]
    for seconds, first, last in ((f, table[0], head[0]), (b, table[1], head[1])):
        if spread:
            part = float(first + last) / places
            seconds[:] = [t + part for t in seconds]
        else:
            seconds[0] += float(first)
            seconds[-1] += float(last)
    return replay_pipeline(
        made_of, f, b, [float(weight * b) for b in blocks], float(send)
    )
