"""Layout: the arithmetic against an independent count, and every rule it keeps."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minitrain import Layout, launch

degrees = st.integers(1, 4)
layouts = st.builds(Layout, dp=degrees, pp=degrees, cp=degrees, tp=degrees)


@given(layouts)
def test_rank_and_coordinates_are_inverse(layout):
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(**place) for place in places] == list(range(layout.world_size))
    assert len({tuple(p.values()) for p in places}) == layout.world_size


@given(layouts, st.sampled_from(["pp", "dp", "cp", "tp"]))
def test_groups_partition_the_world_and_differ_along_one_axis(layout, axis):
    groups = layout.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        assert [p.pop(axis) for p in places] == list(range(getattr(layout, axis)))
        assert all(p == places[0] for p in places)


@given(degrees, degrees, degrees, degrees)
def test_experts_see_the_same_ranks(edp, ep, pp, tp):
    layout = Layout(dp=edp * ep, pp=pp, tp=tp, ep=ep)
    assert layout.edp == edp
    for axis, size in (("ep", ep), ("edp", edp)):
        groups = layout.groups(axis)
        assert all(len(g) == size for g in groups)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))


def test_tensor_parallel_ranks_are_neighbours():
    assert Layout(dp=2, tp=4).groups("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert Layout(dp=2, pp=2).groups("pp") == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp": 0}, "dp=0"),
        ({"tp": -2}, "tp=-2"),
        ({"pp": 1.5}, "pp=1.5"),
        ({"cp": True}, "cp=True"),
        ({"ep": 3, "dp": 4}, r"ep=3 does not divide dp\*cp = 4\*1 = 4"),
    ],
)
def test_illegal_degrees(degrees, words):
    with pytest.raises(ValueError, match=words):
        Layout(**degrees)


SIZES = {"layers": 4, "heads": 8, "kv_heads": 4, "ffn": 32, "sequence": 64}


@pytest.mark.parametrize(
    ("layout", "sizes", "words"),
    [
        (Layout(tp=3), {}, "tp=3 does not divide heads=8"),
        (Layout(tp=8), {}, "tp=8 does not divide kv_heads=4"),
        (Layout(pp=5), {}, "pp=5 stages of 4 layers"),
        (Layout(cp=2), {"sequence": 66}, "divisible by 4, not 66"),
        (Layout(tp=4), {"ffn": 30}, "ffn=30"),
    ],
)
def test_models_that_cannot_be_split_so(layout, sizes, words):
    with pytest.raises(ValueError, match=words):
        layout.check_model(**{**SIZES, **sizes})
    Layout(tp=4, pp=4, cp=2).check_model(**SIZES)  # and one that can


def test_micro_batches_of_a_step():
    assert Layout(dp=4).check_batch(32, 2) == 4
    with pytest.raises(ValueError, match=r"global_batch=30.*4\*2 = 8"):
        Layout(dp=4).check_batch(30, 2)


def test_the_wrong_number_of_ranks_and_places_that_are_not_there():
    with pytest.raises(ValueError, match="needs 4 ranks, and there are 3"):
        Layout(dp=4).check_world_size(3)
    with pytest.raises(ValueError, match="rank 4"):
        Layout(dp=4).coordinates(4)
    with pytest.raises(ValueError, match="dp=4 is outside"):
        Layout(dp=4).rank(dp=4)
    with pytest.raises(ValueError, match="no axis"):
        Layout(dp=4).rank(xp=0)
    with pytest.raises(ValueError, match="no axis 'xp'"):
        Layout(dp=4).groups("xp")


def test_the_mesh_has_the_groups_that_the_arithmetic_says():
    layout = Layout(dp=2, tp=2)

    def f():
        mesh = layout.mesh()
        x = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(x, group=mesh["tp"].get_group())
        return mesh.mesh_dim_names, x.item(), layout.expert_mesh().shape

    results = launch(f, 4)
    sums = [sum(2.0**r for r in g) for g in layout.groups("tp") for _ in g]
    assert [value for _, value, _ in results] == sums
    assert results[0][0] == ("pp", "dp", "cp", "tp")
    assert results[0][2] == (1, 2, 1, 2)


def test_a_mesh_in_the_wrong_world_is_refused():
    with pytest.raises(Exception, match="needs 4 ranks, and there are 2"):
        launch(lambda: Layout(dp=4).mesh(), 2)
