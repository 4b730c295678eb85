"""minitrain: distributed training of language models, small enough to read.

Names are imported when first used, so that importing one part of the library
loads that part and what it stands on, and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitrain.display import show
    from minitrain.runtime.errors import RankError, StallError
    from minitrain.runtime.launcher import launch
    from minitrain.runtime.layout import Layout
    from minitrain.runtime.tracing import trace

__version__ = "0.3.0"

_HOME = {
    "launch": "minitrain.runtime.launcher",
    "RankError": "minitrain.runtime.errors",
    "StallError": "minitrain.runtime.errors",
    "Layout": "minitrain.runtime.layout",
    "trace": "minitrain.runtime.tracing",
    "show": "minitrain.display",
}

__all__ = ["Layout", "RankError", "StallError", "launch", "show", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minitrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
