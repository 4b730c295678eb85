"""Data parallelism: every rank holds the whole model and a share of the data.

`replicate` sums gradients after backward, one by one; `ddp` in buckets, while backward
runs.
"""

from minitrain.parallel.data.buckets import gradient_wire_bytes, plan_buckets
from minitrain.parallel.data.distributed import ddp
from minitrain.parallel.data.links import built_in
from minitrain.parallel.data.replicas import replicate

__all__ = ["built_in", "ddp", "gradient_wire_bytes", "plan_buckets", "replicate"]
