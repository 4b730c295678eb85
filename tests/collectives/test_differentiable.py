"""Each pair against one process: values, gradients, and gradients of gradients.

A case has inputs (one that all ranks share, or one each), a plain form that makes all
ranks' outputs of all inputs, and a loss (one that all ranks share, or a term each).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minitrain import RankError, launch, trace
from minitrain.collectives import differentiable as d
from minitrain.testing import assert_close

SHARED_INPUT = {"copy", "scatter"}
SHARED_LOSS = {"all_reduce", "gather"}
SIZES = (3, 0, 2, 1)  # of up to four ranks


@dataclass(frozen=True)
class Case:
    name: str
    shapes: Sequence[tuple[int, ...]]  # of each rank's input
    options: Sequence[dict]  # of each rank's call
    plain: Callable[[list[Tensor]], list[Tensor]]

    def label(self) -> str:
        return f"{self.name} {self.shapes} {self.options}"


def cases(ranks: int) -> Iterator[Case]:
    """Every function over dims and sizes, uneven ones with an empty part."""
    for dim in (0, 1, -1):
        for sizes in ((2,) * ranks, SIZES[:ranks]):
            given = (
                {"dim": dim} if len(set(sizes)) == 1 else {"dim": dim, "sizes": sizes}
            )
            whole, options = [2, 3, 4], [given] * ranks
            whole[dim] = sum(sizes)
            parts = [tuple(p.shape) for p in torch.empty(whole).split(sizes, dim)]

            def join(xs: list[Tensor], dim: int = dim) -> list[Tensor]:
                return [torch.cat(xs, dim)] * ranks

            def split(xs: list[Tensor], dim: int = dim, sizes=sizes) -> list[Tensor]:
                return list(sum(xs).split(sizes, dim))

            yield Case("all_gather", parts, options, join)
            yield Case("gather", parts, options, join)
            yield Case("reduce_scatter", [tuple(whole)] * ranks, options, split)
            yield Case("scatter", [tuple(whole)], options, split)
    for shape in ((2, 3), (), (0, 2)):
        none: list[dict] = [{}] * ranks
        yield Case("copy", [shape], none, lambda xs: [xs[0]] * ranks)
        yield Case("all_reduce", [shape] * ranks, none, lambda xs: [sum(xs)] * ranks)
    yield from all_to_alls(ranks)


def all_to_alls(ranks: int) -> Iterator[Case]:
    """Equal parts; a table of who sends how much; and from one dim to another."""

    def plain(xs: list[Tensor], table, dim: int, to_dim: int) -> list[Tensor]:
        parts = [x.split(list(row), dim) for x, row in zip(xs, table, strict=True)]
        return [torch.cat([p[r] for p in parts], to_dim) for r in range(ranks)]

    equal = [[2] * ranks] * ranks
    uneven = [[(3 * r + 2 * i) % 4 for i in range(ranks)] for r in range(ranks)]
    tables = [equal, uneven, [[0] * ranks] * ranks]
    if ranks == 3:  # it is its own mirror image, so hides a backward that goes forward
        tables.append([[3, 2, 1], [2, 2, 2], [1, 2, 3]])
    for dim in (0, -1):
        for table in tables:
            shapes = [(sum(row), 5) if dim == 0 else (5, sum(row)) for row in table]
            options = [{"dim": dim, "sizes": row} for row in table]
            if table is equal:
                options = [{"dim": dim}] * ranks
            yield Case(
                "all_to_all",
                shapes,
                options,
                lambda xs, t=table, dim=dim: plain(xs, t, dim, dim),
            )
    for sizes in ((2,) * ranks, SIZES[:ranks]):
        lengths = [1] * ranks if sizes[0] == 2 else [(r + 1) % 3 for r in range(ranks)]
        given: dict = {"dim": 2, "to_dim": 1}
        if sizes[0] != 2:
            given |= {"sizes": sizes, "received": lengths}
        yield Case(
            "all_to_all",
            [(2, lengths[r], sum(sizes)) for r in range(ranks)],
            [given] * ranks,
            lambda xs, sizes=sizes: plain(xs, [sizes] * ranks, 2, 1),
        )


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers of a seed, laid out with the dims in reverse order in memory."""
    generator = torch.Generator().manual_seed(seed)
    backwards = tuple(reversed(shape))
    x = torch.randn(backwards, generator=generator, dtype=torch.float64)
    return x.permute(*reversed(range(len(shape)))) if shape else x


