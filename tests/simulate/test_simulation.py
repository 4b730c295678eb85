"""A simulated step: its time is that of its parts, its memory that of a real rank."""

import json
import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitrain import collectives, launch, trace
from minitrain.collectives import differentiable
from minitrain.parallel.data import ddp, replicate
from minitrain.runtime import Layout, world_size
from minitrain.runtime.operators import BACKWARD
from minitrain.simulate import network
from minitrain.simulate.costs import HARDWARE
from minitrain.simulate.events import Sharing
from minitrain.simulate.hardware import cluster
from minitrain.simulate.kernels import attention_seconds, chip, gemm_seconds
from minitrain.simulate.network import wires
from minitrain.simulate.report import seconds_text
from minitrain.simulate.simulation import simulate
from minitrain.trainer import recompute
from minitrain.workload import costs
from minitrain.workload.model import Transformer
from minitrain.workload.presets import preset
from minitrain.workload.step import (
    Batch,
    TokenLoss,
    accumulate,
    count_tokens,
    finalize_gradients,
)

H100 = cluster("h100:1x8").accelerator
APART = Sharing(0.0, 0.0)


def data_parallel(technique, name="laptop", again=False, rows=2, seq=64):
    """A traced step after one that was not."""
    mesh = Layout(dp=world_size()).mesh()
    model = Transformer(preset(name), "cpu")
    if again:
        recompute(model)
    technique(model, mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [Batch.from_sequences(torch.zeros(rows, seq + 1, dtype=torch.long))]

    def step():
        loss_fn = TokenLoss(count_tokens(batches, mesh))
        accumulate(model, batches, loss_fn)
        finalize_gradients(optimizer, mesh, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with trace() as t:
        step()
    return t


@cache
def simulated(technique, where="h100:2x8", again=False):
    return simulate(data_parallel, where, None, technique, "laptop", again)


# ---- one line at a time


def test_a_product_a_message_and_attention_take_what_they_are_priced_at():
    def step(m, n, k):
        a, b = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k)
        b = b.to(torch.bfloat16).T
        x = torch.zeros(2**20)
        with trace() as t:
            a @ b
            dist.all_reduce(x)
        return t

    s = simulate(step, "h100:4x8", None, 512, 768, 1024, launch_seconds=0.0)
    product = gemm_seconds(chip(H100, "bf16"), 512, 768, 1024)
    message = network.all_reduce_seconds(wires(cluster("h100:4x8")), 2**22, 32, 8)
    assert s.step_seconds == pytest.approx(product + message, rel=1e-12)
    assert s.parts["matrix products"] == pytest.approx(product)
    assert s.exposed_seconds == pytest.approx(message)


def test_attention_is_priced_forward_and_backward():
    def step():
        q = torch.zeros(2, 8, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        k = torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        with trace() as t:
            torch.nn.functional.scaled_dot_product_attention(
                q, k, k, is_causal=True, enable_gqa=True
            ).sum().backward()
        return t

    s = simulate(step, "h100:1x8", launch_seconds=0.0)
    c, sizes = chip(H100, "bf16"), (2, 8, 4, 256, 256, 64, 1)
    expected = attention_seconds(c, *sizes, 0) + attention_seconds(c, *sizes, 1)
    assert s.parts["attention"] == pytest.approx(float(expected))
    phases = [k.phase for k in s.lines[0] if k.kind == "attention"]
    assert phases == ["forward", BACKWARD]


def test_a_message_hides_behind_the_computing_beside_it():
    def step(wait_first):
        a, x = torch.zeros(4096, 4096), torch.zeros(2**20)
        with trace() as t:
            work = dist.all_reduce(x, async_op=True)
            if wait_first:
                work.wait()
            a @ a
            work.wait()
        return t

    shown, hidden = (
        simulate(step, "h100:1x8", None, first, sharing=APART)
        for first in (True, False)
    )
    message = hidden.communication_seconds
    assert shown.step_seconds == pytest.approx(hidden.step_seconds + message)
    assert (hidden.exposed_seconds, shown.exposed_seconds) == (0, message)
    disturbed = simulate(step, "h100:1x8", None, False, sharing=Sharing(0.2, 0.2))
    assert hidden.step_seconds < disturbed.step_seconds < shown.step_seconds
    assert disturbed.parts["slowed by messages"] > 0


# ---- a whole step


@pytest.mark.parametrize("technique", [replicate, ddp])
def test_the_parts_are_the_step(technique):
    s = simulated(technique)
    assert sum(s.parts.values()) == pytest.approx(s.step_seconds)
    low, high = s.interval
    assert low < s.step_seconds < high
    assert s.tokens == 16 * 2 * 64
    assert s.tokens_per_second == pytest.approx(s.tokens / s.step_seconds)
    needed = costs.model_flops(preset("laptop"), 2 * 16, 64)
    assert s.model_flops == needed
    assert s.mfu == pytest.approx(
        needed / s.step_seconds / (16 * H100.peak_flops["fp32"])
    )
    assert s.mfu < 1


def test_memory_is_that_of_a_real_rank():
    for technique in (replicate, ddp):
        real = launch(data_parallel, 2, technique)[0]
        s = simulate(data_parallel, "h100:1x2", None, technique)
        assert s.memory == real.at_peak
        assert s.memory_bytes == real.peak_total_bytes
        assert s.roles[0].trace.peak_bytes == real.peak_bytes
    assert s.fits
    small = replace(s.cluster, accelerator=replace(H100, memory_bytes=1e6))
    assert not replace(s, cluster=small).fits


def test_overlap_hides_messages_and_recomputation_costs_operations():
    plain, overlapped = simulated(replicate), simulated(ddp)
    assert overlapped.step_seconds < plain.step_seconds
    assert overlapped.exposed_seconds < plain.exposed_seconds
    again = simulated(ddp, again=True)
    assert again.model_flops == overlapped.model_flops
    assert again.hfu > again.mfu
    assert again.step_seconds > overlapped.step_seconds
    assert again.memory["activations"] < overlapped.memory["activations"]


def test_better_hardware_never_makes_it_slower():
    s = simulated(replicate)
    gains = {name: s.step_seconds - s.better(name) for name in HARDWARE}
    assert all(gain >= -1e-12 for gain in gains.values())
    assert gains["launches by the host"] > 0, "small kernels wait for the host"
    assert gains["network latency"] > 0
    assert s.better("network latency", 1e6) < s.better("network latency", 1.1)
    assert s.better("matrix units", 1.0) == s.step_seconds


def test_more_ranks_take_longer_and_messages_grow():
    steps = [
        simulated(replicate, where) for where in ("h100:1x1", "h100:1x8", "h100:2x8")
    ]
    one, host, two = (s.step_seconds for s in steps)
    assert one < host < two
    assert steps[0].communication_seconds == 0
    assert steps[0].parts.keys() <= {*steps[1].parts}


# ---- several roles


def stage(rows, wrong=""):
    """A pipeline of two stages, forward and backward, one micro-batch."""
    size = world_size()
    first = dist.get_rank() < size // 2
    peer = (dist.get_rank() + size // 2) % size
    x = torch.zeros(rows, 1024)
    weight = torch.zeros(1024, 1024, requires_grad=True)
    with trace() as t:
        if first:
            y = x @ weight
            dist.send(y.detach(), peer)
            grad = torch.empty_like(y)
            if wrong != "no receive":
                dist.recv(grad, peer)
            y.backward(grad)
        else:
            dist.recv(x, peer)
            y = x.requires_grad_() @ weight
            y.backward(y)
            if wrong == "size":
                dist.send(x.grad[:1], peer)
            else:
                dist.send(x.grad, peer)
        if wrong == "collective" and first:
            dist.all_reduce(x)
        elif wrong == "collective":
            dist.broadcast(x, 0)
    return t


def test_stages_wait_for_each_other():
    s = simulate(stage, "h100:2x4", Layout(pp=2, dp=4), 512, launch_seconds=0.0)
    assert [role.name for role in s.roles] == ["pp 0", "pp 1"]
    c, w = chip(H100, "fp32"), wires(cluster("h100:2x4"))
    send = network.send_seconds(w, 4 * 512 * 1024, 0)
    forward = gemm_seconds(c, 512, 1024, 1024)
    assert s.timeline.begins[0] == pytest.approx(forward)
    assert s.timeline.computing[1][0].start == pytest.approx(forward + send)
    first, last = s.parts_of(0), s.parts_of(1)
    for parts in (first, last):
        assert sum(parts.values()) == pytest.approx(s.step_seconds)
    assert first["messages not hidden"] == pytest.approx(2 * send)
    busy = s.timeline.busy_seconds(1)
    assert s.parts_of(0)["waiting for other ranks"] == pytest.approx(busy)
    # Both stages compute a product forward and one for the weight; the last, for its
    # input too, since it is not the data.
    assert s.timeline.busy_seconds(1) > s.timeline.busy_seconds(0)
    assert s.hardware_flops == 4 * 5 * 2 * 512 * 1024**2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("no receive", "pp 1 sends 1 messages to pp 0, which receives 0"),
        ("size", r"pp 1 calls send of 4,096 B .* but pp 0 calls recv of 2.00 MiB"),
        ("collective", r"pp 0 calls all_reduce .* but pp 1 calls broadcast"),
    ],
)
def test_ranks_that_do_not_fit_each_other_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        simulate(stage, "h100:2x4", Layout(pp=2, dp=4), 512, wrong)


def test_a_layout_must_fill_the_cluster():
    with pytest.raises(ValueError, match="needs 8 ranks, and there are 16"):
        simulate(stage, "h100:2x8", Layout(dp=8), 512)


def test_a_deadlock_is_told():
    def both_receive():
        peer = 1 - dist.get_rank()
        x = torch.zeros(4)
        with trace() as t:
            dist.recv(x, peer)
            dist.send(x, peer)
        return t

    with pytest.raises(ValueError, match=r"rank 0 waits for .*send.*rank 1 never"):
        simulate(both_receive, "h100:1x2", Layout(pp=2))


# ---- what it says


def test_what_is_printed_and_shown():
    s = simulated(ddp)
    text = str(s)
    assert text.startswith("16 H100s, Layout(dp=16): a step takes ")
    for word in ("tokens per second", "MiB of 80.0 GiB: fits", "of these not hidden"):
        assert word in text
    assert s._repr_mimebundle_()["text/markdown"].count("|") > 20
    explanation = s.explain()
    assert "What would help most: " in explanation.words
    shares = [float(row[2].rstrip("%")) for row in explanation.parts.rows[:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert len(explanation.gains.rows) == len(HARDWARE)
    assert "timeline" in s.figure().alt.lower()


def test_times_are_written_in_a_unit_that_suits_them():
    texts = [seconds_text(t) for t in (1.2345, 0.0123, 35e-6, 0.0, 12345.6)]
    assert texts == ["1.23 s", "12.3 ms", "35.0 µs", "0 s", "12,346 s"]


def test_the_timeline_is_a_perfetto_file(tmp_path):
    s = simulated(ddp)
    s.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {"forward", "backward", "optimizer", "all_reduce"} <= {
        e["name"] for e in slices
    }
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(
        s.step_seconds * 1e6
    )
    computing = [e for e in slices if e["tid"] == "computing"]
    busy = sum(e["dur"] for e in computing) / 1e6
    assert busy == pytest.approx(s.timeline.busy_seconds(0), rel=1e-3)


def test_simulated_traces_are_read_like_real_ones():
    (t,) = simulated(ddp).traces()
    real = simulated(ddp).roles[0].trace
    assert [m.op for m in t.messages] == [m.op for m in real.messages]
    groups = {len(m.group) for m in t.messages if m.end_seconds > m.start_seconds}
    assert groups == {16}, "a group of one takes no time, the others do"
    waited = sum(m.waited_seconds for m in t.messages)
    s = simulated(ddp)
    assert waited == pytest.approx(s.exposed_seconds + s.timeline.idle_seconds(0))
    assert t.by_op().keys() == real.by_op().keys()


# ---- at scale


def sharded(layers):
    """Llama 3 405B's blocks, each on 8 tensor-parallel ranks, forward and backward."""
    mesh = Layout(dp=2048, tp=8).mesh()
    group = mesh.get_group("tp")
    config = replace(preset("llama3-405b"), layers=layers)
    model = Transformer(config, "cpu", torch.bfloat16)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        columns = attention.q, attention.k, attention.v, mlp.gate, mlp.up
        for linear, dim in [(c, 0) for c in columns] + [
            (attention.o, 1),
            (mlp.down, 1),
        ]:
            part = linear.weight.detach().chunk(8, dim)[group.rank()].contiguous()
            linear.weight = torch.nn.Parameter(part)
        for part in (attention, mlp):
            part.register_forward_pre_hook(
                lambda _, x: (differentiable.copy(x[0], group), *x[1:])
            )
            part.register_forward_hook(
                lambda _, __, y: differentiable.all_reduce(y, group)
            )
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    with trace() as t:
        model(tokens, torch.arange(8192).expand_as(tokens)).sum().backward()
    return t


def test_a_model_of_405_billion_parameters_on_16384_accelerators():
    layout = Layout(dp=2048, tp=8)
    few, more = (simulate(sharded, "h100:2048x8", layout, layers) for layers in (1, 3))
    # Four sums a layer: two forward and two backward, of 8,192 x 16,384 in bf16.
    messages = [m for m in more.roles[0].trace.messages if m.op == "all_reduce"]
    assert len(messages) == 4 * 3
    assert {m.payload_bytes for m in messages} == {2 * 8192 * 16384}
    assert {len(m.group) for m in messages} == {8}
    w = wires(cluster("h100:2048x8"))
    one = network.all_reduce_seconds(w, 2 * 8192 * 16384, 8, 8)
    assert more.exposed_seconds == pytest.approx(12 * one)
    # Each layer is the same again.
    layer = (more.step_seconds - few.step_seconds) / 2
    flops = (more.hardware_flops - few.hardware_flops) / 2 / 16_384
    assert 0.4 < flops / layer / H100.peak_flops["bf16"] < 0.8
    assert more.tokens == 2048 * 8192


# ---- the same recording elsewhere


@pytest.mark.parametrize("technique", [replicate, ddp])
def test_one_recording_serves_all_numbers_of_ranks(technique):
    recorded = simulated(technique)
    for where in ("h100:1x8", "a100:64x8", "h100:1x1"):
        moved, own = recorded.at(where), simulated(technique, where)
        assert moved.step_seconds == pytest.approx(own.step_seconds, rel=1e-12)
        assert (moved.tokens, moved.model_flops) == (own.tokens, own.model_flops)
        groups = [m.group for m in moved.roles[0].trace.messages]
        assert groups == [m.group for m in own.roles[0].trace.messages]
        assert moved.memory == own.memory
    sent = [m.wire_bytes for m in recorded.at("h100:1x2").roles[0].trace.messages]
    assert sent == [m.wire_bytes for m in recorded.at("h100:1x2").traces()[0].messages]
    assert max(sent) < max(m.wire_bytes for m in recorded.roles[0].trace.messages)


def test_what_depends_on_the_number_of_ranks_is_recorded_again():
    def gathered():
        part = torch.zeros(4)
        whole = torch.zeros(4 * world_size())
        with trace() as t:
            dist.all_gather_into_tensor(whole, part)
        return t

    s = simulate(gathered, "h100:1x8")
    assert s.at("a100:1x8").step_seconds > 0
    with pytest.raises(ValueError, match=r"all_gather .* record again"):
        s.at("h100:2x8")
    with pytest.raises(ValueError, match="2 ranks at least"):
        simulated(ddp, "h100:1x1").at("h100:1x8")
    s = simulate(stage, "h100:2x4", Layout(pp=2, dp=4), 512)
    assert s.at("h100:4x8").layout == Layout(pp=2, dp=16)
    assert s.at("h100:4x8").meetings[0].message.peer == 16
    with pytest.raises(ValueError, match="needs 2 ranks, and there are 3"):
        s.at("h100:1x3")


def test_our_own_ring_is_as_fast_as_its_slowest_link():
    def step():
        x = torch.zeros(16 * 1024)
        with trace() as t:
            collectives.all_reduce(x, dist.group.WORLD, "ring")
        return t

    for where, near, ranks in (("h100:1x8", 1, 8), ("h100:2x8", 0, 16)):
        s = simulate(step, where, launch_seconds=0.0)
        w = wires(cluster(where))
        one = network.send_seconds(w, 4 * 1024 * 16 // ranks, near)
        assert s.exposed_seconds == pytest.approx(2 * (ranks - 1) * one)


# ---- what is refused ----


def some_work():
    weight = torch.ones(64, 64)
    work = dist.all_reduce(weight, async_op=True)
    weight @ weight
    work.wait()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"launch_seconds": math.nan}, "launch_seconds=nan"),
        ({"launch_seconds": -1e-3}, "launch_seconds=-0.001"),
        ({"launch_seconds": math.inf}, "launch_seconds=inf"),
        ({"sharing": Sharing(compute=math.nan)}, "compute=nan"),
        ({"sharing": Sharing(compute=2.0)}, "compute=2.0"),
        ({"sharing": Sharing(transfer=1.0)}, "transfer=1.0"),
        ({"tokens": -1}, "tokens=-1"),
    ],
)
def test_a_number_that_no_machine_has_is_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate(some_work, "h100:1x2", **options)


