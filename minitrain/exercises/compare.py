"""Compare what a reader's function returned with what is right, in words."""

import math
import numbers
from typing import Any

import torch

MOST = 160  # characters of one value in a message


def difference(
    got: Any, expected: Any, tolerance: float, place: str = "", part: str = "element"
) -> str:
    """Say how `got` differs from `expected`; an empty string says that it does not.

    Whole numbers are compared exactly, others to `tolerance` (relative, for tensors to
    the largest element). Lists and tuples count as the same, and are compared element
    by element; `place` says which element is meant, and `part` what it is called.
    """
    if isinstance(expected, torch.Tensor):
        return _tensor(got, expected, tolerance, place)
    if isinstance(expected, list | tuple):
        return _sequence(got, expected, tolerance, place, part)
    if isinstance(expected, bool) or not isinstance(expected, numbers.Real):
        same = type(got) is type(expected) and got == expected
        return "" if same else _says(got, expected, place)
    return _number(got, expected, tolerance, place)


def short(value: Any) -> str:
    """`value` in at most one line."""
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        text = f"a {_kind(value)}"
    elif isinstance(value, torch.Tensor):
        text = f"tensor({_digits(value.tolist())})"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= MOST else text[: MOST - 3] + "..."


def _digits(value: Any) -> str:
    """Nested lists of numbers, floats to four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_digits, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _says(got: Any, expected: Any, place: str) -> str:
    where = f"{place}: " if place else ""
    return f"{where}expected {short(expected)}, got {short(got)}"


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} tensor of shape {list(tensor.shape)}"


def _number(got: Any, expected: Any, tolerance: float, place: str) -> str:
    if isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, numbers.Real):
        return _says(got, expected, place)
    if isinstance(expected, int):
        same = got == expected
    else:
        least = tolerance * min(1.0, abs(expected)) if expected else tolerance
        same = math.isclose(got, expected, rel_tol=tolerance, abs_tol=least)
    return "" if same else _says(got, expected, place)


def _sequence(got: Any, expected: Any, tolerance: float, place: str, part: str) -> str:
    if not isinstance(got, list | tuple) or len(got) != len(expected):
        return _says(got, expected, place)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        inner = f"{place}, {part} {i}" if place else f"{part} {i}"
        if fault := difference(g, e, tolerance, inner):
            return fault
    return ""


def _tensor(got: Any, expected: torch.Tensor, tolerance: float, place: str) -> str:
    if not isinstance(got, torch.Tensor):
        return _says(got, expected, place)
    where = f"{place}: " if place else ""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{where}expected a {_kind(expected)}, got a {_kind(got)}"
    if not expected.numel():
        return ""
    wide = torch.promote_types(expected.dtype, torch.float64)
    gap = (got.detach().to(wide) - expected.detach().to(wide)).abs().max().item()
    if gap <= tolerance * expected.abs().max().item():  # a NaN fails
        return ""
    if expected.numel() <= 4:
        return _says(got, expected, place)
    return f"{where}off by {gap:.3g} at the worst of {expected.numel()} elements"