def weight(case: Case, rank: int, shape: Sequence[int]) -> Tensor:
    return drawn(shape, 100 if case.name in SHARED_LOSS else 100 + rank)


def direction(case: Case, rank: int, shape: Sequence[int]) -> Tensor:
    return drawn(shape, 200 if case.name in SHARED_INPUT else 200 + rank)


Result = tuple[Tensor, Tensor, Tensor]  # output, gradient, gradient of v . gradient


def expected(case: Case, ranks: int) -> list[Result]:
    """Of each rank, by one process."""
    xs = [drawn(s, i).requires_grad_() for i, s in enumerate(case.shapes)]
    ys = case.plain(xs)
    terms = [(weight(case, r, y.shape) * y**3).sum() for r, y in enumerate(ys)]
    loss = terms[0] if case.name in SHARED_LOSS else sum(terms)
    gs = torch.autograd.grad(loss, xs, create_graph=True)
    along = [(direction(case, r, g.shape) * g).sum() for r, g in enumerate(gs)]
    hs = torch.autograd.grad(sum(along), xs)
    results = [(gs[i], hs[i]) for i in range(len(xs))]
    each = results * ranks if case.name in SHARED_INPUT else results
    return [(y.detach(), g.detach(), h) for y, (g, h) in zip(ys, each, strict=True)]


def computed(case: Case) -> Result:
    """Of this rank, by the function."""
    rank = dist.get_rank()
    own = 0 if case.name in SHARED_INPUT else rank
    x = drawn(case.shapes[own], own).requires_grad_()
    y = getattr(d, case.name)(x, **case.options[rank])
    loss = (weight(case, rank, y.shape) * y**3).sum()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (h,) = torch.autograd.grad((direction(case, rank, g.shape) * g).sum(), x)
    return y.detach(), g.detach(), h