def test_a_step_that_does_nothing_is_refused():
    with pytest.raises(ValueError, match="does nothing"):
        simulate(lambda: None, "h100:1x2")


def test_what_is_not_timed_is_refused():
    def convolve():
        nn.Conv2d(8, 8, 3)(torch.ones(1, 8, 9, 9)).sum().backward()

    with pytest.raises(ValueError, match=r"convolution of .* is not simulated"):
        simulate(convolve, "h100:1x1")


def one_differs(kind: str):
    rank = dist.get_rank()
    dtype = torch.float64 if kind == "dtype" and rank else torch.float32
    size = 64 * (1 + (kind == "size" and rank > 0))
    x = torch.empty(size, 64, dtype=dtype)
    x = x * 2
    dist.broadcast(torch.ones(8), src=rank if kind == "root" else 0)


@pytest.mark.parametrize("kind", ["dtype", "size", "root"])
def test_ranks_that_differ_are_seen(kind):
    assert simulate(one_differs, "h100:1x2", None, "").step_seconds > 0
    with pytest.raises(ValueError, match=r"rank|differ"):
        simulate(one_differs, "h100:1x2", None, kind)


def test_asynchronous_sums_keep_what_they_hold():
    """Eight buckets, dropped by the program before their messages are there."""

    def buckets():
        with trace() as t:
            works = []
            for _ in range(8):
                bucket = torch.ones(100_000)
                works.append(dist.all_reduce(bucket, async_op=True))
                del bucket
            for work in works:
                work.wait()
        return t

    made = simulate(buckets, "h100:1x2")
    assert made.memory_bytes >= 8 * 400_000


def test_what_is_numbered_by_ranks_is_recorded_again():
    """A ring of sends between data-parallel ranks has other peers on other clusters."""

    def ring():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        here, there = torch.ones(1000), torch.empty(1000)
        calls = [
            dist.P2POp(dist.isend, here, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, there, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    made = simulate(ring, "h100:1x8", check=False)
    with pytest.raises(ValueError, match="record again"):
        made.at("h100:4x8")
