"""Each invariant is broken on purpose, on a rank that is not the first.

A break is made after a good step of data-parallel training, so gradients, optimizer
state and tied weights are all there. Several breaks share a launch.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minitrain import Layout, launch
from minitrain.invariants import InvariantError, check_invariants
from minitrain.testing import PROBLEMS, data_share
from minitrain.workload.step import (
    Placement,
    TokenLoss,
    accumulate,
    count_tokens,
    finalize_gradients,
)

Trained = tuple[nn.Module, torch.optim.Optimizer, int]


def trained(mesh: DeviceMesh, problem: str = "tied") -> Trained:
    """A replica after one step, its gradients still there, and this rank's place."""
    model = PROBLEMS[problem].build()
    for parameter in model.parameters():
        parameter.placement = Placement(partial=frozenset({"dp"}))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    share = data_share(PROBLEMS[problem].batch(0), mesh)
    accumulate(model, [share], TokenLoss(count_tokens([share], mesh)))
    finalize_gradients(optimizer, mesh, 1.0)
    optimizer.step()
    return model, optimizer, mesh.get_local_rank("dp")


def outcome(model, mesh, optimizer=None, tied=()) -> str:
    try:
        check_invariants(model, mesh, optimizer, tied)
    except InvariantError as error:
        return str(error)
    return "sound"


def flip(tensor: torch.Tensor, at: int = -1, bit: int = 0) -> None:
    """Changes one bit of one element."""
    raw = tensor.detach().view(-1).view(torch.uint8)
    raw[at] ^= 1 << bit


def parameter(model: nn.Module, name: str = "blocks.1.mlp.up.weight") -> nn.Parameter:
    return dict(model.named_parameters())[name]


# ---- breaks: what the last rank, or every rank, does to its replica


def one_bit(model, optimizer):
    flip(parameter(model))


def a_state_bit(model, optimizer):
    flip(optimizer.state[parameter(model)]["exp_avg_sq"])


def a_state_less(model, optimizer):
    del optimizer.state[parameter(model)]["exp_avg"]


def a_row_less(model, optimizer):
    weight = parameter(model)
    weight.grad = None
    weight.data = weight.data[:-1].clone()


def a_name_less(model, optimizer):
    model.blocks[1].mlp.up.bias = None


def a_name_more(model, optimizer):
    model.extra = nn.Parameter(torch.ones(2))


def untied(model, optimizer):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def no_gradient(model, optimizer):
    parameter(model).grad = None


def a_gradient_bit(model, optimizer):
    flip(parameter(model).grad)


def not_finite(model, optimizer):
    parameter(model).grad[0, 0] = torch.inf


def resized(model, optimizer):
    weight = parameter(model)
    weight.data = weight.data[:-1].clone()


def placed(**where):
    def change(model, optimizer):
        parameter(model).placement = Placement(**where)

    return change


