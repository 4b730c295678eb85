"""Horovod: ranks agree on which gradients are ready, and sum them in the background.

After Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in
TensorFlow" (2018). Nothing is known of the model: no buckets are made beforehand and no
order is assumed. In every cycle each rank reports what became ready; a coordinator, the
first rank, answers with what is ready everywhere; that is packed into a fusion buffer
and summed by a ring. The answer is the same for all, so all send in the same order.
"""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from minitrain import collectives
from minitrain.parallel.data.buckets import wide
from minitrain.parallel.data.hooks import BackwardHooks
from minitrain.parallel.data.replicas import check_own, complete, make_equal, members
from minitrain.runtime.group import simulated

NOTHING = -1  # fills up the coordinator's answer, which always has the same size


def horovod(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    axis: str = "dp",
    fusion_bytes: int = 64 * 2**20,
    cycle_seconds: float = 0.001,
) -> nn.Module:
    """Data parallelism by negotiation: gradients are summed as ranks agree on them.

    What it does to the model, and what it asks of it, is as with `ddp`: equal replicas,
    sums and not means, zeros for what a rank did not use, one round in the last
    backward of an accumulation. Ranks may get their gradients in any order. What is
    fused depends on timing, so runs agree up to rounding; the ranks of one run agree
    bit by bit.

    As in the original, one background thread does all the communication; here it lives
    as long as a backward, and has a group of its own. Every rank of `group` must make
    this call.

    Args:
        model: the same on every rank, up to the values; each rank passes its own.
        group: the ranks that hold other data; by default all.
        axis: the mesh axis that the group stands for; it leaves `placement.partial`.
        fusion_bytes: most bytes of gradients in one ring, unless one alone is larger.
        cycle_seconds: pause between two negotiations. A longer one fuses more and
            begins later.

    Returns:
        The same module, parameter names unchanged.

    Raises:
        ValueError: as with `ddp`; and on a simulated group.
        RuntimeError: in backward, as with `ddp`; and what the thread met, such as a
            rank that does not answer.
    """
    check_own(model)
    if fusion_bytes < 1 or not cycle_seconds >= 0:
        raise ValueError(
            f"fusion_bytes={fusion_bytes} must be at least 1, and "
            f"cycle_seconds={cycle_seconds} at least 0"
        )
    group = members(group)
    if simulated():
        raise ValueError(
            "horovod's ranks negotiate by the values of messages, and a simulated group"
            " has none; use ddp"
        )
    make_equal(model, group, axis)
    complete(model, axis)
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, use_local_synchronization=True)
    _Horovod(model, group, own, fusion_bytes, cycle_seconds)
    return model


class Coordinator:
    """Counts on how many ranks each tensor is ready; on the first rank of the group."""

    def __init__(self, ranks: int, tensors: int) -> None:
        self.ranks = ranks
        self.counts = torch.zeros(tensors, dtype=torch.int64)

    def hear(self, reports: Sequence[Tensor]) -> list[int]:
        """One cycle: what has become ready on the last rank that was missing.

        Args:
            reports: of each rank, 1 where a tensor became ready since the last cycle.
                Each [tensors], integers.

        Returns:
            Places of the tensors that all ranks are to sum now, in this order.
        """
        before = self.counts.clone()
        for report in reports:
            self.counts += report.cpu()
        ready = (self.counts == self.ranks) & (before < self.ranks)
        return ready.nonzero().flatten().tolist()


def fuse(tensors: Sequence[Tensor], fusion_bytes: int) -> list[list[int]]:
    """Packs tensors, in order, into buffers of one dtype and at most `fusion_bytes`.

    Returns:
        Places in `tensors`, buffer by buffer; one that is too large is alone.
    """
    packs: list[list[int]] = []
    room = 0
    for i, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        fits = packs and size <= room and tensors[packs[-1][-1]].dtype == tensor.dtype
        if not fits:
            packs.append([])
            room = fusion_bytes
        packs[-1].append(i)
        room -= size
    return packs


class _Horovod(BackwardHooks):
    """The gradients of one model, and the thread that sums them in a backward."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        own: dist.ProcessGroup,
        fusion_bytes: int,
        cycle_seconds: float,
    ) -> None:
        self.own, self.fusion_bytes, self.cycle = own, fusion_bytes, cycle_seconds
        super().__init__(
            model, group, [p for p in model.parameters() if p.requires_grad]
        )

    def start(self) -> None:
        """Backward begins, and with it the thread."""
        self.gradients: dict[int, Tensor] = {}
        self.ready: SimpleQueue[int] = SimpleQueue()  # not yet reported
        self.error: BaseException | None = None
        self.coordinator = Coordinator(self.own.size(), len(self.parameters))
        modes = dispatch._get_current_dispatch_mode_stack()  # such as that of a trace
        self.thread = threading.Thread(target=self.work, args=(modes,), daemon=True)
        self.thread.start()

    def take(self, i: int) -> None:
        parameter = self.parameters[i]
        grad = parameter.grad
        self.gradients[i] = torch.zeros_like(parameter) if grad is None else grad
        self.ready.put(i)  # the thread sees it in its next cycle

    def finish(self) -> None:
        """Backward has ended: returns when the thread has summed everything."""
        self.thread.join()
        if self.error is not None:
            self.backward = None
            self.error.add_note("met by the background thread of horovod()")
            raise self.error
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:  # it may have been frozen since
                parameter.grad = self.gradients[i]

    # ---- in the thread

    def work(self, modes: Sequence[dispatch.TorchDispatchMode]) -> None:
        """Cycles until all gradients are summed, on all ranks in the same one."""
        for mode in modes:
            dispatch._push_mode(mode)
        try:
            left = len(self.parameters)
            while left:
                time.sleep(self.cycle)
                agreed = [self.gradients[i] for i in self.negotiate()]
                for pack in fuse(agreed, self.fusion_bytes):
                    self.sum([agreed[i] for i in pack])
                left -= len(agreed)
        except BaseException as error:  # raised again by the main thread
            self.error = error

    def negotiate(self) -> list[int]:
        """One cycle: tells what is ready here, and learns what is ready everywhere."""
        count, device = len(self.parameters), self.parameters[0].device
        news = [self.ready.get() for _ in range(self.ready.qsize())]
        report = torch.zeros(count, dtype=torch.int64, device=device)
        report[news] = 1
        first = self.own.rank() == 0
        reports = [torch.empty_like(report) for _ in range(self.own.size())]
        dist.gather(report, reports if first else None, group=self.own, group_dst=0)
        answer = torch.full_like(report, NOTHING)
        if first:
            order = self.coordinator.hear(reports)
            answer[: len(order)] = torch.tensor(order, dtype=torch.int64)
        dist.broadcast(answer, group=self.own, group_src=0)
        return [i for i in answer.tolist() if i != NOTHING]

    def sum(self, gradients: Sequence[Tensor]) -> None:
        """Through the fusion buffer, in float32 or wider, and back."""
        buffer = torch.cat([grad.flatten() for grad in gradients])
        buffer = buffer.to(wide(buffer.dtype))
        collectives.all_reduce(buffer, self.own, "ring")
        sizes = [grad.numel() for grad in gradients]
        for grad, part in zip(gradients, buffer.split(sizes), strict=True):
            grad.copy_(part.view_as(grad))
