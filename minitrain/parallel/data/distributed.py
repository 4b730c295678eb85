"""Distributed data parallelism: gradients are summed while backward still runs.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training" (VLDB 2020), whose three steps these are: gradients travel in buckets, a
bucket leaves as soon as it is full, and accumulation synchronizes once.
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitrain.parallel.data.buckets import (
    FIRST_BUCKET_BYTES,
    Bucket,
    Work,
    plan_buckets,
)
from minitrain.parallel.data.hooks import BackwardHooks
from minitrain.parallel.data.links import built_in
from minitrain.parallel.data.replicas import check_own, complete, make_equal, members

AllReduce = Callable[[Tensor, dist.ProcessGroup], Work]


def ddp(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    axis: str = "dp",
    bucket_bytes: int = 25 * 2**20,
    overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
    all_reduce: AllReduce = built_in,
) -> nn.Module:
    """Data parallelism that sums gradients in buckets, during backward.

    Parameters and buffers become those of the group's first rank. When a backward
    returns, every `.grad` is the sum over the ranks: the loss was divided by the tokens
    of all ranks already. (torch's DDP divides by the number of ranks instead, which is
    right only where all have as many tokens.)

    A parameter that got no gradient here counts as zero, so that ranks may use
    different parts of the model; one that no rank used ends with zeros. Parameters that
    are frozen now stay out. Buffers, if there are any, are the first rank's again after
    backward. If a backward ends in an exception, the ranks that wait get NaN for what
    it owed, so that none of them takes the step.

    `torch.autograd.grad` through the model counts as a backward too: every rank must
    make it, or none.

    The model gets `set_requires_gradient_sync(flag)`, read when a backward begins:
    while it is False, gradients accumulate here alone, and the next synchronized
    backward sums what has accumulated, once. After that they must be zeroed.

    Args:
        model: the same on every rank, up to the values; each rank passes its own.
        group: the ranks that hold other data; by default all.
        axis: the mesh axis that the group stands for. Its sum is done here, so it
            leaves `placement.partial`.
        bucket_bytes: a bucket is closed once it has as many bytes of gradients.
        overlap: send a bucket when it is full, and make the first one small; if False,
            send all when backward has ended.
        reduce_dtype: dtype of the sum; by default float32, or wider if gradients are.
        all_reduce: starts the sum of a buffer over the group, in place.

    Returns:
        The same module, parameter names unchanged.

    Raises:
        ValueError: this rank is not in the group, the ranks have different models, a
            parameter is sharded over the axis, the model synchronizes itself already,
            or `bucket_bytes` is not positive.
        RuntimeError: in backward, if gradients that are sums already would be summed
            again, or if a parameter was unfrozen.
    """
    check_own(model)
    first = FIRST_BUCKET_BYTES if overlap else bucket_bytes  # to give the link work
    plan = plan_buckets(model.parameters(), bucket_bytes, first)
    group = members(group)
    make_equal(model, group, axis)
    complete(model, axis)
    buckets = [Bucket(parameters, reduce_dtype) for parameters in plan]
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, use_local_synchronization=True)
    _Reducer(model, own, buckets, overlap, all_reduce)
    return model


class _Reducer(BackwardHooks):
    """What happens to the gradients of one model in a backward."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        buckets: list[Bucket],
        overlap: bool,
        all_reduce: AllReduce,
    ) -> None:
        self.buckets, self.overlap, self.all_reduce = buckets, overlap, all_reduce
        self.places = [(b, at) for b in buckets for at in range(len(b.parameters))]
        super().__init__(model, group, [p for b in buckets for p in b.parameters])

    def start(self) -> None:
        self.waiting = deque(self.buckets)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def take(self, i: int) -> None:
        """The hook of parameter `i`: counts down its bucket."""
        bucket, at = self.places[i]
        bucket.fill(at)
        bucket.missing -= 1
        if self.overlap and not bucket.missing:
            self.launch_full_buckets()

    def launch_full_buckets(self) -> None:
        """Starts each full bucket whose predecessors have been started.

        Ranks may fill their buckets in different orders, but the n-th all-reduce of one
        rank meets the n-th of the others, so all must start them in one order.
        """
        while self.waiting and not self.waiting[0].missing:
            bucket = self.waiting.popleft()
            if bucket.wire.numel():
                bucket.work = self.all_reduce(bucket.wire, self.group)

    def finish(self) -> None:
        """The end of backward: sends what is left, and waits for all of it."""
        self.launch_full_buckets()
        for bucket in self.buckets:
            bucket.finish()
