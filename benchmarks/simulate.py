"""The simulated cluster: what a prediction costs.

    python benchmarks/simulate.py            # all cases
    python benchmarks/simulate.py program    # one of them

Each case says what it measures, and returns its seconds (`ours`) beside those that it
may take (`peer`). The last line is that of the largest ratio, under the name of all.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from minitrain import trace
from minitrain.collectives import differentiable
from minitrain.runtime import Layout
from minitrain.simulate.estimate import estimate, evaluate
from minitrain.simulate.events import Compute, Need, Post, Step, Transfer, replay
from minitrain.simulate.hardware import Cluster
from minitrain.simulate.hardware import cluster as read_cluster
from minitrain.simulate.pipeline import replay_pipeline
from minitrain.simulate.plan import Plan
from minitrain.simulate.schedules import schedule
from minitrain.simulate.simulation import simulate
from minitrain.simulate.sizes import Sizes, sizes, stack
from minitrain.simulate.software import software
from minitrain.workload.model import Transformer
from minitrain.workload.presets import preset

Result = dict[str, float]


def tensor_parallel(model: Transformer, group: torch.distributed.ProcessGroup) -> None:
    """The plainest tensor parallelism: by columns, then by rows, then a sum.

    The model is on the meta device; each rank makes its own part real.
    """
    ranks = group.size()

    def shard(linear: nn.Linear, dim: int) -> None:
        linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, dim)[0])

    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        for linear in (attention.q, attention.k, attention.v, mlp.gate, mlp.up):
            shard(linear, 0)
        for linear in (attention.o, mlp.down):
            shard(linear, 1)
        for part in (attention, mlp):
            part.register_forward_pre_hook(
                lambda _, x: (differentiable.copy(x[0], group), *x[1:])
            )
            part.register_forward_hook(
                lambda _, __, y: differentiable.all_reduce(y, group)
            )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            real = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(real))


def tensor_parallel_step(name: str, layout: Layout, seq: int) -> object:
    """A traced forward and backward pass of one sequence, tensor-parallel."""
    mesh = layout.mesh()
    model = Transformer(preset(name), "meta", torch.bfloat16)
    tensor_parallel(model, mesh.get_group("tp"))
    tokens = torch.zeros(1, seq, dtype=torch.long)
    positions = torch.arange(seq).expand_as(tokens)
    with trace() as t:
        model(tokens, positions).sum().backward()
    return t


def timed(work: Callable[[], object], samples: int) -> float:
    """Median seconds of some calls."""
    seconds = []
    for _ in range(samples):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def program() -> Result:
    """The program of Llama 3 405B on 16,384 H100: recorded, timed and replayed."""
    layout = Layout(tp=8, dp=2048)
    arguments = (layout, "llama3-405b", layout, 8192)

    def work() -> object:
        return simulate(tensor_parallel_step, "h100:2048x8", *arguments, check=False)

    return {"ours": timed(work, 3), "peer": 15.0}


def pipeline_programs(stages: int, micro_batches: int) -> tuple[list, list]:
    """1F1B as programs of events: forward 1, backward 2, sends in between."""
    tracks: list[list[Step]] = []
    for stage in range(stages):
        last, warm = stage == stages - 1, min(stages - stage - 1, micro_batches)
        order = [("F", m) for m in range(warm)]
        for m in range(micro_batches - warm):
            order += [("F", m + warm), ("B", m)]
        order += [("B", m) for m in range(micro_batches - warm, micro_batches)]
        track: list[Step] = []
        for kind, m in order:
            there = stage * micro_batches + m  # of the message to the next stage
            back = (stages + stage) * micro_batches + m  # to this one, of the gradient
            arriving = there - micro_batches if kind == "F" else back
            leaving = there if kind == "F" else back - micro_batches
            if (kind == "F" and stage) or (kind == "B" and not last):
                track += [Post(arriving), Need(arriving)]
            track.append(Compute(1.0 if kind == "F" else 2.0, kind))
            if (kind == "F" and not last) or (kind == "B" and stage):
                track.append(Post(leaving))
        tracks.append(track)
    transfers = []
    for way in (0, 1):
        for stage in range(stages):
            ends = (stage, stage + 1) if way == 0 else (stage + 1, stage)
            for _ in range(micro_batches):
                transfers.append(Transfer(ends, 0.01, (way, stage), "across", True))
    return tracks, transfers


def events() -> Result:
    """1F1B with 64 stages and 512 micro-batches as 64 programs with all their sends."""
    tracks, transfers = pipeline_programs(64, 512)
    return {"ours": timed(lambda: replay(tracks, transfers), 3), "peer": 5.0}


def pipeline() -> Result:
    """1F1B with 64 stages and 512 micro-batches as a schedule of tasks."""
    tasks = schedule("1f1b", 64, 512)
    return {"ours": timed(lambda: replay_pipeline(tasks, 1.0, 2.0), 5), "peer": 0.3}


def plans(count: int) -> tuple[Sizes, Cluster]:
    """Legal layouts of Llama 3 405B on 16,384 H100, as many as asked, by repetition."""
    model, cluster = preset("llama3-405b"), read_cluster("h100:2048x8")
    made = []
    for tp, pp, b, again in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), ("none", "full")
    ):
        dp = cluster.world_size // (tp * pp)
        options = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": b, "recompute": again}
        plan = Plan(seq=8192, global_batch=4 * 16_384, zero=1, **options)
        made.append(sizes(model, plan, cluster.hosts))
    return stack(list(itertools.islice(itertools.cycle(made), count))), cluster


def vector() -> Result:
    """Time and memory of a million plans in closed form, 125,000 at a time."""
    some, cluster = plans(125_000)

    def work() -> None:
        for _ in range(8):
            evaluate(some, cluster, "bf16", "megatron-core")

    return {"ours": timed(work, 3), "peer": 1.0}


def one() -> Result:
    """Time and memory of one plan in closed form: the median of a thousand calls."""
    model, cluster = preset("llama3-405b"), read_cluster("h100:2048x8")
    plan = Plan(seq=8192, global_batch=2048, tp=8, pp=16, dp=128, zero=2)
    soft = software("megatron-core", "H100")
    return {
        "ours": timed(lambda: estimate(model, plan, cluster, soft), 1000),
        "peer": 0.3e-3,
    }


CASES: dict[str, Callable[[], Result]] = {
    "pipeline": pipeline,
    "events": events,
    "program": program,
    "vector": vector,
    "one": one,
}


def main() -> None:
    """Runs the cases that are named, or all."""
    results = {}
    for name in sys.argv[1:] or CASES:
        result = CASES[name]()
        results[name] = result | {"ratio": result["ours"] / result["peer"]}
        print(f"{name:9} {CASES[name].__doc__}")
        print(json.dumps({"name": f"simulate {name}", **results[name]}))
    worst = max(results.values(), key=lambda result: result["ratio"])
    print(json.dumps({"name": "simulate", **worst}))


if __name__ == "__main__":
    main()
