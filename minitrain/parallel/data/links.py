"""Ways to sum a buffer over a group: what `ddp` takes as `all_reduce`."""

import torch.distributed as dist
from torch import Tensor

from minitrain.parallel.data.buckets import Work


def built_in(buffer: Tensor, group: dist.ProcessGroup) -> Work:
    """The backend's own all-reduce, started and not waited for."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work
