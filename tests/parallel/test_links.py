"""Ways to sum a buffer: their values, their bytes, and the emulated link's times."""

import math
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitrain import launch, trace
from minitrain.parallel.data import (
    ddp,
    gradient_wire_bytes,
    own_ring,
    plan_buckets,
    slow_link,
)
from minitrain.testing import assert_all_close, gradients


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def step(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(2, 3, generator=generator).double()).square().sum().backward()
    return model


def test_our_ring_sends_what_the_formula_says() -> None:
    def run() -> tuple[Any, ...]:
        expected = gradients(step(ddp(network())))
        model = ddp(network(), bucket_bytes=150, all_reduce=own_ring)
        with trace() as t:
            step(model)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        plan = plan_buckets(model.parameters(), 150)
        formula = gradient_wire_bytes(plan, ranks, rank)
        assert {m.wire for m in t.messages} <= {"counted"}
        return gradients(model), expected, t.wire_bytes, formula

    for ranks in (1, 2, 3, 4, 5):
        for grads, expected, sent, formula in launch(run, ranks):
            assert_all_close(grads, expected)
            assert sent == formula


def test_an_emulated_link_takes_its_time_and_changes_no_value() -> None:
    def run() -> tuple[Any, ...]:
        expected = gradients(step(ddp(network())))
        link = slow_link(20_000.0, 0.001)
        model = ddp(network(), bucket_bytes=1, all_reduce=link)
        step(model)  # not traced
        model.zero_grad()
        with trace() as t:
            begin = time.time()
            step(model)
            end = time.time()
        return gradients(model), expected, link, t, link.traced(t), (begin, end)

    def plain(result: tuple[Any, ...]) -> tuple[Any, ...]:
        *values, link, t, emulated, times = result
        busy = [(d.start, d.end, d.seconds) for d in link.sent]
        return *values, busy, t, emulated, times

    for grads, expected, busy, t, emulated, (begin, end) in launch(
        lambda: plain(run()), 3
    ):
        assert_all_close(grads, expected)
        now = busy[len(busy) // 2 :]
        sizes = [m.payload_bytes for m in t.messages]
        assert len(now) == len(sizes) == 4
        for (start, arrived, seconds), size in zip(now, sizes, strict=True):
            assert seconds == pytest.approx(4 * 0.001 + 4 / 3 * size / 20_000, rel=0.02)
            assert begin <= start <= arrived - seconds
            assert arrived <= end  # backward waited for it
        # One after the other, never two at once.
        for (_, first, _), (_, second, seconds) in pairwise(now):
            assert second - seconds >= first
        for message, real, (_, arrived, _) in zip(
            emulated.messages, t.messages, now, strict=True
        ):
            assert message.start_seconds == real.start_seconds
            assert message.end_seconds == arrived - t.origin_seconds
            assert message.wire_bytes == real.wire_bytes
        assert sum(m.waited_seconds for m in emulated.messages) > 0.0


def test_alone_a_link_carries_nothing() -> None:
    assert slow_link(1e9, 1.0).seconds(10**9, 1) == 0.0
    assert slow_link(1e9).seconds(10**9, 2) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong", [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0), (1.0, math.nan)]
)
def test_a_link_of_no_sense_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"bytes_per_second=.*latency_seconds="):
        slow_link(*wrong)
