"""The trace sees what others see: the profiler, CommDebugMode, the allocator."""

import json
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from minitrain import launch, trace
from minitrain.runtime.messages import even, sent_elements
from minitrain.runtime.tracing import save_chrome


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5))


WEIGHTS = 7 * 9 + 9 + 9 * 5 + 5  # of mlp


def ops(t):
    return [m.op for m in t.messages]


# Messages of PyTorch's own techniques, beside what the profiler's gloo events say


def traced_step(model, optimizer):
    def step():
        model(torch.ones(3, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step()  # wrappers set themselves up in their first two steps
        step()
        activities = [ProfilerActivity.CPU]
        with trace() as t, profile(activities=activities) as profiler:
            step()
    gloo = [e.name for e in profiler.events() if e.name.startswith("gloo:")]
    return t, gloo


def ddp():
    model = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)  # several buckets
    return traced_step(model, torch.optim.AdamW(model.parameters()))


def zero():
    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    return traced_step(model, optimizer)


def fsdp1():
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    return traced_step(model, torch.optim.AdamW(model.parameters()))


def fsdp2():
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return traced_step(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("technique", [ddp, zero, fsdp1, fsdp2])
def test_every_collective_of_the_profiler_is_seen(technique):
    for t, gloo in launch(technique, 2):
        theirs = sorted(name.removeprefix("gloo:") for name in gloo)
        # gloo's reduce-scatter really is an all-reduce
        ours = sorted(op.replace("reduce_scatter", "all_reduce") for op in ops(t))
        assert ours == theirs
        assert ours, "nothing was sent"
        assert all(m.end_seconds > m.start_seconds for m in t.messages)
        assert all(m.caller.startswith("test_tracing.py:") for m in t.messages)


def test_volumes_of_ddp_and_zero():
    for t, _ in launch(ddp, 2):
        total = t.by_op()["all_reduce"]
        assert total.payload_bytes == 4 * WEIGHTS
        assert total.calls == 2
        assert all(m.async_ for m in t.messages)
    for t, _ in launch(zero, 3):
        assert t.by_op()["all_reduce"].payload_bytes == 4 * WEIGHTS
        assert t.by_op()["broadcast"].payload_bytes == 4 * WEIGHTS


def test_volume_of_fsdp2_counts_its_padding():
    shapes = [(9, 7), (9, 1), (5, 9), (5, 1)]
    padded = 4 * sum(2 * -(-rows // 2) * width for rows, width in shapes)
    for t, _ in launch(fsdp2, 2):
        assert t.by_op()["reduce_scatter"].payload_bytes == padded
        assert t.by_op()["reduce_scatter"].wire_bytes == padded // 2
        assert t.by_op()["all_gather"].payload_bytes == 2 * padded


def test_dtensor_agrees_with_comm_debug_mode():
    def collectives():
        mesh = init_device_mesh("cpu", (2,))
        a = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
        b = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
        rows = distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)])
        columns = distribute_tensor(torch.ones(6, 6), mesh, [Shard(1)])

        def work():
            (a @ b).redistribute(mesh, [Replicate()]).to_local().sum()
            (columns @ rows).redistribute(mesh, [Replicate()]).to_local().sum()

        with CommDebugMode() as debug:
            work()
        with trace() as t:
            work()
        return t, {str(k): n for k, n in debug.get_comm_counts().items()}

    for t, counts in launch(collectives, 2):
        assert {op: total.calls for op, total in t.by_op().items()} == {
            "all_gather": counts["c10d_functional.all_gather_into_tensor"],
            "all_reduce": counts["c10d_functional.all_reduce"],
        }


# Messages of plain calls


def traced(work):
    with trace() as t:
        work()
    return t


def test_functional_and_coalesced_collectives():
    def work():
        world = dist.group.WORLD
        functional.all_reduce(torch.ones(5), "sum", world) + 1
        functional.all_gather_tensor(torch.ones(2, 3), 0, world) + 1
        functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, world) + 1
        for x in functional.all_reduce_coalesced([torch.ones(3)] * 2, "sum", world):
            x + 1
        with dist._coalescing_manager(async_ops=True) as pending:
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
        pending.wait()

    for t in launch(traced, 2, work):
        assert [(m.op, m.payload_bytes) for m in t.messages] == [
            ("all_reduce", 20),
            ("all_gather", 48),
            ("reduce_scatter", 32),
            ("all_reduce", 24),
            ("all_reduce", 28),
        ]
        ended = [m.end_seconds for m in t.messages]
        assert ended == sorted(ended)
        assert ended[-2] < t.seconds


