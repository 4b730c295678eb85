"""This machine as a cluster: kernels are run, and an emulated link is as it says."""

import pytest
import torch
import torch.distributed as dist

from minitrain import trace
from minitrain.collectives.cost import Link
from minitrain.simulate.local import this_machine
from minitrain.simulate.simulation import simulate


def test_kernels_are_run_here_and_messages_take_what_the_link_says():
    def step():
        x = torch.ones(64, 64, requires_grad=True)
        q = torch.ones(1, 2, 16, 8, requires_grad=True)
        with trace() as t:
            (x @ x).relu().sum().backward()
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
            dist.all_reduce(torch.zeros(2**16))
        return t

    link = Link(latency_seconds=0.5, bytes_per_second=2**20)
    where, costs = this_machine(2, link)
    s = simulate(step, where, costs=costs, fuse=False)
    ring = 2 * 0.5 + 2 * (2 - 1) / 2 * 2**18 / 2**20
    assert s.exposed_seconds == pytest.approx(ring)
    kinds = {"matrix products", "attention", "memory-bound"}
    assert kinds <= s.parts.keys()
    assert s.parts["memory-bound"] >= costs.operator_seconds > 0
    assert s.step_seconds == pytest.approx(ring + sum(s.parts[kind] for kind in kinds))
    assert where.world_size == 2 and 0 < s.mfu < 1
