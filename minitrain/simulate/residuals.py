"""The few numbers that were fitted on whole steps, and the bounds of each."""

from types import MappingProxyType

BOUNDS = MappingProxyType(
    {
        "gemm_share": (0.7, 1.05),
        "traffic": (0.7, 2.5),
        "launch_seconds": (1e-6, 12e-6),
        "network_share": (0.3, 1.2),
    "tensor_hidden": (0.0, 1.0),
    "expert_share": (0.3, 1.2),
    "traffic_backward": (0.3, 2.5),
    "loss_bytes": (8, 60),
    }
)
"""Between which values a residual may be fitted."""

RESIDUALS: MappingProxyType = MappingProxyType({})
"""By framework, accelerator and precision of products."""
