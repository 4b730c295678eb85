"""The comparison of a technique with one device, on every rank."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minitrain import runtime
from minitrain.display import Table
from minitrain.runtime import Layout, launch
from minitrain.testing.compare import assert_close, relative_error, same_bits
from minitrain.testing.problems import PROBLEMS, Problem
from minitrain.testing.steps import Named, Step, Technique, oracle, trained

DATA_AXES = ("dp", "cp")  # ranks along them hold other data, and add their losses


@dataclass(frozen=True)
class Report:
    """How near a technique came to one device; it was near enough.

    Attributes:
        ranks: Number of processes.
        problems: Names of what was trained.
        tensors: Number of comparisons.
        errors: The largest relative error of each kind of result, over all steps,
            ranks and tensors.
    """

    ranks: int
    problems: tuple[str, ...]
    tensors: int
    errors: Mapping[str, float]

    def table(self) -> Table:
        """Each kind of result with its largest relative error."""
        rows = [[kind, f"{error:.1e}"] for kind, error in self.errors.items()]
        return Table(["result", "largest relative error"], rows)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        return self.table()._repr_mimebundle_()

    def __repr__(self) -> str:
        what = ", ".join(self.problems)
        return f"equal to one device on {self.ranks} ranks: {what}\n{self.table()}"


def check_equal(
    technique: Technique,
    ranks: int,
    problem: Problem | Iterable[Problem] = PROBLEMS["plain"],
    *,
    layout: Layout | None = None,
    broadcasts: Collection[str] = ("dp",),
    tol: float | None = None,
    timeout: float = 20.0,
) -> Report:
    """Trains `problem` under `technique` and compares every rank with one device.

    The oracle is one process that runs the plain model on the whole batch, with torch's
    autograd, clipping and optimizer. Compared are, in each step: outputs, loss (sum and
    count), gradients, their norm before clipping, buffers, and the weights after the
    step. What several ranks hold must agree among them bit by bit, and after each step
    `check_invariants` must hold.

    Args:
        technique: `technique(model, mesh)`, run in each rank; returns the model, or
            `Parts` where it replaces other values of the step as well. It may come
            from a notebook cell.
        ranks: Number of processes.
        problem: What is trained; several are trained one after the other by the same
            processes.
        layout: Of the ranks; by default all of them are data-parallel.
        broadcasts: Axes over which the technique promises to copy the initial weights
            and buffers of place 0. Ranks elsewhere on them start from other values.
        tol: Relative to each tensor's largest value; by default `TOLERANCE`.
        timeout: Longest wait for one message, in seconds.

    Raises:
        AssertionError: Something differs; the message names problem, step, rank, what
            it is and by how much.
        RankError, StallError: The technique raised an exception, or hangs.
        ValueError: `layout` is for another number of ranks, or an axis is unknown.
    """
    layout = layout or Layout(dp=ranks)
    layout.check_world_size(ranks)
    if unknown := set(broadcasts) - set(layout.coordinates(0)):
        axes = ", ".join(layout.coordinates(0))
        raise ValueError(f"broadcasts={sorted(unknown)}: the axes are {axes}")
    problems = [problem] if isinstance(problem, Problem) else list(problem)
    run = _Run(technique, problems, layout, frozenset(broadcasts))
    results = launch(run, ranks, timeout=timeout)
    comparison = _Comparison(layout, tol)
    for i, one in enumerate(problems):
        steps = zip(oracle(one), *(result[i] for result in results), strict=True)
        for number, (expected, *got) in enumerate(steps):
            comparison.step(f"problem {one.name!r}, step {number}", expected, got)
    names = tuple(one.name for one in problems)
    return Report(ranks, names, comparison.tensors, comparison.errors)


@dataclass(frozen=True)
class _Run:
    """What a rank does. `launch` sends the module of `func`, if a user's, by value."""

    func: Technique
    problems: Sequence[Problem]
    layout: Layout
    broadcasts: frozenset[str]

    @property
    def __name__(self) -> str:
        return getattr(self.func, "__name__", "the technique")

    def __call__(self) -> list[list[Step]]:
        mesh, rank = self.layout.mesh(), runtime.rank()
        place = self.layout.coordinates(rank)
        first = not any(place[axis] for axis in self.broadcasts)
        seed = 0 if first else 1 + rank
        return [
            [step.cpu() for step in trained(self.func, problem, mesh, seed)]
            for problem in self.problems
        ]


Fault = tuple[int, str]  # the rank, and what is wrong there