def compare(case: Case, ranks: int, results: Sequence[Result]) -> None:
    wanted = expected(case, ranks)
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        what = ("output", "gradient", "second gradient")
        for a, b, name in zip(got, want, what, strict=True):
            assert_close(a, b, name=f"{name} of {case.label()} on rank {rank}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_values_and_gradients_are_those_of_one_process(ranks: int) -> None:
    def run() -> list[Result]:
        return [computed(case) for case in cases(ranks)]

    results = launch(run, ranks, timeout=20.0)
    for i, case in enumerate(cases(ranks)):
        compare(case, ranks, [result[i] for result in results])


def test_all_functions_are_tested_uneven_and_empty() -> None:
    names = [case.name for case in cases(3)]
    assert set(names) == set(d.PAIRS)
    assert all(names.count(name) >= 3 for name in d.PAIRS)


def test_each_sends_what_the_table_says_and_no_more() -> None:
    def run() -> dict[str, tuple[list[str], list[str]]]:
        said = {}
        for name in d.PAIRS:
            x = torch.ones(4, 4, requires_grad=True)
            with trace() as forward:
                y = getattr(d, name)(x)
            with trace() as backward:
                y.sum().backward()
            said[name] = tuple([m.op for m in t.messages] for t in (forward, backward))
        return said

    for said in launch(run, 2):
        assert said == {
            "copy": ([], ["all_reduce"]),
            "all_reduce": (["all_reduce"], []),
            "all_gather": (["all_gather"], ["reduce_scatter"]),
            "gather": (["all_gather"], []),
            "reduce_scatter": (["reduce_scatter"], ["all_gather"]),
            "scatter": ([], ["all_gather"]),
            "all_to_all": (["all_to_all"], ["all_to_all"]),
        }


def nothing_elsewhere(x: Tensor, split) -> Tensor:
    """A gradient that is only this rank's: what is not sent counts as zero."""
    whole = list(x.shape)
    whole[split.dim] = sum(split.sizes)
    gradient = x.new_zeros(whole)
    gradient.split(split.sizes, split.dim)[dist.get_rank()].copy_(x)
    return gradient


WRONG_BACKWARD = {
    "copy": d._keep,
    "all_reduce": d._sum,
    "all_gather": d._own_part,
    "gather": d._sum_own_part,
    "reduce_scatter": nothing_elsewhere,
    "scatter": nothing_elsewhere,
    "all_to_all": d._exchange,
}


@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_the_other_backward_is_caught(name: str) -> None:
    some = [c for c in cases(3) if c.name == name]
    case = some[name == "all_to_all"]  # of these the second is the uneven one

    def run() -> Result:
        right, _ = d.PAIRS[name]
        d.PAIRS = {**d.PAIRS, name: (right, WRONG_BACKWARD[name])}
        return computed(case)

    if name == "all_to_all":
        with pytest.raises(RankError):
            launch(run, 3, timeout=2.0)
        return
    results = launch(run, 3)
    with pytest.raises(AssertionError, match=r"^gradient of .* on rank \d"):
        compare(case, 3, results)


def test_finite_differences_of_the_summed_loss() -> None:
    """Without the oracle's help: move one element on one rank, and add up the terms."""
    names = ("all_gather", "reduce_scatter", "all_to_all")

    def run(step: float) -> list[tuple[Tensor, Tensor]]:
        found = []
        for case in (c for c in cases(3) if c.name in names):
            rank = dist.get_rank()
            for mover, shape in enumerate(case.shapes):
                if 0 in shape:
                    continue
                x = drawn(case.shapes[rank], rank)
                at = tuple(n - 1 for n in shape)
                if rank == mover:
                    x[at] += step
                x.requires_grad_()
                y = getattr(d, case.name)(x, **case.options[rank])
                loss = (weight(case, rank, y.shape) * torch.sin(y)).sum()
                loss.backward()
                dist.all_reduce(total := loss.detach().clone())
                gradient = x.grad[at] if rank == mover else torch.zeros(())
                dist.all_reduce(gradient := gradient.double().clone())
                found.append((total, gradient))
        return found

    low, middle, high = (launch(run, 3, step)[1] for step in (-1e-4, 0.0, 1e-4))
    assert len(middle) > 20
    for (a, _), (_, gradient), (b, _) in zip(low, middle, high, strict=True):
        assert_close((b - a) / 2e-4, gradient, tol=1e-6)


def test_a_sub_group_has_places_of_its_own() -> None:
    def run() -> list[int]:
        groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
        mine = groups[(dist.get_rank() + 1) % 2]
        x = torch.full((1 + dist.get_rank() // 2,), float(dist.get_rank()))
        return d.all_gather(x, mine, sizes=[1, 2]).int().tolist()

    assert launch(run, 4) == [[0, 2, 2], [1, 3, 3], [0, 2, 2], [1, 3, 3]]


def test_the_input_is_left_alone_and_half_precision_is_kept() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.full((4,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
        total = d.all_reduce(x)
        own = d.scatter(x)
        own.add_(100)
        return x, total, d.reduce_scatter(x)

    for rank, (x, total, part) in enumerate(launch(run, 2)):
        assert x.tolist() == [1.0 + rank] * 4
        assert total.tolist() == [3.0] * 4
        assert part.tolist() == [3.0] * 2
        assert total.dtype == part.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused() -> None:
    def run() -> list[str]:
        x = torch.zeros(5, 2)
        calls = (
            lambda: d.scatter(x),
            lambda: d.reduce_scatter(x, sizes=[2, 2]),
            lambda: d.scatter(x, sizes=[6, -1]),
            lambda: d.all_to_all(x, sizes=[5]),
            lambda: d.all_to_all(x, sizes=[3, 2], received=[1, 1, 1]),
            lambda: d.all_gather(x, sizes=[4, 4]),
            lambda: d.gather(x, dim=2),
            lambda: d.gather(torch.zeros(())),
            lambda: d.all_to_all(x, dim=1, to_dim=-3),
        )
        told = []
        for call in calls:
            try:
                call()
                told.append("accepted")
            except ValueError as error:
                told.append(str(error))
        return told

    one, _ = launch(run, 2)
    assert one == [
        "dim 0 has length 5, which 2 ranks do not divide; give sizes, such as [3, 2]",
        "sizes=[2, 2] add up to 4, but dim 0 of [5, 2] has length 5",
        "sizes=[6, -1]: a group of 2 ranks takes 2 lengths, each zero or more",
        "sizes=[5]: a group of 2 ranks takes 2 lengths, each zero or more",
        "received=[1, 1, 1]: a group of 2 ranks takes 2 lengths, each zero or more",
        "sizes=[4, 4] says 4 for place 0 in the group, whose tensor [5, 2] has 5 along "
        "dim 0",
        "dim 2 of a tensor of shape [5, 2]",
        "dim 0 of a tensor of shape []",
        "dim -3 of a tensor of shape [5, 2]",
    ]
    with pytest.raises(ValueError, match="no process group; call"):
        d.copy(torch.zeros(1))


def test_even_sizes_are_those_of_tensor_split() -> None:
    for length in range(9):
        for ranks in range(1, 6):
            parts = torch.empty(length).tensor_split(ranks)
            assert d.even_sizes(length, ranks) == tuple(map(len, parts))
