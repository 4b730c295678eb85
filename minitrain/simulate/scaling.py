"""A recorded program as it would run on another number of data-parallel ranks.

What a rank computes does not depend on how many others do the same, as long as its own
share of the batch stays: only the groups grow. So one recording serves a whole curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from minitrain.runtime import Layout
from minitrain.runtime.layout import AXES
from minitrain.runtime.messages import Message, even, sent_elements
from minitrain.simulate.recording import Role

WHOLE = ("all_reduce", "broadcast", "reduce", "barrier", "send", "recv")
"""Messages whose buffer does not depend on the number of ranks."""


def rescale(roles: Sequence[Role], old: Layout, new: Layout) -> list[Role]:
    """The roles of `old`, in the groups of `new`, whose `dp` differs.

    Raises:
        ValueError: Another axis differs; `old` has one data-parallel rank only, so that
            its groups along that axis cannot be told; or a buffer is divided over the
            ranks, so that what each computes would be another.
    """
    if replace(old, dp=1, ep=1) != replace(new, dp=1, ep=1) or old.ep != new.ep:
        raise ValueError(f"{old} and {new} differ in more than dp: record again")
    if old.dp == 1 and new.dp > 1:
        raise ValueError(f"{old} has no groups along dp: record on 2 ranks at least")
    if any("dp" in role.place for role in roles) and old.dp != new.dp:
        raise ValueError(
            "each data-parallel rank was recorded by itself, so those of another "
            "number are not known: record again"
        )
    return [_rescaled(role, old, new) for role in roles]


def _rescaled(role: Role, old: Layout, new: Layout) -> Role:
    place = old.coordinates(role.rank)
    rank = new.rank(**place)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    messages = []
    for m in role.trace.messages:
        if m.group not in known:
            known[m.group] = _regroup(m.group, place, old, new)
        if m.op in ("send", "recv") and old.dp != new.dp:
            assert m.peer is not None
            if old.coordinates(m.peer)["dp"] != place["dp"]:
                raise ValueError(
                    f"{m.op} ({m.caller}) goes from one data-parallel rank to another; "
                    "which, and how often, depends on their number: record again"
                )
        grows = len(known[m.group]) != len(m.group)
        if grows and m.op not in WHOLE:
            raise ValueError(
                f"{m.op} ({m.caller}) divides its buffer over {len(m.group)} ranks, so "
                "on another number each has another part: record again"
            )
        messages.append(_moved(m, known[m.group], rank, old, new))
    trace = replace(role.trace, rank=rank, world_size=new.world_size, messages=messages)
    share = role.ranks * new.dp // old.dp
    return replace(role, rank=rank, ranks=share, trace=trace)


def _regroup(
    group: tuple[int, ...], place: dict[str, int], old: Layout, new: Layout
) -> tuple[int, ...]:
    """The group along the same axes."""
    along = {axis: {old.coordinates(r)[axis] for r in group} for axis in AXES}
    whole = [a for a in AXES if len(along[a]) == getattr(old, a)]
    ranges = [
        range(getattr(new, a)) if a in whole and len(along[a]) > 1 else [place[a]]
        for a in AXES
    ]
    size = 1
    for axis in AXES:
        size *= len(along[axis])
        if axis not in whole and len(along[axis]) > 1:
            size = 0  # a part of an axis
    if size != len(group):
        raise ValueError(f"a group of {len(group)} ranks is not one along whole axes")
    places = (dict(zip(AXES, p, strict=True)) for p in product(*ranges))
    return tuple(sorted(new.rank(**p) for p in places))


def _moved(
    m: Message, group: tuple[int, ...], rank: int, old: Layout, new: Layout
) -> Message:
    peer = m.peer
    if peer is not None:
        there = old.coordinates(peer)
        if there["dp"] >= new.dp:
            raise ValueError(
                f"{m.op} ({m.caller}) has rank {peer} as its root, and there is no "
                "such rank on fewer: record again"
            )
        peer = new.rank(**there)
    if m.op in ("send", "recv") or not m.payload_bytes:
        return replace(m, group=group, peer=peer)
    root = 0 if peer is None else group.index(peer)
    pieces = even(m.payload_bytes, group)
    sent = sent_elements(m.op, pieces, group.index(rank), root)
    return replace(m, group=group, peer=peer, wire_bytes=sent)
