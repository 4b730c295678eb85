"""Data parallelism: every rank holds the whole model and a share of the data.

`replicate` sums gradients after backward, one by one; `ddp` in buckets, while backward
runs; `horovod` as the ranks agree on what is ready.
"""

from minitrain.parallel.data.buckets import gradient_wire_bytes, plan_buckets
from minitrain.parallel.data.distributed import ddp
from minitrain.parallel.data.links import built_in, own_ring, slow_link
from minitrain.parallel.data.negotiation import horovod
from minitrain.parallel.data.replicas import replicate

__all__ = [
    "built_in",
    "ddp",
    "gradient_wire_bytes",
    "horovod",
    "own_ring",
    "plan_buckets",
    "replicate",
    "slow_link",
]
