"""Buckets: many small gradients in a few large messages.

A message costs its latency however little it carries, so gradients travel together.
The last layer's are ready first, so buckets are filled from the model's end (Li et al.,
2020). The first one is small, as in torch, so that the link has work early.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minitrain.runtime.messages import even, sent_elements

FIRST_BUCKET_BYTES = 2**20


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Returns when it has arrived."""


def plan_buckets(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int = 25 * 2**20,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[nn.Parameter]]:
    """Divides trainable parameters into buckets, in reverse order of registration.

    A bucket holds one dtype on one device, and is closed once it has `bucket_bytes` of
    gradients, the first one with `first_bytes` already. A pure function of the model,
    so every rank makes the same buckets in the same order: that in which they will be
    full.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte")
    expected = [p for p in parameters if p.requires_grad][::-1]
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    limit = min(first_bytes, bucket_bytes)
    for parameter in expected:
        bucket = filling.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(parameter)
        if gradient_bytes(bucket) >= limit:
            buckets.append(filling.pop((parameter.dtype, parameter.device)))
            limit = bucket_bytes
    turn = {parameter: i for i, parameter in enumerate(expected)}
    return sorted([*buckets, *filling.values()], key=lambda b: turn[b[-1]])


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of the parameters' gradients."""
    return sum(p.numel() * p.element_size() for p in parameters)


def gradient_wire_bytes(
    buckets: Sequence[Sequence[Tensor]],
    ranks: int,
    position: int = 0,
    element_bytes: int | None = None,
) -> int:
    """Bytes that one rank sends when each bucket is summed by a ring.

    2 (N - 1) / N times the bytes of the gradients; exactly so where N divides the
    elements of each bucket, else up to the rounding of its N pieces.

    Args:
        buckets: what `plan_buckets` made.
        ranks: N.
        position: place of the rank in the group.
        element_bytes: of what travels; by default float32, or wider if they are.
    """
    total = 0
    for bucket in buckets:
        pieces = even(sum(p.numel() for p in bucket), range(ranks))
        size = element_bytes or wide(bucket[0].dtype).itemsize
        total += size * sent_elements("all_reduce", pieces, position)
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed: float32, or wider if they are.

    bfloat16 has 8 significant bits: 256 + 1 is 256 again.
    """
    return torch.promote_types(dtype, torch.float32)


class Bucket:
    """Parameters whose gradients travel together, and the memory they travel in.

    `.grad` of each parameter becomes a view of `flat`. Where the sum needs a wider
    dtype, `wire` is a copy in it, and the sums are copied back; else it is `flat`
    itself. A lone gradient is sent from where it lies.

    Attributes:
        parameters: in the order in which their gradients are expected.
        flat: the gradients, one after the other. [elements]
        wire: what is sent. [elements]
        missing: how many gradients this backward still owes.
        work: the message under way.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None
    ) -> None:
        self.parameters = parameters
        first, dtype = parameters[0], reduce_dtype or wide(parameters[0].dtype)
        self.single = len(parameters) == 1 and dtype == first.dtype
        sizes = [0 if self.single else p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.wire = self.flat.to(dtype)
        self.missing = 0
        self.work: Work | None = None
        if not self.single:
            self.grads = self._views(self.flat)
            self.slots = self._views(self.wire)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in self.parameters])
        return [a.view(p.shape) for a, p in zip(pieces, self.parameters, strict=True)]

    def fill(self, at: int) -> None:
        """Moves in the gradient of the parameter `at` this place, or zeros."""
        parameter = self.parameters[at]
        grad = parameter.grad
        if grad is None:
            grad = parameter.new_zeros(parameter.shape)
        if self.single:
            place = self.wire = grad.contiguous()
        else:
            place = self.grads[at]
            if grad is not self.slots[at]:  # it is, after zero_grad(set_to_none=False)
                self.slots[at].copy_(grad)
        if parameter.requires_grad:  # it may have been frozen since
            parameter.grad = place  # frees what autograd had allocated

    def finish(self) -> None:
        """Waits for the sum; then it is in the parameters' gradients."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.wire.dtype != self.flat.dtype:
            self.flat.copy_(self.wire)
