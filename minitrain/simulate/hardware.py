"""Clusters as data: which accelerators, in which hosts, on which links.

A cluster is written in one of two ways. In one word, where the usual links will do:

    cluster("h100:2048x8")           # 2,048 hosts of 8 H100

or as a file, whose every line but `accelerator` and `hosts` may be left out:

    accelerator = "h100"             # or a table, see below
    hosts = 16
    per_host = 8
    power_derate = 0.9               # share of the peak that power and cooling allow

    [inside]                         # NVLink, Infinity Fabric, ICI: of one device
    bytes_per_second = 450e9         # one direction, all links together
    latency_seconds = 1e-6           # of one message
    ranks = 8                        # devices that reach each other over it

    [across]                         # the network: of one device
    bytes_per_second = 50e9
    latency_seconds = 5e-6

The accelerator may be a table too: fields of `Accelerator` that differ from one it is
like.

    [accelerator]
    like = "h100"
    name = "H100 of ours"
    memory_bytes = 96e9
    peak_flops = { bf16 = 800e12 }
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minitrain.collectives.cost import Link
from minitrain.simulate.accelerators import ACCELERATORS, PRECISIONS, Accelerator

__all__ = [
    "ACCELERATORS",
    "INSIDE_LATENCY_SECONDS",
    "NETWORK_LATENCY_SECONDS",
    "PRECISIONS",
    "Accelerator",
    "Cluster",
    "Link",
    "accelerator",
    "cluster",
]

INSIDE_LATENCY_SECONDS = 1e-6
"""A message over NVLink or its like: what a step of a measured ring adds."""
NETWORK_LATENCY_SECONDS = 5e-6
"""A message over InfiniBand or RoCE through one or two switches."""


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal accelerators, and the links between these.

    Attributes:
        accelerator: In every place.
        hosts: Number of hosts.
        per_host: Accelerators of each.
        inside: Link of one accelerator into its scale-up domain.
        across: Link of one accelerator into the network.
        domain_ranks: Accelerators of a scale-up domain.
        power_derate: Share of the accelerator's speed that power and cooling allow.

    Raises:
        ValueError: A number is not positive, or the derate is not a share.
    """

    accelerator: Accelerator
    hosts: int
    per_host: int
    inside: Link
    across: Link
    domain_ranks: int
    power_derate: float = 1.0

    def __post_init__(self) -> None:
        if min(self.hosts, self.per_host, self.domain_ranks) < 1:
            raise ValueError(
                f"{self.hosts} hosts of {self.per_host} accelerators in domains of "
                f"{self.domain_ranks}: at least 1 of each, please"
            )
        if not 0 < self.power_derate <= 1:
            raise ValueError(f"power_derate={self.power_derate}: a share, above 0 to 1")
        if self.domain_ranks > self.world_size:
            raise ValueError(
                f"a domain of {self.domain_ranks} in a cluster of {self.world_size}"
            )

    @property
    def world_size(self) -> int:
        """Accelerators of the cluster."""
        return self.hosts * self.per_host


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name; capitals, spaces and dashes do not matter.

    Raises:
        ValueError: There is none; names those that are near.
    """
    known = {_plain(known): a for known, a in ACCELERATORS.items()}
    if (found := known.get(_plain(name))) is not None:
        return found
    near = difflib.get_close_matches(_plain(name), known, n=3, cutoff=0.4)
    names = [known[n].name for n in near] or sorted(ACCELERATORS)
    raise ValueError(f"no accelerator {name!r}; there is {', '.join(names)}")


def _plain(name: str) -> str:
    """Small letters and digits of a name; spaces, dashes and dots are left out."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def cluster(description: str | Path) -> Cluster:
    """A cluster from `NAME:HOSTSxPER_HOST` or from a TOML file.

    Args:
        description: As the module says.

    Raises:
        ValueError: It does not say a cluster: unknown hardware or field, a number that
            is missing or cannot be.
        FileNotFoundError: There is no such file.
    """
    text = str(description)
    if text.endswith(".toml"):
        try:
            table = tomllib.loads(Path(text).read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{text}: {error}") from error
        return _from_table(table, text)
    match = re.fullmatch(r"([^:]+):(\d+)x(\d+)", text)
    if match is None:
        raise ValueError(
            f"cluster {text!r}: write NAME:HOSTSxPER_HOST, such as h100:2048x8, or the "
            "path of a .toml file"
        )
    name, hosts, per_host = match.groups()
    return _of(accelerator(name), int(hosts), int(per_host))


def _of(device: Accelerator, hosts: int, per_host: int) -> Cluster:
    """With the usual links."""
    reach = hosts * per_host if device.scale_up_hosts else per_host
    return Cluster(
        accelerator=device,
        hosts=hosts,
        per_host=per_host,
        inside=Link(INSIDE_LATENCY_SECONDS, device.scale_up_bytes_per_second),
        across=Link(NETWORK_LATENCY_SECONDS, device.network_bytes_per_second),
        domain_ranks=min(device.scale_up_ranks, reach),
    )


def _from_table(table: Mapping[str, Any], where: str) -> Cluster:
    _known(table, Cluster, where, drop=frozenset({"domain_ranks"}))
    missing = [field for field in ("accelerator", "hosts") if field not in table]
    if missing:
        raise ValueError(f"{where}: {' and '.join(missing)} must be given")
    device = _device(table["accelerator"], where)
    hosts = _whole(table, "hosts", 0, where)
    made = _of(device, hosts, _whole(table, "per_host", device.per_host, where))
    inside = dict(_section(table, "inside", where))
    domain = _whole(inside, "ranks", made.domain_ranks, f"{where} [inside]")
    inside.pop("ranks", None)
    return replace(
        made,
        inside=_link(made.inside, inside, f"{where} [inside]"),
        across=_link(
            made.across, _section(table, "across", where), f"{where} [across]"
        ),
        domain_ranks=domain,
        power_derate=_number(table, "power_derate", 1.0, where),
    )


def _device(value: object, where: str) -> Accelerator:
    """An accelerator from its name, or from a table of what differs."""
    if isinstance(value, str):
        return accelerator(value)
    if not isinstance(value, dict) or "like" not in value:
        raise ValueError(
            f"{where}: accelerator is a name, or a table that says what it is like"
        )
    if not isinstance(value["like"], str):
        raise ValueError(f"{where} [accelerator]: like={value['like']!r} is not a name")
    like = accelerator(value["like"])
    changed = {field: v for field, v in value.items() if field != "like"}
    _known(changed, Accelerator, f"{where} [accelerator]")
    for field in changed:
        old = getattr(like, field)
        if isinstance(old, int | float) and not isinstance(old, bool):
            number = _number(changed, field, 0.0, f"{where} [accelerator]")
            changed[field] = type(old)(number)
    if "peak_flops" in changed:
        words = f"{where} [accelerator]"
        peaks = _section(changed, "peak_flops", words)
        peaks = {p: _number(peaks, p, 0.0, f"{words} peak_flops") for p in peaks}
        changed["peak_flops"] = {**like.peak_flops, **peaks}
    return replace(like, like=like.fitted_as, **changed)


def _link(usual: Link, table: Mapping[str, Any], where: str) -> Link:
    _known(table, Link, where)
    values = {f: _number(table, f, getattr(usual, f), where) for f in table}
    return replace(usual, **values)


def _known(
    table: Mapping[str, Any], kind: type, where: str, drop: frozenset[str] = frozenset()
) -> None:
    """Refuses a field that there is not."""
    names = [f.name for f in fields(kind) if f.name not in drop]
    for field in table:
        if field not in names:
            near = difflib.get_close_matches(field, names, n=3, cutoff=0.4) or names
            raise ValueError(f"{where}: no field {field!r}; there is {', '.join(near)}")


def _section(table: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    value = table.get(field, {})
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {field}={value!r} is not a table, as [{field}]")
    return value


def _number(table: Mapping[str, Any], field: str, default: float, where: str) -> float:
    value = table.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {field}={value!r} is not a number")
    return float(value)


def _whole(table: Mapping[str, Any], field: str, default: int, where: str) -> int:
    value = _number(table, field, default, where)
    if not value.is_integer() or value < 1:
        raise ValueError(f"{where}: {field}={value:g} is not a whole number above 0")
    return int(value)
