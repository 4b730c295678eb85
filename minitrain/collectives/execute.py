"""Programs, run: sends and receives between real processes.

The functions here take any shape, contiguous or not, and any dtype that the backend
can send; they are not differentiable. Ranks are named by their position in the group.
A sum is stored in the tensor's dtype after every addition: to sum bfloat16 or float16
without that rounding, pass the tensor in float32.

Every rank of the group must make the same call with tensors of one dtype and, where
rows are not allowed to differ, of one shape. Where they are (`all_gather`,
`all_to_all`), the ranks first tell each other how many they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minitrain.collectives.catalogue import build
from minitrain.collectives.program import Program, Step
from minitrain.runtime import read
from minitrain.runtime.messages import even

DTYPES = tuple(  # the same order on every rank
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)


@torch.no_grad()
def run(
    program: Program,
    chunks: Sequence[Tensor] | Mapping[int, Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Play this rank's part of a program, in place.

    With NCCL the group must have been used before, by all its ranks: it connects them
    in the first call, and not every rank has a message in every step.

    Args:
        program: For as many ranks as the group has.
        chunks: `chunks[c]` is the place of chunk c, flat and contiguous, as long on
            this rank as on all others. Chunks that never pass here may be missing.
        group: Whose ranks play; by default all.

    Raises:
        ValueError: The program is for another number of ranks, or this rank is not in
            the group.
    """
    rank, ranks = place_in(group)
    if ranks != program.ranks:
        raise ValueError(f"{program!r} cannot be run by a group of {ranks} ranks")
    for step in program.steps:
        _play(step, rank, chunks, group)


