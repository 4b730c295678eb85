"""Ways to sum a buffer over a group: what `ddp` takes as `all_reduce`."""

import threading
import time
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import Tensor

from minitrain import collectives
from minitrain.parallel.data.buckets import Work
from minitrain.runtime.messages import Message, even, sent_elements
from minitrain.runtime.tracing import Trace


def built_in(buffer: Tensor, group: dist.ProcessGroup) -> Work:
    """The backend's own all-reduce, started and not waited for."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


class Arrived:
    """The work of a message that has arrived."""

    def wait(self) -> None:
        """Returns at once."""


def own_ring(buffer: Tensor, group: dist.ProcessGroup) -> Work:
    """Our ring, of messages that a trace counts. It blocks, so nothing overlaps."""
    collectives.all_reduce(buffer, group)
    return Arrived()


def slow_link(bytes_per_second: float, latency_seconds: float = 0.0) -> "SlowLink":
    """An all-reduce that takes as long as a ring on a slow network would.

    Processes on one machine share its cores, so sending costs them the very time in
    which they could compute, and overlap shows little. Here the built-in all-reduce
    does the sum, and its result is held back, without using a core, until a ring over
    such links would have ended. The times are emulated; the values are real.

    Args:
        bytes_per_second: that each rank can send.
        latency_seconds: of each of the ring's 2 (N - 1) messages.

    Raises:
        ValueError: a number makes no sense.
    """
    if not bytes_per_second > 0 or not latency_seconds >= 0:
        raise ValueError(
            f"bytes_per_second={bytes_per_second} must be above 0, and "
            f"latency_seconds={latency_seconds} at least 0"
        )
    return SlowLink(bytes_per_second, latency_seconds)


@dataclass(eq=False)
class SlowLink:
    """An all-reduce behind an emulated link; see `slow_link`.

    It carries one buffer after the other, each from the moment at which all ranks have
    launched it. (One link for each rank, made in the rank.)

    Attributes:
        sent: what it has carried, in order.
    """

    bytes_per_second: float
    latency_seconds: float
    sent: list["Delivery"] = field(default_factory=list)

    def seconds(self, payload_bytes: int, ranks: int) -> float:
        """2 (N - 1) latencies, and 2 (N - 1) / N of the buffer over the bandwidth."""
        sent = sent_elements("all_reduce", even(payload_bytes, range(ranks)), 0)
        return 2 * (ranks - 1) * self.latency_seconds + sent / self.bytes_per_second

    def __call__(self, buffer: Tensor, group: dist.ProcessGroup) -> Work:
        """Starts the sum of `buffer` over the group, in place."""
        seconds = self.seconds(buffer.numel() * buffer.element_size(), group.size())
        before = self.sent[-1] if self.sent else None
        delivery = Delivery(time.time(), seconds, before)
        self.sent.append(delivery)
        delivery.real = dist.all_reduce(buffer, group=group, async_op=True)
        threading.Thread(target=delivery.hold, daemon=True).start()
        return delivery

    def traced(self, trace: Trace) -> Trace:
        """The trace with the emulated times of this link's messages, once all arrived.

        `end_seconds` and `waited_seconds` of a real message on this machine say little;
        they become those of the link. Starts are as they were.
        """
        origin, end = trace.origin_seconds, trace.origin_seconds + trace.seconds
        deliveries = iter([d for d in self.sent if origin <= d.start <= end])

        def emulated(message: Message) -> Message:
            if not message.caller.endswith(" in __call__"):
                return message
            delivery = next(deliveries)
            return replace(
                message,
                end_seconds=delivery.end - origin,
                waited_seconds=delivery.waited,
            )

        return replace(trace, messages=[emulated(m) for m in trace.messages])


@dataclass(eq=False)
class Delivery:
    """One buffer on an emulated link; times are Unix times.

    Attributes:
        start: when it was launched here.
        seconds: how long the link is busy with it.
        before: what the link carries first.
        end: when it has arrived; infinity until then.
        waited: seconds for which `wait` blocked.
    """

    start: float
    seconds: float
    before: "Delivery | None" = None
    end: float = float("inf")
    waited: float = 0.0
    real: dist.Work | None = None
    arrived: threading.Event = field(default_factory=threading.Event)

    def hold(self) -> None:
        """Sleeps until the link has carried it."""
        assert self.real is not None
        while not self.real.is_completed():  # on every rank it was launched
            time.sleep(2e-4)
        free = time.time()
        if self.before is not None:
            self.before.arrived.wait()
            free = max(free, self.before.end)
            self.before = None
        self.end = free + self.seconds
        time.sleep(max(0.0, self.end - time.time()))
        self.arrived.set()

    def wait(self) -> None:
        """Returns when the link has carried it."""
        begin = time.time()
        assert self.real is not None
        self.real.wait()
        self.arrived.wait()
        self.waited += time.time() - begin
