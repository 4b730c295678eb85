"""The few numbers that were fitted on whole steps, and the bounds of each.

Printed on 2026-11-29 by `tools/fit_steps.py`. The runs are none of those that a chapter
holds against the predictions, but for zero-bubble schedules, of which the 1F1B rows
were fitted. Each line says on how many runs, and what error was left.
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
            "gemm_share": 0.839,
            "network_share": 0.742,
        },
        # 5 rows, 10.6 % left of 17.7 %
        ("maxtext", "H100", "bf16"): {
            "gemm_share": 0.88,
        },
        # 2 rows, 8.5 % left of 9.1 %
        ("maxtext", "H100", "fp8"): {
            "gemm_share": 0.975,
        },
        # 2 rows, 12.9 % left of 12.7 %
        ("megatron-core", "B200", "bf16"): {
            "gemm_share": 0.716,
            "traffic": 1.12,
            "network_share": 1,
            "tensor_hidden": 0.495,
        },
        # 4 rows, 5.0 % left of 20.3 %
        ("megatron-core", "GB200", "bf16"): {
            "gemm_share": 0.845,
        },
        # 2 rows, 1.4 % left of 13.7 %
        ("megatron-core", "GB200", "fp8"): {
            "gemm_share": 0.79,
        },
        # 2 rows, 1.9 % left of 14.5 %
        ("megatron-core", "H100", "bf16"): {
            "gemm_share": 0.89,
            "traffic": 1.04,
            "network_share": 1.01,
            "tensor_hidden": 0.388,
        },
        # 6 rows, 1.3 % left of 9.1 %
        ("megatron-core", "H100", "fp8"): {
            "gemm_share": 0.923,
            "traffic": 1.43,
            "network_share": 1.13,
            "tensor_hidden": 0.658,
        },
        # 7 rows, 2.3 % left of 4.6 %
        ("megatron-core-graphs", "GB200", "fp8"): {
            "gemm_share": 0.716,
        },
        # 2 rows, 7.5 % left of 22.1 %
        ("megatron-core-graphs", "GB300", "fp8"): {
            "gemm_share": 1,
        },
        # 1 rows, 0.0 % left of 0.1 %
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
            "gemm_share": 1.01,
            "traffic": 1.1,
            "loss_bytes": 10.7,
        },
        # 12 rows, 3.4 % left of 5.5 %
        ("megatron-flash", "A100", "bf16"): {
            "gemm_share": 0.899,
            "traffic": 2.5,
            "traffic_backward": 1.09,
            "loss_bytes": 40.3,
        },
        # 320 rows, 4.1 % left of 10.4 %
    }
)
"""By framework, accelerator, and precision of products or kind of network."""
