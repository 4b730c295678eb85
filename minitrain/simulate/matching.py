"""Which message of one rank is the other end of which message of another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from minitrain.display import bytes_text
from minitrain.runtime import Layout
from minitrain.runtime.messages import Message
from minitrain.simulate.recording import Role


class Meeting(NamedTuple):
    """A message with all the roles that take part in it.

    Attributes:
        ends: Role and place in its trace's messages; of a send, sender and receiver.
        message: As the first of them recorded it.
        stream: Messages of one stream follow each other.
        domains: Scale-up domains that its ranks lie in.
    """

    ends: tuple[tuple[int, int], ...]
    message: Message
    stream: Hashable
    domains: int


def match(roles: Sequence[Role], layout: Layout, domain_ranks: int) -> list[Meeting]:
    """All messages of the roles, each once.

    Collectives of a group meet in the order in which each rank makes them, and so do
    the sends from one rank to another.

    Args:
        roles: The recorded ones.
        layout: Of all ranks.
        domain_ranks: Ranks of a scale-up domain.

    Raises:
        ValueError: Roles call different collectives, or a send has no receive.
    """
    matcher = _Matcher(roles, layout, domain_ranks)
    for number, role in enumerate(roles):
        for place, message in enumerate(role.trace.messages):
            matcher.take(number, place, message)
    return [*matcher.collectives(), *matcher.sends()]


class _Matcher:
    def __init__(
        self, roles: Sequence[Role], layout: Layout, domain_ranks: int
    ) -> None:
        self.roles, self.layout, self.domain_ranks = roles, layout, domain_ranks
        self.places = {tuple(r.place.items()): i for i, r in enumerate(roles)}
        self.axes = list(roles[0].place)
        self.known: dict[tuple[int, ...], tuple[tuple[int, ...], int, Hashable]] = {}
        self.calls: dict[Hashable, dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.members: dict[Hashable, tuple[tuple[int, ...], int]] = {}
        self.sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def take(self, role: int, place: int, message: Message) -> None:
        """Notes one message under what it can meet."""
        if message.op in ("send", "recv"):
            assert message.peer is not None, "a receive from anyone is not simulated"
            peer = self.role_of(message.peer)
            mine = self.roles[role].rank
            domains = len({r // self.domain_ranks for r in (message.peer, mine)})
            if message.op == "send":
                self.sent[role, peer].append((place, domains))
            else:
                self.received[peer, role].append((place, domains))
            return
        members, domains, key = self.group(message.group)
        self.members[key] = members, domains
        self.calls[key][role].append(place)

    def group(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], int, Hashable]:
        """Roles of a group, its domains, and what its calls are matched by."""
        if ranks not in self.known:
            members = tuple(sorted({self.role_of(r) for r in ranks}))
            domains = len({r // self.domain_ranks for r in ranks})
            inside = all(self.roles[m].rank in set(ranks) for m in members)
            key = ranks if inside else (members, len(ranks))
            self.known[ranks] = members, domains, key
        return self.known[ranks]

    def role_of(self, rank: int) -> int:
        if not self.axes:
            return 0
        place = self.layout.coordinates(rank)
        return self.places[tuple((axis, place[axis]) for axis in self.axes)]

    def collectives(self) -> list[Meeting]:
        """The collectives, each with all its roles."""
        meetings = []
        for key, calls in self.calls.items():
            members, domains = self.members[key]
            for turn in range(max(map(len, calls.values()))):
                ends = []
                for role in members:
                    places = calls.get(role, [])
                    if turn >= len(places):
                        raise ValueError(self.missing(key, turn, role))
                    ends.append((role, places[turn]))
                self.agree(ends)
                message = self.message(*ends[0])
                meetings.append(Meeting(tuple(ends), message, key, domains))
        return meetings

    def agree(self, ends: Sequence[tuple[int, int]]) -> None:
        """Refuses roles that call different collectives at the same turn."""
        first = self.message(*ends[0])
        for end in ends[1:]:
            other = self.message(*end)
            sizes = first.payload_bytes, other.payload_bytes
            uneven = first.op == "all_to_all" or sizes[0] == sizes[1]
            alike = (first.op, first.dtype) == (other.op, other.dtype)
            if not (alike and uneven and self.root(ends[0]) == self.root(end)):
                raise ValueError(
                    f"{self.words(*ends[0])}, but {self.words(*end)}: ranks of a group "
                    "must make the same calls in the same order"
                )

    def root(self, end: tuple[int, int]) -> int | None:
        """Place in the group of the root; groups of one role may be several."""
        m = self.message(*end)
        return None if m.peer is None else m.group.index(m.peer)

    def sends(self) -> list[Meeting]:
        """The sends, each with its receive."""
        meetings = []
        for pair in sorted({*self.sent, *self.received}):
            sent, received = self.sent[pair], self.received[pair]
            names = [self.roles[role].name for role in pair]
            if len(sent) != len(received):
                raise ValueError(
                    f"{names[0]} sends {len(sent)} messages to {names[1]}, which "
                    f"receives {len(received)} from there"
                )
            # Around a ring of one role only some sends leave the domain, but the rest
            # waits for those.
            for (place, from_), (other, to) in zip(sent, received, strict=True):
                domains = max(from_, to)
                ends = (pair[0], place), (pair[1], other)
                one, two = (self.message(*end) for end in ends)
                if one.payload_bytes != two.payload_bytes:
                    raise ValueError(
                        f"{self.words(*ends[0])}, but {self.words(*ends[1])}"
                    )
                meetings.append(Meeting(ends, one, ("send", *pair), domains))
        return meetings

    def message(self, role: int, place: int) -> Message:
        return self.roles[role].trace.messages[place]

    def words(self, role: int, place: int) -> str:
        m = self.message(role, place)
        size = bytes_text(m.payload_bytes)
        root = "" if m.peer is None or m.kind == "p2p" else f" with root {m.peer}"
        name = self.roles[role].name
        return f"{name} calls {m.op} of {size} of {m.dtype}{root} ({m.caller})"

    def missing(self, key: Hashable, turn: int, role: int) -> str:
        caller = next(r for r, p in self.calls[key].items() if len(p) > turn)
        there = self.words(caller, self.calls[key][caller][turn])
        return f"{there}, and {self.roles[role].name} does not"
