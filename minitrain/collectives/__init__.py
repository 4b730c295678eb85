"""Collectives as programs: written, proven, timed, drawn and run.

    program = build("all_reduce", "ring", ranks=4)
    print(validate(program))
    all_reduce(x, algorithm="ring")

The functions here move bytes with our own programs, and are counted; what a model's
forward pass uses is in `minitrain.collectives.differentiable`.
"""

from minitrain.collectives.catalogue import ALGORITHMS, build
from minitrain.collectives.execute import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
    run,
)
from minitrain.collectives.program import Program, Step, Transfer
from minitrain.collectives.proof import contributions, validate

__all__ = [
    "ALGORITHMS",
    "Program",
    "Step",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "build",
    "contributions",
    "reduce",
    "reduce_scatter",
    "run",
    "validate",
]
