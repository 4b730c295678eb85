"""Start four ranks, sum one tensor, stop: ours beside torchrun and torch's spawn.

Each sample runs the three one after the other. The peers are started from a script,
as their documentation does; ours is called in this process, as a notebook does, with
its fork server already up. The first call, which starts the server, is shown too.

    python benchmarks/launch.py
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from minitrain import launch

RANKS, SAMPLES = 4, 5

WORK = """
import os, torch, torch.distributed as dist
def work():
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == {ranks}
"""
TORCHRUN = """
dist.init_process_group("gloo")
work()
dist.destroy_process_group()
"""
SPAWN = """
import torch.multiprocessing as mp
def main(rank, store):
    dist.init_process_group("gloo", rank=rank, world_size={ranks},
                            store=dist.FileStore(store, {ranks}))
    work()
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile, time
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        mp.spawn(main, (folder + "/store",), nprocs={ranks})
        print(time.perf_counter() - begin)
"""


def work() -> None:
    """What every rank does."""
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == RANKS


def ours() -> float:
    begin = time.perf_counter()
    launch(work, RANKS)
    return time.perf_counter() - begin


def torchrun(program: Path) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    begin = time.perf_counter()
    subprocess.run(
        [*command, f"--nproc-per-node={RANKS}", str(program)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - begin


def spawn(program: Path) -> float:
    """Timed inside the script, so that importing torch there does not count."""
    run = subprocess.run(
        [sys.executable, str(program)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(run.stdout.split()[-1])


def main() -> None:
    first = ours()
    samples: dict[str, list[float]] = {"launch": [], "torchrun": [], "spawn": []}
    with tempfile.TemporaryDirectory() as folder:
        programs = {name: Path(folder, f"{name}.py") for name in ("torchrun", "spawn")}
        for name, text in (("torchrun", TORCHRUN), ("spawn", SPAWN)):
            programs[name].write_text((WORK + text).replace("{ranks}", str(RANKS)))
        for _ in range(SAMPLES):
            samples["launch"].append(ours())
            samples["torchrun"].append(torchrun(programs["torchrun"]))
            samples["spawn"].append(spawn(programs["spawn"]))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    print(f"start and finish {RANKS} ranks, median of {SAMPLES} samples")
    print(f"  launch, the first call   {first:7.3f} s")
    for name, seconds in medians.items():
        print(f"  {name:<24} {seconds:7.3f} s")
    peer = min(medians["torchrun"], medians["spawn"])
    line = {"name": "launch", "ours": medians["launch"], "peer": peer}
    print(json.dumps({**line, "ratio": medians["launch"] / peer}))


if __name__ == "__main__":
    main()
