"""The process side of training: ranks, groups, layouts and traces.

:func:`launch` starts ranks, :func:`init` joins a group, :class:`Layout` says which
rank stands where, :func:`trace` records what a rank sends and keeps in memory.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitrain.runtime.errors import LaunchError, RankError, StallError
    from minitrain.runtime.group import device, init, rank, world_size
    from minitrain.runtime.launcher import launch
    from minitrain.runtime.layout import Layout
    from minitrain.runtime.tracing import trace
    from minitrain.runtime.values import read

_HOME = {
    "LaunchError": "errors",
    "Layout": "layout",
    "RankError": "errors",
    "StallError": "errors",
    "device": "group",
    "init": "group",
    "launch": "launcher",
    "rank": "group",
    "read": "values",
    "trace": "tracing",
    "world_size": "group",
}
__all__ = [
    "LaunchError",
    "Layout",
    "RankError",
    "StallError",
    "device",
    "init",
    "launch",
    "rank",
    "read",
    "trace",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