def test_an_asynchronous_call_ends_when_it_is_complete_not_when_it_is_waited_for():
    def work():
        import time

        rank = dist.get_rank()
        pending = dist.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(0.3)
        pending.wait()
        dist.broadcast(torch.ones(3), 1)
        if rank == 0:
            dist.send(torch.ones(2), 1)
            time.sleep(0.3)
        else:
            dist.recv(torch.ones(2), 0)
        dist.irecv(torch.ones(3), 0).wait() if rank else dist.isend(
            torch.ones(3), 1
        ).wait()

    first, second = launch(traced, 2, work)
    for t in (first, second):
        reduced, broadcast, sync, asynchronous = t.messages
        assert reduced.end_seconds - reduced.start_seconds < 0.25
        assert (reduced.async_, broadcast.async_) == (True, False)
        assert (sync.async_, asynchronous.async_) == (False, True)
        assert (reduced.peer, broadcast.peer) == (None, 1)
    assert (first.messages[2].op, first.messages[2].peer) == ("send", 1)
    assert (second.messages[2].op, second.messages[2].peer) == ("recv", 0)
    assert second.messages[3].waited_seconds > 0.25  # its sender came late
    assert first.messages[3].waited_seconds < 0.25


def test_peers_and_groups_are_global_ranks():
    def work():
        rank = dist.get_rank()
        odd = dist.new_group([1, 3])
        with trace() as t:
            if rank in (1, 3):
                other = 4 - rank
                batch = [
                    dist.P2POp(dist.isend, torch.ones(3), other, odd),
                    dist.P2POp(dist.irecv, torch.ones(3), other, odd),
                ]
                for pending in dist.batch_isend_irecv(batch):
                    pending.wait()
                dist.broadcast(torch.ones(6), src=3, group=odd)
                dist.all_reduce(torch.ones(6), group=odd)
        return t

    idle, first, _, second = launch(work, 4)
    assert not idle.messages
    for t, other in ((first, 3), (second, 1)):
        assert {m.group for m in t.messages} == {(1, 3)}
        assert [m.peer for m in t.messages] == [other, other, 3, None]
        assert [m.kind for m in t.messages[:2]] == ["p2p", "p2p"]
        assert t.by_op()["send"].wire_bytes == 12
        assert t.by_op()["recv"].wire_bytes == 0
        assert t.by_op()["all_reduce"].wire_bytes == 24
    assert first.by_op()["broadcast"].wire_bytes == 0
    assert second.by_op()["broadcast"].wire_bytes == 24


def test_wire_bytes_of_uneven_pieces():
    def work():
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.all_reduce(torch.ones(7, dtype=torch.bfloat16))
        sent = [rank + i + 1 for i in range(world)]  # rows for each rank
        dist.all_to_all_single(
            torch.ones(sum(sent), 2), torch.ones(sum(sent), 2), sent, sent
        )
        gathered = torch.ones(6)
        dist.all_gather_single(gathered, torch.ones(2))
        dist.all_gather(list(gathered.view(3, 2)), torch.ones(2))
        dist.reduce_scatter_single(torch.ones(2), gathered)

    traces = launch(traced, 3, work)
    sent = [[m.wire_bytes for m in t.messages] for t in traces]
    # pieces of the all-reduce: 3, 2, 2 elements
    assert [row[0] for row in sent] == [2 * (4 + 5), 2 * (5 + 5), 2 * (5 + 4)]
    assert [row[1] for row in sent] == [8 * (2 + 3), 8 * (2 + 4), 8 * (3 + 4)]
    assert all(row[2:] == [16, 16, 16] for row in sent)
    assert sum(row[0] for row in sent) == 2 * (3 - 1) * 14


def test_a_world_of_one_sends_nothing():
    def work():
        dist.all_reduce(torch.ones(5))
        dist.all_gather_single(torch.ones(5), torch.ones(5))
        dist.all_to_all_single(torch.ones(5), torch.ones(5), [5], [5])

    (t,) = launch(traced, 1, work)
    assert t.payload_bytes == 60
    assert t.wire_bytes == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("elements", [0, 1, 4, 11])
