"""The closed forms for one plan: the same code, with numbers where NumPy has arrays.

A function of NumPy on a single number takes a microsecond, most of it to find out that
it is no array, and returns NumPy's own number, which is slow from there on. Bound to
the functions below instead, the very same closed forms take a fraction of the time.
"""

import math
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

NUMBERS = SimpleNamespace(
    abs=abs,
    ceil=math.ceil,
    floor=math.floor,
    log2=math.log2,
    maximum=lambda a, b: a if a >= b else b,
    minimum=lambda a, b: a if a <= b else b,
    sqrt=math.sqrt,
    where=lambda condition, a, b: a if condition else b,
)
"""What closed forms use of NumPy, of numbers: both branches of `where` are evaluated,
as in an array."""


class Forms(SimpleNamespace):
    """Closed forms by module, as `forms.step.step_seconds`."""

    def __repr__(self) -> str:
        return f"<closed forms of {', '.join(vars(self))}>"


def for_numbers(modules: Iterable[ModuleType]) -> Forms:
    """Copies of the functions of `modules` that take numbers only.

    The copies call each other, by module or by name, and no original.
    """
    parts = {module.__name__: module for module in modules}
    copied: dict[str, SimpleNamespace] = {name: SimpleNamespace() for name in parts}
    made: dict[Callable[..., Any], FunctionType] = {}
    for name, module in parts.items():
        for key, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ == name:
                made[value] = copy = FunctionType(
                    value.__code__, {}, key, value.__defaults__
                )
                setattr(copied[name], key, copy)
    for name, module in parts.items():
        own = {
            key: made.get(value, value) if isinstance(value, FunctionType) else value
            for key, value in vars(module).items()
        }
        for key, value in own.items():
            if isinstance(value, ModuleType) and value.__name__ in copied:
                own[key] = copied[value.__name__]
        own["np"] = NUMBERS
        for value in vars(copied[name]).values():
            value.__globals__.update(own)
    return Forms(**{n.rpartition(".")[2]: c for n, c in copied.items()})
