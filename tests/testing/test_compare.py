"""The harness itself must be able to say no."""

import pytest
import torch
from torch import nn

from minitrain.testing import assert_all_close, assert_close, assert_same_gradients


def test_accepts_rounding_and_rejects_more() -> None:
    b = torch.tensor([1000.0, 0.001])
    assert_close(b + torch.tensor([0.0, 0.005]), b)  # 5e-6 of the largest value
    with pytest.raises(AssertionError, match=r"weight.*differs.*\[1\]"):
        assert_close(b + torch.tensor([0.0, 0.02]), b, name="weight")
    with pytest.raises(AssertionError, match="differs"):
        assert_close((b + 1e-5).double(), b.double())
    with pytest.raises(AssertionError, match="differs"):
        assert_close(b.nextafter(b + 1), b, tol=0.0)


def test_zero_is_only_close_to_zero() -> None:
    assert_close(torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError):
        assert_close(torch.full((3,), 1e-30), torch.zeros(3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite_is_never_equal(bad: float) -> None:
    x = torch.tensor([1.0, bad])
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(x, x.clone())


def test_shape_and_dtype_count() -> None:
    with pytest.raises(AssertionError, match=r"\[2, 1\]"):
        assert_close(torch.ones(2, 1), torch.ones(2))
    with pytest.raises(AssertionError, match="float64"):
        assert_close(torch.ones(2).double(), torch.ones(2))
    with pytest.raises(ValueError, match="tolerance"):
        assert_close(torch.ones(2).half(), torch.ones(2).half())


def test_names_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"missing \['b'\]"):
        assert_all_close({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})


def test_gradients_of_models() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    a, b = model(), model()
    with pytest.raises(AssertionError, match="no gradients"):
        assert_same_gradients(a, b)
    x = torch.ones(5, 3)
    a(x).sum().backward()
    b(x).sum().backward()
    assert_same_gradients(a, b)
    a[1].bias.grad = None
    with pytest.raises(AssertionError, match="missing"):
        assert_same_gradients(a, b)
    a[1].bias.grad = b[1].bias.grad * 2  # the scale that Adam would hide
    with pytest.raises(AssertionError, match=r"1\.bias"):
        assert_same_gradients(a, b)
