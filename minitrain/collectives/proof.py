"""The proof that a program does what its collective promises, without running it.

For every rank and chunk one follows a set: the ranks whose terms the rank's copy of
the chunk holds. A copy replaces the set, an addition unites two, which must be
disjoint, or a term would count twice. The sets do not depend on the numbers in the
buffer, so a program that passes is right for every input and every size, but for
the order of additions.
"""

from collections.abc import Iterator

from minitrain.collectives.program import Program, Step, Transfer

Holdings = list[list[frozenset[int]]]
"""`held[rank][chunk]`: the ranks whose terms are there; empty where nothing is."""


def validate(program: Program) -> Program:
    """Proves the program right for all ranks, and returns it.

    Raises:
        ValueError: A message carries what its sender does not hold, a term would count
            twice, two messages of one step write to one place, or a rank ends without
            what the collective promises. The message names step, ranks and chunk.
    """
    *_, final = contributions(program)
    for rank, row in enumerate(final):
        for chunk, terms in enumerate(row):
            promised = program.promise(rank, chunk)
            if promised is not None and terms != promised:
                raise ValueError(
                    f"{program!r}: at the end rank {rank} holds of chunk {chunk} "
                    f"{_terms(terms)}, and should hold {_terms(promised)}"
                )
    return program


def contributions(program: Program) -> Iterator[Holdings]:
    """What every rank holds before the first step, and after each step.

    Raises:
        ValueError: A step is not legal; see `validate`.
    """
    ranks, chunks = range(program.ranks), range(program.chunks)
    held = [[program.start(rank, chunk) for chunk in chunks] for rank in ranks]
    yield held
    for number, step in enumerate(program.steps):
        try:
            held = _after(held, step)
        except ValueError as error:
            raise ValueError(f"{program!r}: in step {number}, {error}") from None
        yield held


def _after(held: Holdings, step: Step) -> Holdings:
    """The holdings after a step whose messages all read what was held before it."""
    after = [list(row) for row in held]
    copied: set[tuple[int, int]] = set()
    added: set[tuple[int, int]] = set()
    for transfer in step:
        _check_ends(transfer, ranks=len(held), chunks=len(held[0]))
        for chunk in transfer.chunks:
            place = (transfer.to, chunk)
            sent, own = held[transfer.source][chunk], after[transfer.to][chunk]
            where = f"rank {transfer.source} to rank {transfer.to}, chunk {chunk}: "
            if not sent:
                raise ValueError(f"{where}the sender does not hold it")
            if place in copied or (not transfer.add and place in added):
                raise ValueError(f"{where}another message of the step writes it too")
            if transfer.add and not own:
                raise ValueError(f"{where}the receiver holds nothing to add it to")
            if transfer.add and own & sent:
                raise ValueError(f"{where}would count {_terms(own & sent)} twice")
            after[transfer.to][chunk] = own | sent if transfer.add else sent
            (added if transfer.add else copied).add(place)
    return after


def _check_ends(transfer: Transfer, ranks: int, chunks: int) -> None:
    if not (0 <= transfer.source < ranks and 0 <= transfer.to < ranks):
        raise ValueError(f"{transfer}: the ranks are 0 to {ranks - 1}")
    if transfer.source == transfer.to:
        raise ValueError(f"{transfer}: a rank sends to itself")
    if not all(0 <= chunk < chunks for chunk in transfer.chunks):
        raise ValueError(f"{transfer}: the chunks are 0 to {chunks - 1}")


def _terms(ranks: frozenset[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    if len(ranks) == 1:
        return f"the term of rank {names}"
    return f"the terms of ranks {names}" if ranks else "nothing"