def test_sent_elements_are_those_of_a_simulated_ring(ranks, elements):
    pieces = even(elements, range(ranks))
    assert sum(pieces) == elements
    assert max(pieces) - min(pieces) <= 1
    scattered, gathered = [0] * ranks, [0] * ranks
    for step in range(ranks - 1):
        for rank in range(ranks):  # piece p starts at p + 1 and ends at its owner p
            scattered[rank] += pieces[(rank - step - 1) % ranks]
            gathered[rank] += pieces[(rank - step) % ranks]
    for rank in range(ranks):
        assert sent_elements("reduce_scatter", pieces, rank) == scattered[rank]
        assert sent_elements("all_gather", pieces, rank) == gathered[rank]
        both = scattered[rank] + gathered[rank]
        assert sent_elements("all_reduce", pieces, rank) == both


def test_an_unknown_operator_has_no_model():
    with pytest.raises(ValueError, match="no wire model for the operator 'gossip'"):
        sent_elements("gossip", [1, 1], 0)


def test_a_simulated_cluster_is_traced_by_the_same_recorder():
    """Fake ranks and fake tensors: 64 GiB of weights that nobody allocates."""

    def work():
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.destroy_process_group()
        ranks = 16384
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=ranks)
        with FakeTensorMode(), trace() as t:
            layer = nn.Linear(2**17, 2**17, bias=False)
            layer(torch.ones(1, 2**17)).sum().backward()
            dist.all_reduce(layer.weight.grad)
            dist.all_gather_single(torch.ones(ranks * 4), torch.ones(4))
        return t

    (t,) = launch(work, 1)
    weight = 4 * 2**34
    reduced, gathered = t.messages
    assert (t.rank, t.world_size, len(reduced.group)) == (5, 16384, 16384)
    assert reduced.payload_bytes == weight
    assert reduced.wire_bytes == 2 * (weight - weight // 16384)
    assert gathered.wire_bytes == 16 * 16383
    assert t.peak_bytes["parameters"] == t.peak_bytes["gradients"] == weight


# Memory


def test_kinds_of_a_training_step():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(3, 7)
    with trace() as t:
        model(x).sum().backward()
        optimizer.step()
    assert t.peak_bytes["parameters"] == 4 * WEIGHTS
    assert t.peak_bytes["gradients"] == 4 * WEIGHTS
    assert t.peak_bytes["optimizer state"] == 4 * (2 * WEIGHTS + 4)  # and 4 steps
    # ReLU saves its output and nothing else; the loss's gradient is a number.
    assert t.peak_bytes["activations"] == 4 * 3 * 9 + 4
    assert t.peak_bytes["communication"] == 0
    first = dict.fromkeys(t.peak_bytes, 0)
    for seconds, kind, delta in t.memory:
        if seconds > 0:
            break
        first[kind] += delta
    assert first["parameters"] == 4 * WEIGHTS  # there from the start
    assert sum(first.values()) == 4 * WEIGHTS


def test_gradients_are_known_without_an_optimizer():
    model = mlp()
    with trace() as t:
        for _ in range(2):
            model(torch.ones(3, 7)).sum().backward()
    largest = 4 * (63 + 9 + 45 + 5)
    assert t.peak_bytes["gradients"] >= largest
    assert t.peak_bytes["optimizer state"] == 0


def test_recomputed_activations_live_only_in_backward():
    from torch.utils.checkpoint import checkpoint

    def peak(recompute):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)]
        with trace() as t:
            x = torch.ones(64, 8, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            x.sum().backward()
        return t.peak_bytes["activations"]

    one, seed = 4 * 64 * 8, 4  # backward begins with a gradient of one number
    assert peak(False) == 2 * 6 * one + seed  # input and middle of each layer
    assert peak(True) == (6 + 1) * one + seed  # inputs, and the middle of one layer


def test_a_buffer_dies_with_its_last_use_though_its_message_is_kept():
    def work():
        for _ in range(10):
            pending = dist.all_reduce(torch.ones(1000), async_op=True)
            pending.wait()
            del pending

    for t in launch(traced, 2, work):
        # gloo's thread may still be letting go of one when the next is made
        assert t.peak_bytes["communication"] <= 2 * 4000
        assert t.by_op()["all_reduce"].payload_bytes == 10 * 4000


def test_storage_resizes_are_seen():
    with trace() as t:
        x = torch.ones(100)
        x.untyped_storage().resize_(0)
        y = torch.ones(50)
        x.untyped_storage().resize_(400)
        y.resize_(200)
    assert t.peak_total_bytes == 400 + 800
    assert [delta for *_, delta in t.memory[:5]] == [400, -400, 200, 400, 600]


def test_a_graph_that_is_dropped_without_backward_is_freed():
    """Saved outputs (of exp, softmax, norms) must not keep their own graph alive."""
    x = torch.randn(1000, requires_grad=True)
    with trace() as t:
        for _ in range(5):
            y = x.exp()
            del y
    assert t.peak_total_bytes == 2 * 4000  # the leaf and one output
    with trace() as t:
        (first,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, x.exp())


def test_sparse_tensors_pass():
    table = nn.Embedding(10, 3, sparse=True)
    with trace() as t:
        table(torch.tensor([1, 1, 7])).sum().backward()
    assert table.weight.grad.is_sparse
    assert t.peak_bytes["parameters"] == 10 * 3 * 4


def test_views_cost_nothing_and_data_made_inside_is_born_inside():
    with trace() as t:
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        x.view(2, 2).t()[0].add_(1)
    assert t.memory[0][1:] == ("other", 16)
    assert t.peak_total_bytes == 16
    assert t.memory[0][0] > 0


def allocated_peak(work, observer):
    """Peak of what the allocator gave out during `work`, and what `observer` saw."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as profiler, observer as t:
        work()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, t


def test_the_allocator_saw_little_more_and_the_same_without_a_trace():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(4, 16, 32)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plain, _ = allocated_peak(step, nullcontext())
    allocated, t = allocated_peak(step, trace())
    assert plain == allocated, "tracing keeps tensors alive"
    live = peak = 0
    for seconds, _, delta in t.memory:
        if seconds > 0:  # the rest was there before the profiler came
            live += delta
            peak = max(peak, live)
    peak -= x.nbytes
    scratch = 2 * 4 * 16 * 64 * 4  # inside kernels: two of the widest activation
    assert peak <= allocated <= peak + scratch


def test_tracing_changes_no_bit():
    def gradients(observer):
        model = mlp()
        with observer:
            for _ in range(2):
                model(torch.linspace(-1, 1, 21).view(3, 7)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    plain, traced = gradients(nullcontext()), gradients(trace())
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


# The result


def test_results_are_plain_data():
    def work():
        dist.all_reduce(torch.ones(4))

    for t in launch(traced, 2, work):
        again = pickle.loads(pickle.dumps(t))
        assert again.messages == t.messages
        assert again.memory == t.memory
        assert "0x" not in repr(t) + t.table().text + t.memory_table().text
        assert t.table().rows[0][:3] == ["1", "all_reduce", "0,1"]
        assert t.op_table().rows == [["all_reduce", "1", "16 B", "16 B"]]


def test_chrome_events(tmp_path):
    def work():
        dist.all_reduce(torch.ones(4))

    traces = launch(traced, 2, work)
    save_chrome(traces, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begins = [e for e in events if e["ph"] == "b"]
    assert [(e["pid"], e["name"]) for e in begins] == [
        (0, "all_reduce"),
        (1, "all_reduce"),
    ]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    assert max(e["args"]["communication"] for e in events if e["ph"] == "C") == 16
    assert all(e["ts"] >= 0 for e in events if "ts" in e)


def test_a_trace_inside_a_trace_is_refused_and_the_outer_one_goes_on():
    with trace() as t:
        with pytest.raises(RuntimeError, match="already running"), trace():
            pass
        torch.ones(5)
    assert t.peak_total_bytes == 20


def _divide_after_use(parameter):
    return parameter * 2, 1 // 0


def test_an_exception_leaves_the_trace_so_far_and_no_hooks_behind():
    resize = torch.UntypedStorage.resize_
    wait = torch._C._distributed_c10d.Work.wait
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError), trace() as t:
        _divide_after_use(parameter)
    assert t.peak_bytes["parameters"] == 12
    assert torch.UntypedStorage.resize_ is resize
    assert torch._C._distributed_c10d.Work.wait is wait
    assert not parameter._backward_hooks
