"""When two tensors are equal: up to the order of a sum, or bit by bit.

Two tensors agree if max|a - b| <= tol * max|b|, for each tensor by itself: a relative
bound by element would reject honest rounding near zero, one over a whole model would
hide a wrong bias behind a large matrix.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-10, torch.float32: 1e-5}
)
"""What reordered sums may cost, by dtype; a wrong term costs far more."""


def assert_close(
    actual: Tensor, expected: Tensor, tol: float | None = None, name: str = "tensor"
) -> None:
    """Checks that `actual` equals `expected` up to `tol` * max|expected|.

    Args:
        actual: what the technique computed.
        expected: the oracle's, of the same shape and dtype.
        tol: by default `TOLERANCE` of the dtype, for whole numbers 0.0.
        name: what the message calls the tensor.

    Raises:
        AssertionError: shape, dtype or values differ, or a value is not finite.
        ValueError: the floating-point dtype has no default tolerance and none is given.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {actual.dtype} {list(actual.shape)}, "
            f"expected {expected.dtype} {list(expected.shape)}"
        )
    if tol is None and not expected.is_floating_point():
        tol = 0.0
    elif tol is None:
        if expected.dtype not in TOLERANCE:
            raise ValueError(f"{name}: give a tolerance for {expected.dtype}")
        tol = TOLERANCE[expected.dtype]
    if not expected.numel():
        return
    a, b = actual.detach().double().flatten(), expected.detach().double().flatten()
    if not (a.isfinite().all() and b.isfinite().all()):
        raise AssertionError(f"{name}: not finite")
    error, at = (a - b).abs().max(0)
    scale = b.abs().max()
    if error > tol * scale:
        where = [int(i) for i in torch.unravel_index(at, expected.shape)]
        raise AssertionError(
            f"{name}: differs by {error:.3e} at {where} ({a[at]:.9g}, expected "
            f"{b[at]:.9g}); the largest value is {scale:.3e}, so the relative error "
            f"{error / scale:.1e} exceeds {tol:.0e}{_factor_text(a, b)}"
        )


def _factor_text(a: Tensor, b: Tensor) -> str:
    """Says so if `a` is a multiple of `b`: a sum done twice, a mean for a sum."""
    if len(b) < 2 or not b.any():
        return ""
    factor = (a @ b) / (b @ b)
    multiple = (a - factor * b).abs().max() <= 1e-4 * (factor * b).abs().max()
    return f"; it is {factor:.4g} times what is expected" if multiple else ""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected|; 0 if they are equal, or have no element.

    Where all of `expected` is zero, a difference is infinite.
    """
    if not expected.numel():
        return 0.0
    gap = (actual.detach().double() - expected.detach().double()).abs().max()
    return float(gap / expected.detach().double().abs().max()) if gap else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every bit agree: 0 is not -0, a NaN is itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def assert_all_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tol: float | None = None,
) -> None:
    """`assert_close` for each name; the names must be the same."""
    if actual.keys() != expected.keys():
        missing = sorted(expected.keys() - actual.keys())
        extra = sorted(actual.keys() - expected.keys())
        raise AssertionError(f"missing {missing}, not expected {extra}")
    for name, value in expected.items():
        assert_close(actual[name], value, tol, name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each gradient by parameter name; parameters without one are left out.

    A tied parameter appears once, under its first name.
    """
    named = model.named_parameters()
    return {n: p.grad.detach().clone() for n, p in named if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each parameter by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same_gradients(
    model: nn.Module | Mapping[str, Tensor],
    oracle: nn.Module | Mapping[str, Tensor],
    tol: float | None = None,
) -> None:
    """Checks every gradient of `model` against the oracle's.

    Compare gradients, before the optimizer: a loss curve forgives most faults, and Adam
    hides a wrong scale altogether.

    Raises:
        AssertionError: a gradient differs, or only one of the two has it.
    """
    actual = gradients(model) if isinstance(model, nn.Module) else model
    expected = gradients(oracle) if isinstance(oracle, nn.Module) else oracle
    if not expected:
        raise AssertionError("the oracle has no gradients; call backward first")
    assert_all_close(actual, expected, tol)
