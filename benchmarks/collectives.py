"""Our ring all-reduce beside gloo's own, from 1 KiB to 64 MiB, on 2 and 4 ranks.

Both run in one launch, in pairs: ours, gloo's, ours, ... Each sample starts at a
barrier and ends when the slowest rank is done. Times are medians; a ratio is the median
of the ratios of the pairs.

Ours pays Python for every message and waits for every step, gloo runs in C++ and
cuts its chunks into segments to add while it receives. So the ratio is large where
latency counts, and near one where bytes do.

    python benchmarks/collectives.py
"""

import json
import statistics
import time

import torch
import torch.distributed as dist

from minitrain import launch
from minitrain.collectives import all_reduce
from minitrain.display import bytes_text

SIZES = [4**k * 1024 for k in range(9)]  # 1 KiB to 64 MiB
RANKS = (2, 4)
WARM_UP = 2


def pairs(size: int) -> int:
    """How many pairs fit the time, and no fewer than tell something."""
    return max(4, min(40, 2**26 // size))


def measure() -> list[list[tuple[float, float]]]:
    """Seconds of ours and of gloo's, on this rank: [size][pair]."""
    samples = []
    for size in SIZES:
        x = torch.ones(size // 4)
        found = []
        for _ in range(WARM_UP + pairs(size)):
            found.append((timed(all_reduce, x), timed(dist.all_reduce, x)))
            x.fill_(1.0)  # sums of sums would overflow
        samples.append(found[WARM_UP:])
    return samples


def timed(reduce, x: torch.Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    reduce(x)
    return time.perf_counter() - begin


def main() -> None:
    cells, ratios = [], []
    print("ranks        size       ours       gloo   ratio")
    for ranks in RANKS:
        by_rank = launch(measure, ranks)
        for place, size in enumerate(SIZES):
            together = zip(*(found[place] for found in by_rank), strict=True)
            slowest = [[max(times) for times in zip(*p, strict=True)] for p in together]
            ours, peer = (
                statistics.median(times) for times in zip(*slowest, strict=True)
            )
            ratio = statistics.median(a / b for a, b in slowest)
            print(
                f"{ranks:5}  {bytes_text(size):>10}  {ours * 1e3:6.2f} ms"
                f"  {peer * 1e3:6.2f} ms  {ratio:6.2f}"
            )
            cells.append((ours, peer))
            ratios.append(ratio)
    ours, peer = map(statistics.geometric_mean, zip(*cells, strict=True))
    line = {"name": "collectives", "ours": ours, "peer": peer}
    line["ratio"] = statistics.geometric_mean(ratios)
    print(json.dumps({**line, "ratios": [round(ratio, 3) for ratio in ratios]}))


if __name__ == "__main__":
    main()
