"""The program of each role, timed: stretches of computing, and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from minitrain.runtime.operators import Await, Start
from minitrain.simulate.costs import Costs
from minitrain.simulate.events import (
    Compute,
    Need,
    Post,
    Step,
    Timeline,
    Transfer,
    replay,
)
from minitrain.simulate.matching import Meeting
from minitrain.simulate.program import Kernel, Line
from minitrain.simulate.recording import Role

LAUNCHES = "waiting for launches"


@dataclass(frozen=True)
class Stretch:
    """Kernels of one phase with no start or wait of a message between them."""

    phase: str
    kernels: Counter[Kernel]

    def parts(self, costs: Costs) -> dict[str, float]:
        """Seconds by kind of kernel, and what the host is slower with its launches."""
        found: dict[str, float] = {}
        for kernel, count in self.kernels.items():
            seconds = count * costs.kernel_seconds(kernel)
            found[kernel.kind] = found.get(kernel.kind, 0.0) + seconds
        launches = self.kernels.total() * costs.launch_seconds
        late = launches - sum(found.values())
        return found | ({LAUNCHES: late} if late > 0 else {})


Skeleton = list[Stretch | Post | Need]
"""A role's program: what it computes between its messages."""


def skeletons(
    roles: Sequence[Role], lines: Sequence[Sequence[Line]], meetings: Sequence[Meeting]
) -> list[Skeleton]:
    """The programs of all roles, with the messages named by their meetings.

    A message that nothing waits for has to arrive too, but holds nobody up.
    """
    number = {end: i for i, meeting in enumerate(meetings) for end in meeting.ends}
    return [
        _skeleton(role, program, number)
        for role, program in zip(range(len(roles)), lines, strict=True)
    ]


def _skeleton(
    role: int, lines: Sequence[Line], number: dict[tuple[int, int], int]
) -> Skeleton:
    skeleton: Skeleton = []
    for line in lines:
        if isinstance(line, Start):
            skeleton.append(Post(number[role, line.message]))
        elif isinstance(line, Await):
            skeleton.append(Need(number[role, line.message]))
        else:
            last = skeleton[-1] if skeleton else None
            if not isinstance(last, Stretch) or last.phase != line.phase:
                last = Stretch(line.phase, Counter())
                skeleton.append(last)
            last.kernels[line] += 1
    return skeleton


def run(
    programs: Sequence[Skeleton], meetings: Sequence[Meeting], costs: Costs
) -> Timeline:
    """Replays the programs with what each line takes."""
    transfers = [_transfer(meeting, costs) for meeting in meetings]
    tracks = [[_step(line, costs) for line in program] for program in programs]
    return replay(tracks, transfers, costs.sharing)


def _step(line: Stretch | Post | Need, costs: Costs) -> Step:
    if isinstance(line, Stretch):
        return Compute(sum(line.parts(costs).values()), line.phase)
    return line


def _transfer(meeting: Meeting, costs: Costs) -> Transfer:
    m = meeting.message
    return Transfer(
        ranks=tuple(role for role, _ in meeting.ends),
        seconds=costs.message_seconds(meeting),
        stream=meeting.stream,
        link="inside" if meeting.domains == 1 else "across",
        send=m.op == "send",
        name=f"{m.op} ({m.caller})",
    )