ON_THE_LAST = {  # what the message says of the last rank, L, and of the others, F
    one_bit: "blocks.1.mlp.up.weight: replicas along dp differ, on ranks F | L",
    a_state_bit: "state blocks.1.mlp.up.weight:exp_avg_sq: replicas along dp differ",
    a_state_less: "state blocks.1.mlp.up.weight:exp_avg: along dp missing on ranks L",
    a_row_less: "parameter blocks.1.mlp.up.weight: replicas along dp differ",
    a_name_less: "parameter blocks.1.mlp.up.bias: along dp missing on ranks L",
    a_name_more: "parameter extra: along dp missing on ranks F",
    untied: "embed.tokens.weight and head.weight are tied, but two tensors on ranks L",
    no_gradient: "gradient of blocks.1.mlp.up.weight: along dp missing on ranks L",
    a_gradient_bit: "mlp.up.weight: not complete along dp: differs on ranks F | L",
    not_finite: "gradient of blocks.1.mlp.up.weight: not finite on rank L",
    resized: "gradient of blocks.1.mlp.up.weight: on rank L ((13, 12), ",
    placed(sharded={"dp": 0}): "placed differently on ranks F | L",
    placed(partial=frozenset({"cp"})): "placed differently on ranks F | L",
}
ON_ALL = {
    untied: "embed.tokens.weight and head.weight are tied, but two tensors on ranks A",
    not_finite: "gradient of blocks.1.mlp.up.weight: not finite on rank 0",
    placed(sharded={"ep": 0}): "over axis 'ep', but the mesh has pp, dp, cp, tp",
    placed(partial=frozenset({"edp"})): "over axis 'edp', but the mesh has",
    placed(sharded={"dp": 2}): "sharded over dp on dim 2, but rank 0 has [13, 12]",
    placed(sharded={"dp": -1}): "sharded over dp on dim -1, but rank 0",
    placed(sharded={"tp": 0}, partial=frozenset({"tp"})): "both sharded and partial",
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_broken_on_one_rank_is_told_on_all(ranks: int) -> None:
    def run() -> list[str]:
        mesh = Layout(dp=ranks).mesh()
        told = []
        for breaks in ON_THE_LAST:
            model, optimizer, place = trained(mesh)
            if place == ranks - 1:
                breaks(model, optimizer)
            told.append(outcome(model, mesh, optimizer))
        return told

    first, *others = launch(run, ranks, timeout=20.0)
    assert all(told == first for told in others)
    for text, expected in zip(first, ON_THE_LAST.values(), strict=True):
        front = ", ".join(map(str, range(ranks - 1)))
        assert expected.replace("F", front).replace("L", str(ranks - 1)) in text


def test_what_is_broken_on_every_rank_is_told() -> None:
    def run() -> list[str]:
        mesh = Layout(dp=2).mesh()
        told = []
        for breaks in ON_ALL:
            model, optimizer, _ = trained(mesh)
            breaks(model, optimizer)
            told.append(outcome(model, mesh, optimizer))
        return told

    first, second = launch(run, 2)
    assert first == second
    for text, expected in zip(first, ON_ALL.values(), strict=True):
        assert expected.replace("A", "0, 1") in text


def test_a_good_step_is_sound() -> None:
    def run() -> list[str]:
        mesh = Layout(dp=dist.get_world_size()).mesh()
        told = []
        for problem in (name for name in PROBLEMS if name != "overflow"):
            model, optimizer, _ = trained(mesh, problem)
            told.append(outcome(model, mesh, optimizer))
            optimizer.zero_grad()
            told.append(outcome(model, mesh))
        return told

    for ranks in (1, 3):
        assert {text for told in launch(run, ranks) for text in told} == {"sound"}


def test_no_flip_of_a_bit_goes_unseen() -> None:
    def run() -> list[str]:
        mesh = Layout(dp=3).mesh()
        model = PROBLEMS["buffers"].build()
        tensors = [*model.parameters(), *model.buffers()]
        generator = torch.Generator().manual_seed(0)
        told = []
        for i in range(40):
            tensor = tensors[i % len(tensors)]
            size = tensor.numel() * tensor.element_size()
            at, bit, where = (
                int(torch.randint(n, (), generator=generator)) for n in (size, 8, 3)
            )
            bit = 0 if tensor.dtype == torch.bool else bit
            if dist.get_rank() == where:
                flip(tensor, at, bit)
            told.append(outcome(model, mesh))
            if dist.get_rank() == where:
                flip(tensor, at, bit)
        return [*told, outcome(model, mesh)]

    *told, last = launch(run, 3)[1]
    assert all("along dp differ" in text for text in told)
    assert sum("buffer" in text for text in told) > 10
    assert last == "sound"


def test_equal_nans_are_replicas_and_a_minus_zero_is_not() -> None:
    def run() -> tuple[str, str]:
        mesh = Layout(dp=2).mesh()
        model, _, place = trained(mesh)
        model.zero_grad()
        parameter(model).data[0, 0] = torch.nan
        nan = outcome(model, mesh)
        parameter(model).data[0, 0] = 0.0 if place else -0.0
        return nan, outcome(model, mesh)

    (nan, zero), _ = launch(run, 2)
    assert nan == "sound"
    assert "ranks 0 | 1" in zero


def test_a_gradient_that_nobody_completes() -> None:
    """Each rank has its own sum, and the optimizer does not know the parameter."""

    def run() -> list[str]:
        mesh = Layout(dp=2).mesh()
        model, _, place = trained(mesh)
        told = []
        for gradient in (1.0, float(place)):
            parameter(model).grad.fill_(gradient)
            rest = [p for p in model.parameters() if p is not parameter(model)]
            told.append(outcome(model, mesh, torch.optim.SGD(rest)))
        return told

    for same, different in launch(run, 2):
        assert "partial over dp on rank 0, and not in the optimizer" in same
        assert "not complete along dp" not in same
        assert "not complete along dp" in different


def test_shards_may_differ_and_must_fit() -> None:
    """On dp x tp: a replica of a shard differs along dp, and only there."""

    def run() -> dict[str, str]:
        mesh = Layout(dp=2, tp=2).mesh()
        rank, tp = dist.get_rank(), mesh.get_local_rank("tp")
        model = nn.Linear(3, 5)
        whole = torch.arange(15.0).view(5, 3)
        told = {}

        def shard(value: torch.Tensor) -> None:
            model.weight = nn.Parameter(value)
            model.weight.placement = Placement(sharded={"tp": 0})

        nn.init.zeros_(model.bias)
        shard(whole.tensor_split(2)[tp].clone())
        told["uneven"] = outcome(model, mesh)
        if rank == 3:
            flip(model.weight)
        told["replica"] = outcome(model, mesh)
        shard(torch.ones(2, 3 if rank else 2))
        told["misfit"] = outcome(model, mesh)
        shard(torch.ones(5 if tp else 0, 3))
        if tp:  # an empty shard has no gradient to miss
            model.weight.grad = torch.ones(5, 3)
        told["empty"] = outcome(model, mesh)
        if rank == 3:
            model.weight.grad = None
        told["gradient"] = outcome(model, mesh)
        return told

    first, *others = launch(run, 4)
    assert all(told == first for told in others)
    assert first["uneven"] == first["empty"] == "sound"
    assert "replicas along dp differ, on ranks 1 | 3" in first["replica"]
    assert "along tp" not in first["replica"]
    assert "shards along tp do not fit: {0: [2, 2], 1: [2, 3]}" in first["misfit"]
    assert "gradient of weight: along dp missing on ranks 3" in first["gradient"]


def test_stages_hold_other_names_and_keep_tied_weights_equal() -> None:
    def run() -> dict[str, str]:
        mesh = Layout(pp=2, dp=2).mesh()
        stage = mesh.get_local_rank("pp")
        model = PROBLEMS["tied"].build()
        model.blocks[1 - stage] = None
        if stage:
            model.embed = None
            model.register_buffer("only_here", torch.ones(2))
        else:
            model.head = model.norm = None
        for p in model.parameters():
            p.placement = Placement(sharded={"pp": None})
        told = {"sound": outcome(model, mesh)}
        if dist.get_rank() == 3:
            flip(model.head.weight)
        told["tied"] = outcome(model, mesh)
        if stage:
            model.head.weight.data.zero_()
        told["both"] = outcome(model, mesh)
        return told

    first, *others = launch(run, 4)
    assert all(told == first for told in others)
    assert first["sound"] == "sound"
    assert (
        "parameter head.weight: replicas along dp differ, on ranks 2 | 3"
        in (first["tied"])
    )
    assert "head.weight are tied, but differ along pp: 1 | 3" in first["tied"]
    assert "differ along pp: 0 | 2" in first["both"]
    assert "replicas" not in first["both"]


def test_ties_of_other_models_are_given_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    tied = [("a.weight", "b.weight")]
    check_invariants(model, None, tied=tied)
    model["b"].weight = nn.Parameter(model["a"].weight.detach().clone())
    check_invariants(model, None)
    with pytest.raises(InvariantError, match=r"a.weight and b.weight are tied, but"):
        check_invariants(model, None, tied=tied)


def test_parameters_that_only_the_optimizer_has() -> None:
    def run() -> tuple[str, str]:
        mesh = Layout(dp=2).mesh()
        model, shard = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer = torch.optim.SGD([shard])
        shard.data[1] = dist.get_rank()
        replica = outcome(model, mesh, optimizer)
        shard.placement = Placement(sharded={"dp": 0})
        return replica, outcome(model, mesh, optimizer)

    for replica, shard in launch(run, 2):
        assert "parameter optimizer.param_groups[0][0]: replicas along dp" in replica
        assert shard == "sound"


def test_without_named_axes_it_refuses_to_pass() -> None:
    def run() -> list[str]:
        told = []
        for mesh in (None, init_device_mesh("cpu", (2,))):
            try:
                check_invariants(nn.Linear(2, 2), mesh)
            except ValueError as error:
                told.append(str(error))
        return told

    for told in launch(run, 2):
        assert len(told) == 2 and all("mesh with named axes" in text for text in told)


def test_unusual_tensors() -> None:
    def run() -> list[str]:
        rank, mesh = dist.get_rank(), Layout(dp=2).mesh()
        views = nn.Module()
        whole = torch.ones(3, dtype=torch.complex64).conj()
        views.register_buffer("conjugate", whole)
        views.register_buffer("negative", whole.imag)
        sparse = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(sparse.weight)
        sparse(torch.tensor([1])).sum().backward()
        flat, shards = torch.ones(5), nn.Module()
        for name, first in (("u", slice(0, 3)), ("v", slice(3, 5))):
            own = nn.Parameter(flat[first] if rank == 0 else flat[5:])
            own.placement = Placement({"dp": 0})  # type: ignore[attr-defined]
            shards.register_parameter(name, own)
        told = [outcome(model, mesh) for model in (views, sparse, shards)]
        counted = nn.Linear(2, 2, bias=False)
        nn.init.ones_(counted.weight)
        optimizer = torch.optim.SGD(counted.parameters(), lr=0.1)
        optimizer.state[counted.weight]["step"] = rank
        return [*told, outcome(counted, mesh, optimizer)]

    for told in launch(run, 2):
        assert told[:3] == ["sound"] * 3
        assert "weight:step" in told[3]


def test_a_long_list_of_faults_is_cut() -> None:
    def run() -> str:
        mesh = Layout(dp=2).mesh()
        return outcome(PROBLEMS["plain"].build(dist.get_rank()), mesh)

    text = launch(run, 2)[1]
    assert text.count("\n") == 9
    assert text.endswith("more")
