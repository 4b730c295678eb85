"""What accelerators reach in practice: fitted constants, with their errors.

First values, from the medians of the measurements; the fit replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Kernels(NamedTuple):
    """Constants of an accelerator's kernels in one precision."""

    gemm_share: float
    """Of the peak, by a large product."""
    gemm_ramp: float
    """Elements of k whose time a tile loses to its start and end."""
    gemm_quantum: float
    """Share of an unfilled last wave that is lost."""
    tile_m: float
    tile_n: float
    launch_seconds: float
    cast_seconds_per_element: float = 0.0
    memory_share: float = 0.8
    dgrad_share: float = 0.97
    wgrad_share: float = 0.95
    flash_share: float = 0.55
    flash_tail: float = 0.5
    flash_launch_seconds: float = 5e-6
    flash_softmax: float = 0.3
    flash_backward_share: float = 0.45


KERNELS: Mapping[tuple[str, str], Kernels] = MappingProxyType(
    {
        ("A100", "bf16"): Kernels(
            0.82, 200, 0.3, 128, 256, 5e-6, flash_share=0.66, flash_softmax=0.11
        ),
        ("H100", "bf16"): Kernels(0.80, 100, 0.3, 128, 256, 3e-6),
        ("H200", "bf16"): Kernels(0.80, 100, 0.3, 128, 256, 3e-6),
        ("B200", "bf16"): Kernels(0.72, 200, 0.3, 128, 256, 3e-6),
        ("H100", "fp8"): Kernels(0.74, 200, 0.3, 128, 256, 12e-6, 2.56e-12),
        ("B200", "fp8"): Kernels(0.70, 200, 0.3, 128, 256, 12e-6, 1.0e-12),
    }
)
