"""What must hold between two steps of a training run, checked on the values.

Each rank writes down what it holds: of every tensor its shape, its placement and a
digest of its bits. The ranks exchange these notes, and then each of them finds the same
faults in the same table, so all raise, or none. Made for debugging: it reads every
byte that a rank holds, and every rank hears of all the others.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minitrain.runtime.group import rank as own_rank
from minitrain.runtime.group import world_size
from minitrain.workload.model import Transformer
from minitrain.workload.step import placement

MOST = 8  # faults in one message


class InvariantError(RuntimeError):
    """Raised on every rank; names what is broken, the axis, and the ranks."""


def check_invariants(
    model: nn.Module,
    mesh: DeviceMesh | None,
    optimizer: torch.optim.Optimizer | None = None,
    tied: Iterable[Sequence[str]] = (),
) -> None:
    """Checks that the ranks hold one model, and complete gradients where they have any.

    - Placements: the same on every rank, over axes of the mesh and dims of the tensor;
      shards agree in shape along the other dims.
    - Replicas: over each axis on which a parameter, a buffer or a parameter's
      optimizer state is not sharded, it has the same bits on all ranks.
    - Tied weights: names of one weight are one tensor, on every rank alike. Where two
      ranks hold a name each (pipeline stages), they hold the same bits.
    - Gradients: finite, with the parameter's shape and dtype, on all ranks or on none;
      and complete, which is to say replicas as well.

    Every rank of the mesh calls it, with gradients after `finalize_gradients` or
    without any. A pure comparison: nothing is changed.

    Args:
        model: in which a shard has the name of its whole.
        mesh: the one that placements speak of; None in a world of one.
        optimizer: whose parameters, where they are not the model's own, and whose
            state are checked too.
        tied: names of one weight each, beside what a `Transformer`'s config says.

    Raises:
        InvariantError: on every rank, with the same text.
    """
    axes = () if mesh is None else tuple(mesh.mesh_dim_names or ())
    if not axes and world_size() > 1:
        raise ValueError(
            "give a mesh with named axes: without one, nothing would be compared"
        )
    ties = [*map(tuple, tied), *_declared_ties(model)]
    world = _exchange(describe(model, optimizer), mesh, axes)
    faults = list(violations(World(axes, world), ties))
    if faults:
        shown = "".join(f"\n- {fault}" for fault in faults[:MOST])
        more = f"\n- and {len(faults) - MOST} more" if len(faults) > MOST else ""
        raise InvariantError(f"the ranks do not hold one model:{shown}{more}")


# ---- what a rank writes down


@dataclass(frozen=True)
class Bits:
    """A tensor without its values: shape, dtype, and a digest of every bit."""

    shape: tuple[int, ...]
    dtype: str
    digest: bytes


@dataclass(frozen=True)
class Held:
    """What one rank holds of one tensor.

    Attributes:
        kind: `parameter`, `buffer` or `state` (of the optimizer).
        bits: Of the tensor.
        sharded: Pairs of an axis and a dim, in the order of splitting.
        partial: The axes over which the gradient was a partial sum.
        gradient: Its bits, if there is one.
        finite: Whether every element of the gradient is finite.
        completed: Whether `finalize_gradients` knows the parameter; True also where
            no optimizer is given.
        storage: The same for two names of one tensor; it means nothing elsewhere.
    """

    kind: str
    bits: Bits
    sharded: tuple[tuple[str, int | None], ...] = ()
    partial: frozenset[str] = frozenset()
    gradient: Bits | None = None
    finite: bool = True
    completed: bool = True
    storage: tuple[int, ...] = ()


Notes = Mapping[str, Held]


def describe(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Notes:
    """This rank's notes, by name: parameters, buffers, and the optimizer's state."""
    named = dict(model.named_parameters(remove_duplicate=False))
    names: dict[Tensor, str] = {p: name for name, p in reversed(named.items())}
    groups = optimizer.param_groups if optimizer else []
    for i, group in enumerate(groups):
        for j, parameter in enumerate(group["params"]):
            if parameter not in names:  # a shard that only the optimizer has
                names[parameter] = name = f"optimizer.param_groups[{i}][{j}]"
                named[name] = parameter
    stepped = {id(p) for group in groups for p in group["params"]}
    notes = {
        name: _held("parameter", p, completed=optimizer is None or id(p) in stepped)
        for name, p in named.items()
    }
    for name, buffer in model.named_buffers(remove_duplicate=False):
        notes[name] = _held("buffer", buffer)
    for parameter, state in (optimizer.state if optimizer else {}).items():
        where = tuple(placement(parameter).sharded.items())
        for key, value in state.items():
            if isinstance(value, (bool, int, float)):  # such as a count of steps
                value = torch.tensor(value)
            if isinstance(value, Tensor):
                notes[f"{names[parameter]}:{key}"] = Held("state", _bits(value), where)
    return notes


def _held(kind: str, tensor: Tensor, completed: bool = True) -> Held:
    where, gradient = placement(tensor), tensor.grad
    return Held(
        kind,
        _bits(tensor),
        tuple(where.sharded.items()),
        where.partial,
        None if gradient is None else _bits(gradient),
        gradient is None or bool(_values(gradient).isfinite().all()),
        completed,
        (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), *tensor.shape),
    )


def _values(gradient: Tensor) -> Tensor:
    return (
        gradient if gradient.layout == torch.strided else gradient.coalesce().values()
    )


def _bits(tensor: Tensor) -> Bits:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    raw = plain.cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.blake2b(raw.numpy().data, digest_size=16).digest()
    return Bits(tuple(tensor.shape), str(tensor.dtype), digest)


def _declared_ties(model: nn.Module) -> list[tuple[str, ...]]:
    parts = [m for m in model.modules() if isinstance(m, Transformer)]
    prefix = {id(m): name for name, m in model.named_modules()}
    names = ("embed.tokens.weight", "head.weight")
    return [
        tuple(f"{prefix[id(m)]}.{name}".lstrip(".") for name in names)
        for m in parts
        if m.config.tie_embeddings
    ]


def _exchange(
    notes: Notes, mesh: DeviceMesh | None, axes: Sequence[str]
) -> Mapping[tuple[int, ...], tuple[int, Notes]]:
    """Every rank's number and notes, by its place on the mesh."""
    place = () if mesh is None else tuple(mesh.get_coordinate() or ())
    world = {place: (own_rank(), notes)}
    for i in range(len(axes)):  # each axis hands on what the axes before it brought
        assert mesh is not None
        if (group := mesh.get_group(i)).size() == 1:
            continue
        parts: list[dict[tuple[int, ...], tuple[int, Notes]]] = [{}] * group.size()
        dist.all_gather_object(parts, world, group=group)
        world = {place: seen for part in parts for place, seen in part.items()}
    return world


