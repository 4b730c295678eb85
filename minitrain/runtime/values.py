"""The one seam through which library code reads a tensor's value.

A step that runs on tensors without values, as in a simulated cluster, cannot look at
them. Where the library must (how many tokens went to an expert, whether a gradient
overflowed), it asks here and says what is to be expected.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor


def read(tensor: torch.Tensor, expected: float | int | bool | None = None) -> float:
    """The value of a tensor of one element, as a Python number.

    Args:
        tensor: One element, of any dtype and on any device.
        expected: What to return where the tensor has no value (a fake or meta
            tensor).

    Raises:
        ValueError: The tensor has more than one element, or it has no value and
            nothing was expected of it.
    """
    if tensor.numel() != 1:
        raise ValueError(f"read takes one element, not {tuple(tensor.shape)}")
    if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
        return tensor.item()
    if expected is None:
        raise ValueError("this tensor has no value, and the caller expected none")
    return expected


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank of the group hands in, in group order.

    Ranks that are not there (a simulated group) hand in the same as this one.

    Args:
        mine: Anything that can be pickled.
    """
    if dist.get_backend(group) == "fake":
        return [mine] * group.size()
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    return every
