"""Distributed data parallelism: gradients are summed while backward still runs.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training" (VLDB 2020), whose three steps these are: gradients travel in buckets, a
bucket leaves as soon as it is full, and accumulation synchronizes once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minitrain.parallel.data.buckets import Bucket, Work, plan_buckets
from minitrain.parallel.data.links import built_in
from minitrain.parallel.data.replicas import make_equal, members, place
from minitrain.runtime import read
from minitrain.workload.step import Placement, placement

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
    backward.

    The model gets `set_requires_gradient_sync(flag)`, read when a backward begins:
    while it is False, gradients accumulate here alone, and the next synchronized
    backward sums what has accumulated, once. After that they must be zeroed.

    Args:
        model: the same on every rank, up to the values; each rank passes its own.
        group: the ranks that hold other data; by default all.
        axis: the mesh axis that the group stands for. Its sum is done here, so it
            leaves `placement.partial`.
        bucket_bytes: most bytes of gradients in one message.
        overlap: send a bucket when it is full; if False, when backward has ended.
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
    if hasattr(model, "set_requires_gradient_sync"):
        raise ValueError("this model synchronizes its gradients already")
    plan = plan_buckets(model.parameters(), bucket_bytes)
    group = members(group)
    make_equal(model, group, axis)
    for parameter in model.parameters():
        here = placement(parameter)
        place(parameter, Placement(here.sharded, here.partial - {axis}))
    buckets = [Bucket(parameters, reduce_dtype) for parameters in plan]
    _Reducer(model, group, buckets, overlap, all_reduce)
    return model


class _Reducer:
    """What happens to the gradients of one model in a backward."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        buckets: list[Bucket],
        overlap: bool,
        all_reduce: AllReduce,
    ) -> None:
        self.model, self.group, self.buckets = model, group, buckets
        self.overlap, self.all_reduce = overlap, all_reduce
        self.synchronize = True
        self.summed = False  # gradients hold sums, until they are zeroed
        self.backward: int | None = None  # autograd's number of the one that runs
        self.launched = 0
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        for bucket in buckets:
            for i, parameter in enumerate(bucket.parameters):
                hook = partial(self.gradient_is_ready, bucket, i)
                parameter.register_post_accumulate_grad_hook(hook)
        model.register_forward_hook(self.forward_ends)
        model.set_requires_gradient_sync = self.set_synchronize  # type: ignore[assignment]

    def set_synchronize(self, flag: bool) -> None:
        self.synchronize = flag

    def forward_ends(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Backward begins where forward ended: with the gradient of an output."""
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(self.backward_begins)

    def backward_begins(self, _: Tensor | None = None) -> None:
        number = torch._C._current_graph_task_id()
        if number == self.backward:
            return
        if self.backward is not None:  # the last one ended in an exception
            self.wait()
        self.check_gradients()
        if self.synchronize:
            self.backward, self.launched = number, 0
            for bucket in self.buckets:
                bucket.expect_all()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.backward_ends)

    def gradient_is_ready(self, bucket: Bucket, i: int, _: Tensor) -> None:
        """A parameter's hook: counts down its bucket."""
        if not self.synchronize:
            return
        if self.backward is None:  # an output that we did not see led here
            self.backward_begins()
        if i not in bucket.missing:
            raise RuntimeError(
                "a parameter got its gradient in two parts, and the first has been "
                "sent; use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.take(i)
        if self.overlap:
            self.launch_full_buckets()

    def launch_full_buckets(self) -> None:
        """Starts each full bucket whose predecessors have been started.

        Ranks may fill their buckets in different orders, but the n-th all-reduce of one
        rank meets the n-th of the others, so all must start them in one order.
        """
        for bucket in self.buckets[self.launched :]:
            if bucket.missing:
                break
            self.launched += 1
            if bucket.wire.numel():
                bucket.work = self.all_reduce(bucket.wire, self.group)

    def backward_ends(self) -> None:
        """Autograd's callback: sends what is left, and waits for all."""
        for bucket in self.buckets:
            for i in sorted(bucket.missing):
                bucket.take(i)
            self.launch_full_buckets()
        self.wait()
        for bucket in self.buckets:
            bucket.give_back()
        for buffer in self.model.buffers():
            if buffer.numel():
                dist.broadcast(buffer, group_src=0, group=self.group)

    def wait(self) -> None:
        """Waits for what was launched; from then on, gradients hold sums."""
        for bucket in self.buckets[: self.launched]:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        self.backward, self.summed = None, True

    def check_gradients(self) -> None:
        """Refuses what would be silently wrong."""
        if self.synchronize and any(p.requires_grad for p in self.frozen):
            raise RuntimeError(
                "a parameter was unfrozen after ddp(), so nothing would sum its "
                "gradient; unfreeze before ddp()"
            )
        if self.summed:
            self.summed = False
            held = (p.grad for b in self.buckets for p in b.parameters)
            if any(read(g.any(), expected=False) for g in held if g is not None):
                self.summed = True
                raise RuntimeError(
                    "gradients hold the sum over the ranks already, and a second "
                    "backward would sum it again: call zero_grad() first, or before "
                    "all backwards but the last model.set_requires_gradient_sync(False)"
                )