# ---- the faults in all ranks' notes


@dataclass(frozen=True)
class World:
    """All ranks' notes: by place on the mesh, the rank's number and what it holds."""

    axes: tuple[str, ...]
    places: Mapping[tuple[int, ...], tuple[int, Notes]]

    def holders(self, name: str) -> dict[int, Held]:
        """The ranks that hold `name`, and what of it."""
        return {r: notes[name] for r, notes in self.places.values() if name in notes}

    def groups(self, axis: str) -> Iterator[list[tuple[int, Notes]]]:
        """The ranks that differ along `axis` only, group by group."""
        i = self.axes.index(axis)
        groups: dict[tuple[int, ...], list[tuple[int, Notes]]] = {}
        for place, seen in sorted(self.places.items(), key=lambda item: item[0]):
            groups.setdefault(place[:i] + place[i + 1 :], []).append(seen)
        yield from groups.values()

    @property
    def names(self) -> list[str]:
        """Every name that some rank holds, in their order."""
        notes = (notes for _, notes in self.places.values())
        return list(dict.fromkeys(itertools.chain.from_iterable(notes)))


def violations(world: World, ties: Iterable[Sequence[str]] = ()) -> Iterator[str]:
    """Every fault in the notes of all ranks, in words."""
    sound = []
    for name in world.names:
        if faults := list(_placement_faults(world, name)):
            yield from faults
        else:
            sound.append(name)
    for name in sound:
        yield from _replica_faults(world, name)
        yield from _gradient_faults(world, name)
    yield from _tie_faults(world, ties)


def _placement_faults(world: World, name: str) -> Iterator[str]:
    held = world.holders(name)
    one = next(iter(held.values()))
    title = f"{one.kind} {name}"
    alike = {r: (h.kind, h.sharded, h.partial) for r, h in held.items()}
    if len(set(alike.values())) > 1:
        yield f"{title}: placed differently on ranks {_sides(alike)}"
        return
    sharded = dict(one.sharded)
    for axis in sorted({*sharded, *one.partial} - set(world.axes)):
        known = ", ".join(world.axes) or "no axes"
        yield f"{title}: placed over axis {axis!r}, but the mesh has {known}"
    for axis in sorted(set(sharded) & one.partial):
        yield f"{title}: both sharded and partial over {axis}"
    wrong = [
        (axis, dim, rank)
        for axis, dim in sharded.items()
        for rank, h in held.items()
        if dim is not None
        and one.kind != "state"
        and dim not in range(len(h.bits.shape))
    ]
    for axis, dim, rank in wrong:
        shape = list(held[rank].bits.shape)
        yield f"{title}: sharded over {axis} on dim {dim}, but rank {rank} has {shape}"