def _play(
    step: Step,
    rank: int,
    chunks: Sequence[Tensor] | Mapping[int, Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """One step: post every message, wait for all of them, then store what came.

    What is being sent stays untouched until then, so each message carries what was
    there before the step, whatever arrives meanwhile.
    """
    sends = [t for t in step if t.source == rank and t.chunks]
    receives = [t for t in step if t.to == rank and t.chunks]
    leaving = {chunk for t in sends for chunk in t.chunks}
    posts, arrivals = [], []
    for t in receives:
        places = [chunks[chunk] for chunk in t.chunks]
        direct = not t.add and len(places) == 1 and t.chunks[0] not in leaving
        elements = sum(place.numel() for place in places)
        message = places[0] if direct else places[0].new_empty(elements)
        posts.append(dist.P2POp(dist.irecv, message, group=group, group_peer=t.source))
        if not direct:
            arrivals.append((message, places, t.add))
    for t in sends:
        places = [chunks[chunk] for chunk in t.chunks]
        message = places[0] if len(places) == 1 else torch.cat(places)
        posts.append(dist.P2POp(dist.isend, message, group=group, group_peer=t.to))
    posts = [post for post in posts if post.tensor.numel()]
    for work in dist.batch_isend_irecv(posts) if posts else ():
        work.wait()
    for message, places, add in arrivals:
        parts = message.split([place.numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            place.add_(part) if add else place.copy_(part)


def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "ring",
    **shape: int,
) -> Tensor:
    """Sums `x` over the group, in place, and returns it.

    Whatever the algorithm, all ranks end with the same bits.

    Args:
        x: Of the same shape on every rank.
        group: By default all ranks.
        algorithm: A key of `ALGORITHMS["all_reduce"]`.
        shape: What else shapes the program: `pieces` of a double tree,
            `ranks_per_host` of the hierarchical algorithm.

    Raises:
        ValueError: There is no such algorithm, or the group does not fit it.
    """
    program = build("all_reduce", algorithm, place_in(group)[1], **shape)
    return _in_place(program, x, group)


def broadcast(
    x: Tensor,
    root: int = 0,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "tree",
    **shape: int,
) -> Tensor:
    """Overwrites `x` with the root's, and returns it.

    Args:
        x: Of the same shape on every rank.
        root: Position in the group of the rank whose `x` all get.
        group: By default all ranks.
        algorithm: A key of `ALGORITHMS["broadcast"]`.
        shape: `pieces` of a chain.

    Raises:
        ValueError: There is no such algorithm or root.
    """
    program = build("broadcast", algorithm, place_in(group)[1], root=root, **shape)
    return _in_place(program, x, group)


def reduce(
    x: Tensor,
    root: int = 0,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "tree",
) -> Tensor:
    """Sums `x` over the group into the root's `x`; the others keep theirs.

    Args:
        x: Of the same shape on every rank.
        root: Position in the group of the rank that gets the sum.
        group: By default all ranks.
        algorithm: A key of `ALGORITHMS["reduce"]`.

    Raises:
        ValueError: There is no such algorithm or root.
    """
    rank, ranks = place_in(group)
    program = build("reduce", algorithm, ranks, root=root)
    _in_place(program, x if rank == root else x.detach().clone(), group)
    return x


def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "ring",
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sums `x` over the group and returns this rank's rows of the sum.

    Args:
        x: [rows, ...], of the same shape on every rank; it is not changed.
        group: By default all ranks.
        algorithm: A key of `ALGORITHMS["reduce_scatter"]`.
        sizes: Rows of each rank, the same list on every rank, zeros allowed; by
            default as even as can be, the first ranks getting one more.

    Raises:
        ValueError: There is no such algorithm, or `sizes` do not fit.
    """
    rank, ranks = place_in(group)
    program = build("reduce_scatter", algorithm, ranks)
    rows = _rows(x)
    sizes = _checked(sizes, ranks, len(rows), "sizes")
    pieces = rows.clone(memory_format=torch.contiguous_format).split(sizes)
    run(program, [piece.view(-1) for piece in pieces], group)
    return pieces[rank].clone()


def all_gather(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "ring",
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Returns the rows of all ranks, in the order of the group.

    Args:
        x: [rows, ...]; the number of rows may differ among the ranks, also be zero.
        group: By default all ranks.
        algorithm: A key of `ALGORITHMS["all_gather"]`.
        sizes: Rows of each rank, where they are known; else the ranks tell each other.

    Raises:
        ValueError: There is no such algorithm, the rows do not fit each other, or
            `sizes` does not say how many rows this rank has.
    """
    rank, ranks = place_in(group)
    program = build("all_gather", algorithm, ranks)
    rows = _rows(x)
    if sizes is None:
        sizes = [size for (size,) in _told([len(rows)], rows, group)]
    sizes = _checked(sizes, ranks, sum(sizes), "sizes")
    if sizes[rank] != len(rows):
        raise ValueError(
            f"rank {rank} has {len(rows)} rows, and sizes {sizes} say {sizes[rank]}"
        )
    out = rows.new_empty(sum(sizes), *rows.shape[1:])
    pieces = out.split(sizes)
    pieces[rank].copy_(rows)
    run(program, [piece.view(-1) for piece in pieces], group)
    return out


def all_to_all(
    x: Tensor,
    splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "pairwise",
) -> Tensor:
    """Sends each rank its rows of `x`, and returns the rows that came, by rank.

    The ranks first tell each other their splits, so none needs to know what it gets.

    Args:
        x: [rows, ...]; the number of rows may differ among the ranks.
        splits: How many rows go to each rank, zeros allowed; by default as even as can
            be, the first ranks getting one more.
        group: By default all ranks.
        algorithm: A key of `ALGORITHMS["all_to_all"]`.

    Raises:
        ValueError: There is no such algorithm, the rows do not fit each other, or
            `splits` do not add up to the rows.
    """
    rank, ranks = place_in(group)
    program = build("all_to_all", algorithm, ranks)
    rows = _rows(x).contiguous()
    splits = _checked(splits, ranks, len(rows), "splits")
    told = _told(splits, rows, group)  # told[s][d]: rows from rank s to rank d
    coming = [given[rank] for given in told]
    out = rows.new_empty(sum(coming), *rows.shape[1:])
    arriving, leaving = out.split(coming), rows.split(splits)
    arriving[rank].copy_(leaving[rank])
    places = {rank * ranks + to: piece for to, piece in enumerate(leaving)}
    places |= {source * ranks + rank: piece for source, piece in enumerate(arriving)}
    for chunk in _passing(program, rank) - places.keys():
        source, to = divmod(chunk, ranks)
        places[chunk] = rows.new_empty(told[source][to], *rows.shape[1:])
    run(program, {chunk: piece.view(-1) for chunk, piece in places.items()}, group)
    return out


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's position in the group, and the group's size; (0, 1) without one.

    Raises:
        ValueError: The rank is not in the group.
    """
    if not dist.is_initialized():
        return 0, 1
    position = dist.get_rank(group)
    if position < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group it was asked to work with"
        )
    return position, dist.get_world_size(group)


@torch.no_grad()
def _in_place(program: Program, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Run a program whose chunks are any pieces of the buffer."""
    flat = x.detach().contiguous().view(-1)
    run(program, flat.tensor_split(program.chunks), group)
    if not x.is_contiguous():
        x.detach().copy_(flat.view(x.shape))
    return x


def _rows(x: Tensor) -> Tensor:
    return torch.atleast_1d(x.detach())


def _checked(
    sizes: Sequence[int] | None, ranks: int, rows: int, name: str
) -> list[int]:
    """`sizes`, one for each rank and together `rows`; by default nearly equal."""
    if sizes is None:
        return list(even(rows, range(ranks)))
    sizes = list(sizes)
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{name}={sizes}: {ranks} numbers that are not negative and add up to the "
            f"{rows} rows, please; these are {len(sizes)} and add up to {sum(sizes)}"
        )
    return sizes


def _told(
    numbers: list[int], rows: Tensor, group: dist.ProcessGroup | None
) -> list[list[int]]:
    """The numbers of every rank, once it is sure that their rows fit each other."""
    ranks = place_in(group)[1]
    if ranks == 1:
        return [numbers]
    kind = DTYPES.index(rows.dtype)
    line = [*numbers, rows.shape[1:].numel(), kind]
    mine = torch.tensor(line, device=rows.device)
    lines = mine.new_empty(ranks * len(line))
    dist.all_gather_single(lines, mine, group=group)
    told = [
        [int(read(n, expected=own)) for n, own in zip(each, line, strict=True)]
        for each in lines.cpu().split(len(line))
    ]
    if any(each[-2:] != line[-2:] for each in told):
        found = ", ".join(
            f"{width} elements of {DTYPES[kind]} on rank {rank}"
            for rank, (*_, width, kind) in enumerate(told)
        )
        raise ValueError(f"the rows of the ranks do not fit each other: {found}")
    return [each[:-2] for each in told]


def _passing(program: Program, rank: int) -> set[int]:
    """The chunks that a rank ever receives."""
    return {
        chunk
        for step in program.steps
        for transfer in step
        if transfer.to == rank
        for chunk in transfer.chunks
    }
