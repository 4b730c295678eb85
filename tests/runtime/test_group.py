"""Joining a group alone, under torchrun, and on two hosts; reading values."""

import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain.runtime import read

PROGRAM = textwrap.dedent(
    """
    import torch, torch.distributed as dist
    from minitrain import runtime
    runtime.init()
    runtime.init()  # a second call changes nothing
    x = torch.ones(1, device=runtime.device())
    dist.all_reduce(x)
    rank, size = runtime.rank(), runtime.world_size()
    print(f"rank {rank} of {size} sum {x.item():.0f}\\n", end="", flush=True)
    dist.destroy_process_group()
    """
)


def test_a_process_alone_is_a_world_of_one():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True
    )
    assert run.stdout == "rank 0 of 1 sum 1\n", run.stderr


def test_two_hosts_under_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += [
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    ]
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    lines = sorted("".join(out for out, _ in outputs).splitlines())
    assert lines == [f"rank {r} of 4 sum 4" for r in range(4)]


def test_read_returns_numbers_and_expectations():
    assert read(torch.tensor(3.5)) == 3.5
    assert read(torch.tensor([True])) is True
    assert read(torch.tensor(3, device="meta"), expected=7) == 7
    with FakeTensorMode():
        assert read(torch.zeros(1), expected=5) == 5
    with pytest.raises(ValueError, match="expected none"):
        read(torch.tensor(3, device="meta"))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        read(torch.ones(2))