class _Comparison:
    """Compares steps, and keeps the largest error of each kind of result."""

    def __init__(self, layout: Layout, tol: float | None) -> None:
        self.layout, self.tol = layout, tol
        self.errors: dict[str, float] = {}
        self.tensors = 0

    def step(self, where: str, expected: Step, ranks: Sequence[Step]) -> None:
        """One step of all ranks; the first kind of result that differs is raised."""
        finite = (
            self._outputs(expected, ranks),  # first, since they name the rank
            self._losses(expected, ranks),
            self._gradients(expected, ranks),
            self._same("gradient norm", "", expected.norm, [s.norm for s in ranks]),
        )
        for faults in (
            *(finite if expected.norm.isfinite() else [self._not_finite(ranks)]),
            self._weights(expected, ranks),
            self._buffers(expected, ranks),
            ((rank, s.broken) for rank, s in enumerate(ranks) if s.broken),
        ):
            if found := list(faults):
                rank, text = min(found, key=lambda fault: fault[0])
                others = sorted({r for r, _ in found} - {rank})
                also = f" (and on rank {', '.join(map(str, others))})" if others else ""
                head = f"{where}, rank {rank} of {len(ranks)}"
                raise AssertionError(f"{head}: {text}{also}")

    def _not_finite(self, ranks: Sequence[Step]) -> Iterator[Fault]:
        """One device skips the step: so must every rank."""
        for rank, step in enumerate(ranks):
            if step.norm.isfinite():
                yield (
                    rank,
                    f"the gradient norm is {float(step.norm):.3g}, and that of one "
                    "device is not finite: an inf or a NaN got lost",
                )

    def _losses(self, expected: Step, ranks: Sequence[Step]) -> Iterator[Fault]:
        """The loss of a rank and of those that hold the rest of the batch, summed."""
        total, tokens = expected.loss.sum, int(expected.loss.tokens)
        for rank in range(len(ranks)):
            losses = [ranks[r].loss for r in self._data_ranks(rank)]
            count = sum(int(loss.tokens) for loss in losses)
            if count != tokens:
                yield rank, f"the loss counts {count} tokens, expected {tokens}"
            value = torch.stack([loss.sum for loss in losses]).sum()
            yield from self._close("loss", "", rank, value, total)

    def _data_ranks(self, rank: int) -> list[int]:
        """The ranks that differ from `rank` in their data alone."""

        def others(r: int) -> list[int]:
            place = self.layout.coordinates(r)
            return [at for axis, at in place.items() if axis not in DATA_AXES]

        world = range(self.layout.world_size)
        return [r for r in world if others(r) == others(rank)]

    def _outputs(self, expected: Step, ranks: Sequence[Step]) -> Iterator[Fault]:
        ((_, logits),) = expected.outputs
        missing = torch.ones(len(logits), dtype=torch.bool)
        for rank, step in enumerate(ranks):
            for places, got in step.outputs:
                missing[places] = False
                yield from self._close("outputs", "", rank, got, logits[places])
        if missing.any():
            text = (
                f"{int(missing.sum())} of {len(missing)} tokens have no logits on any "
                "rank; loss_fn takes the micro-batches that forward_backward is given"
            )
            yield 0, text

    def _gradients(self, expected: Step, ranks: Sequence[Step]) -> Iterator[Fault]:
        """A gradient that is not there counts as zero: of what is unused, or frozen."""
        zeros = {n: torch.zeros_like(w) for n, w in expected.weights.items()}
        wanted = zeros | dict(expected.gradients)
        held = []
        for step in ranks:
            absent = {n for n in wanted if n not in expected.gradients}
            here = {n: zeros[n] for n in absent & step.weights.keys()}
            held.append(here | dict(step.gradients))
        yield from self._named("gradient", wanted, held, ranks)

    def _weights(self, expected: Step, ranks: Sequence[Step]) -> Iterator[Fault]:
        held = [step.weights for step in ranks]
        yield from self._named("weight", expected.weights, held, ranks)

    def _buffers(self, expected: Step, ranks: Sequence[Step]) -> Iterator[Fault]:
        for name, value in expected.buffers.items():
            held = [step.buffers.get(name) for step in ranks]
            yield from self._same("buffer", name, value, held)

    def _named(
        self, kind: str, wanted: Named, held: Sequence[Named], ranks: Sequence[Step]
    ) -> Iterator[Fault]:
        """Tensors by name; every rank has every name, or says who may lack it."""
        optional = frozenset().union(*(step.elsewhere for step in ranks))
        for rank, here in enumerate(held):
            for name in sorted(here.keys() - wanted.keys()):
                yield rank, f"{kind} {name}: the plain model has none"
            for name in sorted(wanted.keys() - here.keys() - optional):
                yield rank, f"{kind} {name} is missing"
        for name, value in wanted.items():
            of_all = [here.get(name) for here in held]
            if all(tensor is None for tensor in of_all) and name in optional:
                yield 0, f"{kind} {name} is on no rank"
            yield from self._same(kind, name, value, of_all)

    def _same(
        self, kind: str, name: str, expected: Tensor, held: Sequence[Tensor | None]
    ) -> Iterator[Fault]:
        """One tensor on the ranks that hold it: equal to the oracle's, and replicas."""
        first: int | None = None
        known: list[Fault] = []
        for rank, value in enumerate(held):
            if value is None:
                continue
            if first is not None and same_bits(value, held[first]):  # type: ignore[arg-type]
                yield from ((rank, text) for _, text in known)
                continue
            faults = list(self._close(kind, name, rank, value, expected))
            if first is None:
                first, known = rank, faults
            elif not faults:
                faults = [
                    (rank, f"{kind} {name} is not that of rank {first}, bit by bit")
                ]
            yield from faults

    def _close(
        self, kind: str, name: str, rank: int, actual: Tensor, expected: Tensor
    ) -> Iterator[Fault]:
        self.tensors += 1
        try:
            assert_close(actual, expected, self.tol, f"{kind} {name}".strip())
        except AssertionError as difference:
            yield rank, str(difference)
        else:
            error = relative_error(actual, expected)
            self.errors[kind] = max(self.errors.get(kind, 0.0), error)
