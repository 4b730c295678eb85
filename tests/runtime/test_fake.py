"""A rank of a world that is not there runs the same program as one that is."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitrain import launch, trace
from minitrain.collectives import all_reduce
from minitrain.parallel.data import ddp, horovod, replicate
from minitrain.runtime import Layout, RankError, read, world_size
from minitrain.runtime.values import gather_objects
from minitrain.trainer import autocast, recompute
from minitrain.workload.model import Transformer
from minitrain.workload.presets import preset
from minitrain.workload.step import (
    Batch,
    TokenLoss,
    accumulate,
    count_tokens,
    finalize_gradients,
)

small = partial(launch, backend="fake")


def test_the_world_has_any_size_and_a_few_ranks_run():
    def where():
        return dist.get_rank(), dist.get_world_size(), os.getpid()

    (first, size, one), (last, _, other) = small(where, 65_536, only=(7, 65_535))
    assert (first, last, size) == (7, 65_535, 65_536)
    assert len({one, other, os.getpid()}) == 3
    assert not dist.is_initialized(), "the caller's own group is left alone"


def test_tensors_have_shapes_and_no_values():
    def f(x, model):
        y = model(x + 1)
        dist.all_reduce(y)
        with pytest.raises(ValueError, match="no value"):
            read(y.sum())
        return y, read(y.sum(), expected=3), y.stride()

    x = torch.ones(4, 2**40, device="meta")  # 16 TiB
    wide = nn.Linear(2**40, 3, bias=False, device="meta", dtype=torch.float32)
    ((y, value, stride),) = small(f, 2, torch.ones(4, 5), nn.Linear(5, 3))
    assert (y.shape, y.device.type, value, stride) == ((4, 3), "meta", 3, (3, 1))
    assert x.numel() * 4 > 2**43 and wide.weight.numel() == 3 * 2**40


def test_a_model_larger_than_memory_fits():
    def f():
        weight = torch.empty(2**24, 2**24, requires_grad=True)  # 1 PiB
        (weight @ torch.ones(2**24, 1)).sum().backward()
        return weight.grad.shape

    assert small(f, 16_384) == [(2**24, 2**24)]


def test_tied_weights_of_an_argument_stay_tied():
    def f(model):
        return model[0].weight is model[1].weight, len(list(model.parameters()))

    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert small(f, 2, model) == [(True, 1)]


def test_meshes_and_objects_work_without_values():
    def f():
        layout = Layout(pp=2, dp=4, tp=8)
        mesh = layout.mesh()
        tp = dist.get_process_group_ranks(mesh.get_group("tp"))
        return tp, mesh["dp"].size(), gather_objects("me", mesh.get_group("pp"))

    assert small(f, 64, only=[63])[0] == (list(range(56, 64)), 4, ["me"] * 2)
    layout = Layout(pp=2, dp=4, tp=8)
    assert tuple(range(56, 64)) in layout.groups("tp")


def step_of(technique, precision, again, parts):
    """The trace of a second step: what every chapter does."""
    mesh = Layout(dp=world_size()).mesh("cpu")
    model = Transformer(preset("tiny"), "cpu")
    if again:
        recompute(model)
    if precision == "bf16":
        autocast(model, torch.device("cpu"), torch.bfloat16)
    if technique:
        technique(model, mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        sequences = torch.zeros(4, 33, dtype=torch.long)
        batches = Batch.from_sequences(sequences).split(parts)
        loss_fn = TokenLoss(count_tokens(batches, mesh))
        accumulate(model, batches, loss_fn)
        finalize_gradients(optimizer, mesh, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with trace() as t:
        step()
    return t


def facts(message):
    return {
        name: getattr(message, name)
        for name in message.__slots__
        if not name.endswith("seconds")
    }


def freed(t):
    return sorted(change[1:] for change in t.memory)


@pytest.mark.parametrize(
    ("technique", "precision", "again", "parts"),
    [
        (None, "fp32", False, 1),
        (replicate, "fp32", False, 1),
        (ddp, "fp32", False, 1),
        (ddp, "fp32", False, 3),
        (ddp, "fp32", True, 1),
        (ddp, "bf16", True, 2),
    ],
)
def test_it_says_and_holds_what_a_real_rank_does(technique, precision, again, parts):
    how = technique, precision, again, parts
    for ours, real in zip(
        small(step_of, 2, *how, only=(0, 1)), launch(step_of, 2, *how), strict=True
    ):
        assert list(map(facts, ours.messages)) == list(map(facts, real.messages))
        assert ours.messages
        assert ours.peak_bytes == real.peak_bytes
        assert ours.at_peak == real.at_peak
        assert freed(ours) == freed(real), "every storage is seen, on both"
        assert ours.peak_total_bytes > 4 * 2**16, "the step was not seen"


def test_our_own_collectives_and_batched_sends_run():
    def f():
        x = torch.zeros(64)
        with trace() as t:
            all_reduce(x, dist.group.WORLD)
            next_one = (dist.get_rank() + 1) % world_size()
            calls = [dist.P2POp(dist.isend, x, next_one), dist.P2POp(dist.irecv, x, 0)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return t.wire_bytes, [m.op for m in t.messages[-2:]]

    wire, last = small(f, 4, only=[1])[0]
    assert (wire, last) == (2 * 3 * 64 + 256, ["send", "recv"])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"only": [4]}, "not in a world of 4"),
        ({"only": [1, 1]}, "different ranks"),
        ({"only": []}, "between 1 and"),
        ({"backend": None, "only": [1]}, "fake"),
        ({"check": True}, "nobody to compare"),
    ],
)
def test_what_makes_no_sense_is_refused(how, words):
    with pytest.raises(ValueError, match=words):
        launch(int, 4, **{"backend": "fake", **how})


def test_an_error_names_the_rank_and_the_world():
    with pytest.raises(RankError, match="rank 5 of 16384 raised ZeroDivisionError"):
        small(lambda: 1 / 0, 16_384, only=[5])


def test_horovod_says_that_it_needs_values():
    def f():
        horovod(nn.Linear(2, 2))

    with pytest.raises(RankError, match="use ddp"):
        small(f, 2)


def test_what_is_known_of_an_operator_is_told_apart_by_its_arguments():
    def f():
        x = torch.zeros(4, 6, dtype=torch.int64)
        dtypes = [(x + a).dtype for a in (1, 1.0, True, 1, 1.0)]
        shapes = [x.sum(dim).shape for dim in (0, 1, 0)]
        strides = [y.clone().stride() for y in (x, x.t(), x[:, ::2], x)]
        parts = [[tuple(p.shape) for p in x.split(n, 1)] for n in (2, 4, [1, 5], 2)]
        torch.set_default_dtype(torch.float64)
        return dtypes, shapes, strides, parts, [(x + a).dtype for a in (1, 1.0)]

    assert small(f, 2) == launch(f, 1)


def test_a_module_changes_its_type_and_stays_tied():
    def convert():
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
        model[1].weight = model[0].weight
        model[0].weight.placement = "kept"
        model.to(torch.bfloat16)
        assert model[1].weight is model[0].weight
        assert model[0].weight.placement == "kept"
        model(torch.zeros(2, dtype=torch.long)).sum().backward()
        model.double()
        return (
            model[1].weight.dtype,
            model[0].weight.grad.dtype,
            len([*model.parameters()]),
        )

    assert small(convert, 2) == [(torch.float64, torch.float64, 2)]


@pytest.mark.parametrize("look", [bool, float, torch.nonzero])
def test_who_looks_at_a_value_is_told_what_to_do(look):
    with pytest.raises(RankError, match=r"runtime.read\(tensor, expected=...\)"):
        small(lambda: look(torch.ones(1)), 2)
