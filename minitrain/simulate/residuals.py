"""The few numbers that were fitted on whole steps, and the bounds of each."""

from types import MappingProxyType

BOUNDS = MappingProxyType(
    {
        "gemm_share": (0.7, 1.05),
        "traffic": (0.7, 2.5),
        "launch_seconds": (1e-6, 12e-6),
        "network_share": (0.3, 1.2),
    }
)
"""Between which values a residual may be fitted."""

RESIDUALS: MappingProxyType = MappingProxyType({})
"""By framework, accelerator and precision of products."""
