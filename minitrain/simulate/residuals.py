"""The few numbers that were fitted on whole steps, and the bounds of each.

Printed on 2026-11-29 by `tools/fit_steps.py`. Of the runs that a chapter holds against
the predictions only two kinds were seen: the 1F1B rows of zero-bubble schedules, and
single stages of the runs with a spread vocabulary. Each line says on how many rows, and
what error was left. A residual at a bound says that the form lacks something there.
"""

from collections.abc import Mapping
from types import MappingProxyType

BOUNDS = MappingProxyType(
    {
        "gemm_share": (0.7, 1.05),
        "traffic": (0.7, 2.5),
        "launch_seconds": (1e-06, 2.5e-05),
        "network_share": (0.15, 1.2),
        "inside_share": (0.15, 1.1),
        "tensor_hidden": (0.0, 1.0),
        "expert_share": (0.3, 1.2),
        "traffic_backward": (0.3, 2.5),
        "loss_bytes": (8.0, 60.0),
    }
)
"""Between which values a residual may be fitted."""

RESIDUALS: Mapping[tuple[str, str, str], Mapping[str, float]] = MappingProxyType(
    {
        ("fsdp", "H100", "fp8"): {
            "gemm_share": 0.7,
        },
        # 1 rows, 28.4 % left of 38.9 %
        ("internevo", "A100", "bf16"): {
            "gemm_share": 0.833,
            "network_share": 0.741,
        },
        # 5 rows, 10.4 % left of 18.2 %
        ("maxtext", "H100", "bf16"): {
            "gemm_share": 0.868,
        },
        # 2 rows, 8.5 % left of 10.1 %
        ("maxtext", "H100", "fp8"): {
            "gemm_share": 0.952,
        },
        # 2 rows, 12.9 % left of 12.4 %
        ("megatron-core", "B200", "bf16"): {
            "gemm_share": 0.702,
            "traffic": 1.12,
            "network_share": 1,
            "tensor_hidden": 0.494,
        },
        # 4 rows, 5.0 % left of 21.6 %
        ("megatron-core", "GB200", "bf16"): {
            "gemm_share": 0.825,
        },
        # 2 rows, 1.4 % left of 15.8 %
        ("megatron-core", "GB200", "fp8"): {
            "gemm_share": 0.757,
        },
        # 2 rows, 2.0 % left of 16.2 %
        ("megatron-core", "H100", "bf16"): {
            "gemm_share": 0.861,
            "traffic": 1.02,
            "network_share": 0.995,
            "tensor_hidden": 0.409,
        },
        # 6 rows, 1.0 % left of 11.5 %
        ("megatron-core", "H100", "fp8"): {
            "gemm_share": 0.874,
            "traffic": 1.34,
            "network_share": 1.09,
            "tensor_hidden": 0.668,
        },
        # 7 rows, 2.8 % left of 7.6 %
        ("megatron-core-graphs", "GB200", "fp8"): {
            "gemm_share": 0.7,
        },
        # 2 rows, 8.2 % left of 24.3 %
        ("megatron-core-graphs", "GB300", "fp8"): {
            "gemm_share": 0.99,
        },
        # 1 rows, 0.2 % left of 0.9 %
        ("megatron-deepspeed", "A100", "bf16"): {
            "gemm_share": 1.03,
            "traffic": 1.53,
        },
        # 10 rows, 4.4 % left of 4.5 %
        ("megatron-deepspeed", "A100", "omni-path"): {
            "network_share": 0.964,
            "inside_share": 0.235,
        },
        # 6 rows, 3.9 % left of 14.3 %
        ("megatron-zb", "A100", "bf16"): {
            "gemm_share": 0.961,
            "traffic": 1.04,
            "loss_bytes": 8,
        },
        # 12 rows, 2.6 % left of 5.0 %
        ("megatron-flash", "A100", "bf16"): {
            "gemm_share": 0.884,
            "traffic": 2.42,
            "traffic_backward": 1.62,
            "loss_bytes": 38.9,
        },
        # 64 rows, 3.6 % left of 11.6 %
    }
)
"""By framework, accelerator, and precision of products or kind of network."""
