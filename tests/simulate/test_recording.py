"""What a program holds: operators, starts and waits, and the kernels they become."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitrain import launch, trace
from minitrain.parallel.data import ddp
from minitrain.runtime import Layout, RankError
from minitrain.runtime.operators import Await, Free, Operator, Piece, Start
from minitrain.simulate.program import Kernel, flops, kernels, tokens
from minitrain.simulate.recording import record_roles
from minitrain.trainer import recompute
from minitrain.workload import costs, formulas
from minitrain.workload.model import Transformer
from minitrain.workload.presets import preset
from minitrain.workload.step import Batch, TokenLoss, accumulate


def operators(t):
    return [e for e in t.program if isinstance(e, Operator)]


def mlp_step(every):
    """A data-parallel step of two layers, with each weight in a bucket of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    ddp(model, bucket_bytes=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace(operators=every) as t:
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    return t


def lines(t):
    """A program in words; which storage is which does not matter."""
    for e in t.program:
        if isinstance(e, Operator):
            yield e.phase, e.name, [p[1:] for p in e.reads], [p[1:] for p in e.writes]
        elif not isinstance(e, Free):
            yield e


def test_a_program_is_the_same_on_real_ranks_and_on_fake_ones():
    real = launch(mlp_step, 2, True)[1]
    fake = launch(mlp_step, 2, None, backend="fake", only=[1])[0]
    assert list(lines(fake)) == list(lines(real))
    assert [e for e in fake.program if isinstance(e, Start)] == [Start(0), Start(1)]
    assert launch(mlp_step, 2, None)[0].program == [], "not kept unless asked for"


def test_messages_start_in_backward_and_are_awaited_at_its_end():
    (t,) = launch(mlp_step, 4, None, backend="fake")
    what = [
        e.phase if isinstance(e, Operator) else type(e).__name__.lower()
        for e in t.program
        if not isinstance(e, Free)
    ]
    order = [w for i, w in enumerate(what) if w != (what[i - 1] if i else "")]
    assert order[:5] == ["other", "forward", "backward", "start", "backward"]
    assert order[-3:] == ["start", "await", "optimizer"]
    first, second = (what.index("start"), len(what) - 1 - what[::-1].index("start"))
    assert "backward" in what[first:second], "the first travels while backward runs"
    assert what.count("await") == 2


def transformer(again):
    model = Transformer(preset("tiny"), "cpu")
    if again:
        recompute(model)
    batch = Batch.from_sequences(torch.zeros(2, 33, dtype=torch.long))
    with trace() as t:
        accumulate(model, [batch], TokenLoss(64))
    return t


@pytest.mark.parametrize("again", [False, True])
def test_operations_are_those_of_the_formula(again):
    config = preset("tiny")
    (t,) = launch(transformer, 1, again, backend="fake")
    program = kernels(t.program)
    assert 3 * flops(program, ["forward"]) == costs.model_flops(config, 2, 32)
    # Early-stopping recomputation leaves out the last product of each block.
    last = config.layers * formulas.matmul_flops(64, config.hidden * config.ffn)
    assert flops(program) == costs.step_flops(config, 2, 32, again) - last * again
    assert (flops(program, ["recompute"]) > 0) == again
    assert tokens(t.program) == 2 * 32
    variants = [k.variant for k in program if k.kind == "matrix products"]
    per_layer = 7 * config.layers + 1
    assert variants.count("wgrad") == variants.count("dgrad") == per_layer
    attention = [k for k in program if k.kind == "attention"]
    assert {k.variant for k in attention} == {"causal"}
    assert attention[0].sizes == (2, 4, 2, 32, 32, 16)


# ---- neighbours that only move bytes


def piece(storage, elements, held=None, shape=None):
    nbytes = 4 * elements
    shape = shape or (elements,)
    return Piece(storage, shape, "float32", nbytes, held or nbytes, False)


def operator(name, reads, writes, phase="forward"):
    return Operator(f"aten::{name}", phase, tuple(reads), tuple(writes))


X, Y, Z = (piece(number, 100) for number in range(3))


def moved(program, **how):
    found = (k for k in kernels(program, **how) if isinstance(k, Kernel))
    return [k.sizes[0] for k in found if k.kind == "memory-bound"]


def test_what_a_chain_makes_and_drops_never_leaves_the_chip():
    chain = [operator("relu", [X], [Y]), operator("neg", [Y], [Z]), Free(1)]
    assert moved(chain) == [800]
    assert moved(chain[:2]) == [1200], "it is kept for backward, so it is written"
    assert moved(chain, fuse=False) == [800, 800]


def test_each_tensor_is_read_once():
    assert moved([operator("mul", [X, X], [Y]), operator("add", [X, Y], [Z])]) == [1200]
    halves = [piece(0, 50, held=400), piece(0, 50, held=400)]
    assert moved([operator("sub", halves, [piece(1, 50)])]) == [600]


def test_a_product_or_a_message_ends_a_chain():
    a, b = piece(3, 100, shape=(10, 10)), piece(4, 100, shape=(10, 10))
    product = operator("mm", [a, b], [Z])
    chain = [operator("relu", [X], [Y]), operator("neg", [Y], [Z])]
    for between in (product, Start(0), Await(0)):
        assert moved([chain[0], between, chain[1], Free(1)]) == [800, 800]
    later = chain[1]._replace(phase="backward")
    assert moved([chain[0], later]) == [800, 800]


def test_what_is_overwritten_is_not_read_and_what_is_looked_up_in_part():
    assert moved([operator("copy_", [Y, X], [Y])]) == [800]
    assert moved([operator("add_", [Y, X], [Y])]) == [1200]
    table = piece(5, 10_000)
    assert moved([operator("embedding", [table, X], [Y])]) == [1200]


def test_a_weights_gradient_is_told_by_its_transposed_input():
    def step():
        x, weight = torch.ones(4, 5), torch.zeros(6, 5)
        with trace() as t:
            y = nn.functional.linear(x.requires_grad_(), weight.requires_grad_())
            (y * y).sum().backward()
        return t

    (t,) = launch(step, 1, backend="fake")
    products = [k for k in kernels(t.program) if k.kind == "matrix products"]
    sizes = {k.variant: k.sizes[1:] for k in products}
    assert sizes.pop("wgrad") in ((6, 5, 4), (5, 6, 4)), "it sums over the 4 rows"
    assert sizes == {"forward": (4, 6, 5), "dgrad": (4, 5, 6)}


# ---- roles


def staged():
    """Stages of different sizes; within one, all ranks do the same."""
    stage = dist.get_rank() // 4
    with trace() as t:
        torch.ones(8, 8 * (stage + 1)).sum()
    return [{"step": t}]


def test_one_rank_of_each_role_is_run():
    roles = record_roles(staged, Layout(pp=2, dp=4), (), ("pp",))
    assert [(r.name, r.rank, r.ranks) for r in roles] == [
        ("pp 0", 0, 4),
        ("pp 1", 4, 4),
    ]
    assert len(operators(roles[1].trace)) == 2
    assert operators(roles[1].trace)[0].writes[0].shape == (8, 16)
    (role,) = record_roles(staged, Layout(dp=4), (), ("pp", "tp"))
    assert (role.name, role.ranks) == ("every rank", 4)


def test_ranks_of_a_role_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"rank 0 and rank 7 run different programs"):
        record_roles(staged, Layout(dp=8), (), ())
    record_roles(staged, Layout(dp=8), (), (), check=False)
    with pytest.raises(ValueError, match="no axis"):
        record_roles(staged, Layout(dp=8), (), ("xp",))


def test_a_step_without_a_trace_is_recorded_whole():
    def step(rows):
        dist.all_reduce(torch.ones(rows))

    (role,) = record_roles(step, Layout(dp=4), (7,))
    assert [m.shapes for m in role.trace.messages] == [((7,),)]


def test_a_trace_that_is_not_returned_is_asked_for():
    def step():
        with trace():
            pass

    with pytest.raises(RankError, match="does not return it"):
        record_roles(step, Layout(dp=2), (), check=False)
