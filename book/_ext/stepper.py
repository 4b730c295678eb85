"""The collective stepper: the library's own programs, printed for a page.

The page is told what every rank holds at first, and each message. What follows from
them it works out itself, as `minitrain.collectives.proof` does.
"""

import json
from typing import Any

from minitrain.collectives import ALGORITHMS, Program, build

RANKS = range(2, 9)
PIECES = {("broadcast", "chain"): 4, ("all_reduce", "double_tree"): 2}
RANKS_PER_HOST = 2


def programs() -> dict[str, Any]:
    """Every program of the page: by collective, algorithm and number of ranks."""
    return {
        collective: {
            algorithm: {
                ranks: plain(build(collective, algorithm, ranks, **shape))
                for ranks in RANKS
                if (shape := shape_of(collective, algorithm, ranks)) is not None
            }
            for algorithm in known
        }
        for collective, known in ALGORITHMS.items()
    }


def shape_of(collective: str, algorithm: str, ranks: int) -> dict[str, int] | None:
    """What else shapes the program; None where the ranks do not fill hosts of two."""
    if algorithm == "hierarchical":
        whole = ranks % RANKS_PER_HOST == 0 and ranks > RANKS_PER_HOST
        return {"ranks_per_host": RANKS_PER_HOST} if whole else None
    pieces = PIECES.get((collective, algorithm))
    return {"pieces": pieces} if pieces else {}


def plain(program: Program) -> dict[str, Any]:
    """A program in JSON's types; a set of ranks is a number with their bits."""
    ranks, chunks = range(program.ranks), range(program.chunks)
    return {
        "chunks": program.chunks,
        "held": [[bits(program.start(r, c)) for c in chunks] for r in ranks],
        "promise": [[bits(program.promise(r, c)) for c in chunks] for r in ranks],
        "steps": [
            [[t.source, t.to, list(t.chunks), int(t.add)] for t in step]
            for step in program.steps
        ],
    }


def bits(ranks: frozenset[int] | None) -> int | None:
    """The set as a number: bit r for rank r."""
    return None if ranks is None else sum(1 << rank for rank in ranks)


def javascript() -> str:
    """The page's table."""
    return f"const PROGRAMS = {json.dumps(programs(), separators=(',', ':'))};"
