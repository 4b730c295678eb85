"""Run the real program on a cluster that is not there.

    print(simulate(step, "h100:2048x8"))

The function is the one that `minitrain.launch` runs. One rank of each role runs it,
with tensors that have no values, and is recorded; the recording is timed with what each
kernel and each message takes on the cluster, and replayed as discrete events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minitrain.display import Table
from minitrain.runtime import Layout
from minitrain.simulate import report
from minitrain.simulate.costs import LAUNCH_SECONDS, PRECISION, Costs
from minitrain.simulate.costs import costs as costs_of
from minitrain.simulate.events import Sharing, Timeline
from minitrain.simulate.hardware import Cluster
from minitrain.simulate.hardware import cluster as read_cluster
from minitrain.simulate.matching import Meeting, match
from minitrain.simulate.program import Kernel, Line, flops, kernels
from minitrain.simulate.program import tokens as looked_up
from minitrain.simulate.recording import Role, record_roles
from minitrain.simulate.replay import Skeleton, Stretch, run, skeletons
from minitrain.simulate.scaling import rescale


def simulate(
    step: Callable[..., Any],
    cluster: Cluster | str,
    layout: Layout | None = None,
    *args: Any,
    axes: Sequence[str] = ("pp",),
    fuse: bool = True,
    tf32: bool = False,
    launch_seconds: float = LAUNCH_SECONDS,
    sharing: Sharing | None = None,
    tokens: int | None = None,
    costs: Costs | None = None,
    check: bool = True,
) -> Simulation:
    """Simulate a program on a cluster.

    Args:
        step: What every rank runs, as for `launch`: `step(*args)`. If it returns a
            trace (`with trace() as t: ...`), what was traced is simulated, and what
            came before is not; else all of it is.
        cluster: As `h100:2048x8`, the path of a TOML file, or a `Cluster`.
        layout: Of its ranks; by default all of them are data-parallel.
        args: Of `step`.
        axes: On which ranks differ in what they do. One rank of each place on them is
            run.
        fuse: Whether neighbouring operators that only move bytes are one kernel, as a
            compiler makes them; else each is one.
        tf32: Whether matrix products in float32 run in TF32.
        launch_seconds: Of the host, for each kernel.
        sharing: What messages and computing take from each other.
        tokens: Of a step, over all ranks; by default what the embedding looks up.
        costs: The numbers that time the program, in place of the cluster's; see
            `minitrain.simulate.local`.
        check: Whether to run a second rank of the first role, and compare.

    Raises:
        ValueError: The layout does not have as many ranks as the cluster, the step
            does nothing, or something that is not timed, roles call different
            collectives, a send has no receive, or ranks wait for each other.
        RankError: The program raised an exception.
    """
    where = read_cluster(cluster) if isinstance(cluster, str) else cluster
    layout = Layout(dp=where.world_size) if layout is None else layout
    layout.check_world_size(where.world_size)
    roles = record_roles(step, layout, args, axes, check)
    lines = [kernels(role.trace.program, fuse) for role in roles]
    if costs is None:
        costs = costs_of(where, sharing or Sharing(), launch_seconds, tf32)
    if tokens is not None and tokens < 0:
        raise ValueError(f"tokens={tokens}: 0 or more, please")
    if tokens is None:
        own = max(looked_up(role.trace.program) for role in roles)
        tokens = own * layout.dp * layout.cp
    return _assemble(where, layout, roles, lines, costs, tokens)


def _assemble(
    cluster: Cluster,
    layout: Layout,
    roles: list[Role],
    lines: list[list[Line]],
    numbers: Costs,
    tokens: int,
) -> Simulation:
    """Replays recorded roles on a cluster."""
    meetings = match(roles, layout, cluster.domain_ranks)
    programs = skeletons(roles, lines, meetings)
    line = run(programs, meetings, numbers)
    if not line.seconds > 0:
        raise ValueError("the step does nothing that takes time on the cluster")
    return Simulation(
        cluster, layout, roles, lines, meetings, programs, numbers, line, tokens
    )


@dataclass(eq=False)
class Simulation:
    """A step on a cluster, as it would come to pass.

    Attributes:
        cluster: The hardware.
        layout: Of its ranks.
        roles: The ranks that were recorded, each for all that run its program.
        lines: Of each role, its kernels and messages, one by one.
        meetings: The messages, each with its roles.
        programs: Of each role, what it computes between its messages.
        costs: The numbers that time them.
        timeline: When everything came to pass.
        tokens: That the step trains on, over all ranks.
    """

    cluster: Cluster
    layout: Layout
    roles: list[Role]
    lines: list[list[Line]]
    meetings: list[Meeting]
    programs: list[Skeleton]
    costs: Costs
    timeline: Timeline
    tokens: int

    # ---- time

    @property
    def step_seconds(self) -> float:
        """From the begin of the step to the last rank's end."""
        return self.timeline.seconds

    @property
    def interval(self) -> tuple[float, float]:
        """Step times between which the real one lies in four of five cases."""
        half = report.relative_half_width(self.parts)
        return self.step_seconds * (1 - half), self.step_seconds * (1 + half)

    @cached_property
    def slowest(self) -> int:
        """The role that computes longest."""
        ranks = range(len(self.roles))
        return max(ranks, key=lambda r: (self.timeline.busy_seconds(r), -r))

    @property
    def parts(self) -> dict[str, float]:
        """What the step time is made of on the role that computes longest (seconds)."""
        return self.parts_of(self.slowest)

    def parts_of(self, role: int) -> dict[str, float]:
        """The same on any role; the parts sum to `step_seconds`."""
        parts: dict[str, float] = {}
        for line in self.programs[role]:
            if isinstance(line, Stretch):
                for kind, seconds in line.parts(self.costs).items():
                    parts[kind] = parts.get(kind, 0.0) + seconds
        busy = self.timeline.busy_seconds(role)
        parts[report.DISTURBED] = max(0.0, busy - sum(parts.values()))
        parts[report.EXPOSED] = self.timeline.transfer_seconds(role)
        parts[report.BUBBLE] = self.step_seconds - busy - parts[report.EXPOSED]
        least = 1e-9 * self.step_seconds  # rounding is no part
        return {kind: seconds for kind, seconds in parts.items() if seconds > least}

    @property
    def exposed_seconds(self) -> float:
        """What the slowest role stands still while a message moves."""
        return self.timeline.transfer_seconds(self.slowest)

    @property
    def communication_seconds(self) -> float:
        """What messages of the slowest role take, hidden or not, one after another."""
        taken = {end[0]: 0.0 for meeting in self.meetings for end in meeting.ends}
        for i, meeting in enumerate(self.meetings):
            seconds = self.timeline.ends[i] - self.timeline.begins[i]
            for role in {role for role, _ in meeting.ends}:
                taken[role] += seconds
        return taken.get(self.slowest, 0.0)

    @property
    def bubble_seconds(self) -> float:
        """What ranks stand still for others, the mean over all ranks."""
        ranks = range(len(self.roles))
        return sum(self.timeline.idle_seconds(r) for r in ranks) / len(self.roles)

    # ---- rates

    @property
    def precision(self) -> str:
        """Of most of the operations."""
        count: dict[str, int] = {}
        for line in (line for lines in self.lines for line in lines):
            if isinstance(line, Kernel) and line.flops:
                count[line.dtype] = count.get(line.dtype, 0) + line.flops
        dtype = max(count, key=lambda d: count[d]) if count else "bfloat16"
        return PRECISION.get(dtype, "fp32")

    @property
    def model_flops(self) -> int:
        """Operations that the step needs over all ranks, nothing computed twice.

        Three forward passes, as `minitrain.workload.costs.model_flops`; one where there
        is no backward pass.
        """
        needed = 0
        for role, lines in zip(self.roles, self.lines, strict=True):
            passes = 3 if flops(lines, ["backward"]) else 1
            needed += passes * flops(lines, ["forward"]) * role.ranks
        return needed

    @property
    def hardware_flops(self) -> int:
        """Operations that the step does over all ranks."""
        rows = zip(self.roles, self.lines, strict=True)
        return sum(flops(lines) * role.ranks for role, lines in rows)

    @property
    def peak_flops(self) -> float:
        """Of all accelerators, by their data sheet, at the products' precision."""
        peaks = self.cluster.accelerator.peak_flops
        one = peaks.get(self.precision) or max(peaks.values())
        return one * self.cluster.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (arXiv:2204.02311, appendix B)."""
        return self.model_flops / (self.step_seconds * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: what is computed again counts too."""
        return self.hardware_flops / (self.step_seconds * self.peak_flops)

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.step_seconds

    # ---- memory

    @property
    def fullest(self) -> Role:
        """The role whose memory peaks highest."""
        return max(self.roles, key=lambda role: role.trace.peak_total_bytes)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind on the fullest rank, when their sum is highest."""
        return dict(self.fullest.trace.at_peak)

    @property
    def memory_bytes(self) -> int:
        """The sum of `memory`."""
        return self.fullest.trace.peak_total_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank's tensors fit its accelerator."""
        return self.memory_bytes <= self.cluster.accelerator.memory_bytes

    # ---- what would be, and what is shown

    def at(self, cluster: Cluster | str) -> Simulation:
        """The same program on another cluster, without recording it again.

        On more or fewer ranks the data-parallel axis grows or shrinks, and each rank
        keeps its share of the batch.

        Raises:
            ValueError: The other axes do not divide its ranks, or what a rank computes
                depends on their number; see `minitrain.simulate.scaling`.
        """
        where = read_cluster(cluster) if isinstance(cluster, str) else cluster
        others = self.layout.world_size // self.layout.dp
        layout = replace(self.layout, dp=max(1, where.world_size // others))
        layout.check_world_size(where.world_size)
        roles, tokens = self.roles, self.tokens
        if layout != self.layout:
            roles = rescale(roles, self.layout, layout)
            tokens = tokens * layout.dp // self.layout.dp
        numbers = self.costs.on(where)
        return _assemble(where, layout, roles, self.lines, numbers, tokens)

    def better(self, number: str, factor: float = 1.1) -> float:
        """Step seconds if one number of the hardware were better by a factor.

        Args:
            number: Of `minitrain.simulate.costs.HARDWARE`.
            factor: By which bandwidth is more, and latency less.
        """
        return run(
            self.programs, self.meetings, self.costs.better(number, factor)
        ).seconds

    def explain(self) -> report.Explanation:
        """Where the time goes, and what would change it most."""
        return report.explain(self)

    def table(self) -> Table:
        """The main figures."""
        return report.summary(self)

    def traces(self) -> list[report.Simulated]:
        """Each role's messages on the simulated clock, for `minitrain.viz.timeline`."""
        return report.traces(self)

    def figure(self, seconds: float = 0.0) -> Any:
        """Each role's computing and messages over time."""
        from minitrain import viz

        return viz.timeline(self.traces(), seconds)

    def save(self, path: str | Path) -> None:
        """Write the timeline for https://ui.perfetto.dev and chrome://tracing."""
        report.save(self, path)

    def __str__(self) -> str:
        return f"{report.headline(self)}\n{report.summary(self).text}"

    def __repr__(self) -> str:
        return f"<{report.headline(self)}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict:
        table = report.summary(self)
        return {
            "text/markdown": f"{report.headline(self)}\n\n{table.markdown}",
            "text/plain": str(self),
        }
