"""What only GPUs can show; skipped, and said so, where there is none."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from minitrain import Layout, launch, runtime, trace
from minitrain.collectives import all_reduce
from minitrain.parallel.data import ddp, horovod
from minitrain.testing import PROBLEMS, check_equal

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU on this machine")


def test_each_rank_has_a_gpu_of_its_own_and_talks_through_nccl():
    def f():
        x = torch.full((3,), float(dist.get_rank()), device=runtime.device())
        dist.all_reduce(x)
        device = torch.cuda.current_device()
        return dist.get_backend(), device, x.cpu().tolist()

    total = float(sum(range(GPUS)))
    assert launch(f, GPUS) == [("nccl", r, [total] * 3) for r in range(GPUS)]


def test_more_ranks_than_gpus_talk_through_gloo():
    assert set(launch(dist.get_backend, GPUS + 1)) == {"gloo"}


def test_a_mesh_of_gpus():
    def f():
        return Layout(dp=GPUS).mesh().device_type

    assert launch(f, GPUS) == ["cuda"] * GPUS


def test_a_trace_sees_nccl_and_memory_of_the_gpu():
    def f():
        with trace() as t:
            x = torch.ones(1000, device=runtime.device())
            dist.all_reduce(x)
            torch.cuda.synchronize()
        return t

    for t in launch(f, GPUS):
        assert [m.op for m in t.messages] == ["all_reduce"]
        assert t.payload_bytes == 4000
        assert t.peak_bytes["communication"] == 4000


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "double_tree"])
def test_our_all_reduces_sum_as_nccl_does(algorithm):
    def f():
        x = torch.arange(1003.0, device=runtime.device()) * (dist.get_rank() + 1)
        expected = x.clone()
        dist.all_reduce(expected)
        all_reduce(x, algorithm=algorithm)
        return torch.equal(x, expected)  # whole numbers: no rounding

    assert all(launch(f, GPUS))


@pytest.mark.parametrize("technique", [ddp, horovod])
def test_data_parallelism_equals_one_device(technique):
    def on_mesh(model, mesh):
        return technique(model, mesh.get_group("dp"))

    check_equal(on_mesh, GPUS, list(PROBLEMS.values()))


def test_training_on_a_gpu_follows_the_cpu(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"the {i}th document says {i * i} times " * 60)

    def losses(name, **environment):
        command = [sys.executable, "-m", "minitrain", "train", "--model", "tiny"]
        command += ["--text", str(text), "--steps", "10", "--out", str(tmp_path / name)]
        command += ["--cache", str(tmp_path / "cache"), "--peak-tflops", "1"]
        subprocess.run(command, check=True, env={**os.environ, **environment})
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [m["loss"] for m in map(json.loads, lines) if "loss" in m]

    gpu, cpu = losses("gpu"), losses("cpu", CUDA_VISIBLE_DEVICES="")
    assert gpu == pytest.approx(cpu, rel=2e-3)