def _replica_faults(world: World, name: str) -> Iterator[str]:
    """Along each axis: the same bits, or shards that fit, or different tensors."""
    one = next(iter(world.holders(name).values()))
    sharded, title = dict(one.sharded), f"{one.kind} {name}"
    for axis in world.axes:
        dim = sharded.get(axis)
        if axis in sharded and (dim is None or one.kind == "state"):
            continue
        for group in world.groups(axis):
            here = {rank: notes[name].bits for rank, notes in group if name in notes}
            absent = [rank for rank, notes in group if name not in notes]
            if here and absent and not _splits_model(world, one, axis):
                yield f"{title}: along {axis} missing on ranks {_list(absent)}"
            if axis in sharded and dim is not None:
                rest = {r: b.shape[:dim] + b.shape[dim + 1 :] for r, b in here.items()}
                if len(set(rest.values())) > 1:
                    shapes = {r: list(b.shape) for r, b in here.items()}
                    yield f"{title}: shards along {axis} do not fit: {shapes}"
            elif len(set(here.values())) > 1:
                yield f"{title}: replicas along {axis} differ, on ranks {_sides(here)}"


def _splits_model(world: World, held: Held, axis: str) -> bool:
    """Whether ranks along `axis` may have other buffers: they have other parameters."""
    return held.kind == "buffer" and any(
        (axis, None) in h.sharded for _, n in world.places.values() for h in n.values()
    )


def _gradient_faults(world: World, name: str) -> Iterator[str]:
    held = world.holders(name)
    one = next(iter(held.values()))
    title, sharded = f"gradient of {name}", dict(one.sharded)
    for rank, h in held.items():
        if h.gradient is None:
            continue
        want, got = (h.bits.shape, h.bits.dtype), (h.gradient.shape, h.gradient.dtype)
        if want != got:
            yield f"{title}: on rank {rank} {got}, but the parameter is {want}"
        if not h.finite:
            yield f"{title}: not finite on rank {rank}"
        if h.partial and not h.completed:
            axes = ", ".join(sorted(h.partial))
            yield (
                f"{title}: partial over {axes} on rank {rank}, and not in the "
                "optimizer, so that nobody completes it"
            )
    for axis in world.axes:
        if axis in sharded and sharded[axis] is None:
            continue
        for group in world.groups(axis):
            here = {r: notes[name] for r, notes in group if name in notes}
            here = {r: h for r, h in here.items() if 0 not in h.bits.shape}
            absent = [rank for rank, h in here.items() if h.gradient is None]
            if 0 < len(absent) < len(here):
                yield f"{title}: along {axis} missing on ranks {_list(absent)}"
            elif axis not in sharded and len({h.gradient for h in here.values()}) > 1:
                sides = _sides({r: h.gradient for r, h in here.items()})
                yield f"{title}: not complete along {axis}: differs on ranks {sides}"


def _tie_faults(world: World, ties: Iterable[Sequence[str]]) -> Iterator[str]:
    declared = {frozenset(tie) for tie in ties}
    found = {pair for _, notes in world.places.values() for pair in _tied_pairs(notes)}
    pairs = found | {
        frozenset(p) for t in declared for p in itertools.combinations(t, 2)
    }
    for pair in sorted(map(sorted, pairs)):
        a, b = pair
        untied = [
            rank
            for rank, notes in world.places.values()
            if a in notes and b in notes and notes[a].storage != notes[b].storage
        ]
        if untied:
            yield f"{a} and {b} are tied, but two tensors on ranks {_list(untied)}"
        for axis in world.axes:
            for group in world.groups(axis):
                apart = dict(_held_apart(group, axis, a, b))
                if len(set(apart.values())) > 1:
                    sides = _sides(apart)
                    yield f"{a} and {b} are tied, but differ along {axis}: {sides}"


def _held_apart(
    group: list[tuple[int, Notes]], axis: str, a: str, b: str
) -> Iterator[tuple[int, Bits]]:
    """What ranks hold of `a` or `b`, where `axis` puts them on different ranks."""
    for rank, notes in group:
        if (a in notes) != (b in notes):
            held = notes[a if a in notes else b]
            if (axis, None) in held.sharded:
                yield rank, held.bits


def _tied_pairs(notes: Notes) -> Iterator[frozenset[str]]:
    by_storage: dict[tuple[int, ...], list[str]] = {}
    for name, held in notes.items():
        if held.kind == "parameter" and 0 not in held.bits.shape:
            by_storage.setdefault(held.storage, []).append(name)
    for names in by_storage.values():
        yield from map(frozenset, itertools.combinations(names, 2))


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _sides(values: Mapping[int, object]) -> str:
    """Ranks by what they hold: `0, 2 | 1` where 1 differs from the other two."""
    sides: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        sides.setdefault(value, []).append(rank)
    return " | ".join(map(_list, sides.values()))
