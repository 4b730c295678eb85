"""The few numbers that were fitted on whole steps, and the bounds of each.

Printed on 2026-11-29 by `tools/fit_steps.py`. The runs are none of those that a chapter
holds against the predictions, but for zero-bubble schedules, of which the 1F1B rows were
fitted. Each line says on how many runs, and what error was left.
"""

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

RESIDUALS = MappingProxyType(
    {
        ('fsdp', 'H100', 'fp8'): {"gemm_share": 0.7},
        # 1 rows, 28.3 % left of 38.8 %
        ('internevo', 'A100', 'bf16'): {"gemm_share": 0.854, "network_share": 0.74},
        # 5 rows, 10.8 % left of 17.0 %
        ('maxtext', 'H100', 'bf16'): {"gemm_share": 0.871},
        # 2 rows, 9.1 % left of 9.8 %
        ('maxtext', 'H100', 'fp8'): {"gemm_share": 0.963},
        # 2 rows, 13.7 % left of 13.4 %
        ('megatron-core', 'B200', 'bf16'): {"gemm_share": 0.7, "launch_seconds": 5e-06},
        # 4 rows, 12.6 % left of 31.8 %
        ('megatron-core', 'GB200', 'bf16'): {"gemm_share": 0.787},
        # 2 rows, 1.8 % left of 19.1 %
        ('megatron-core', 'GB200', 'fp8'): {"gemm_share": 0.711, "traffic": 1.05, "network_share": 1, "tensor_hidden": 0.411},
        # 4 rows, 5.0 % left of 22.3 %
        ('megatron-core', 'GB300', 'fp8'): {"gemm_share": 0.977},
        # 1 rows, 0.5 % left of 2.2 %
        ('megatron-core', 'H100', 'bf16'): {"gemm_share": 0.888, "traffic": 1.05, "network_share": 1.01, "tensor_hidden": 0.384},
        # 6 rows, 1.3 % left of 9.3 %
        ('megatron-core', 'H100', 'fp8'): {"gemm_share": 0.926, "traffic": 1.43, "network_share": 1.13, "tensor_hidden": 0.652},
        # 7 rows, 2.3 % left of 4.6 %
        ('megatron-deepspeed', 'A100', 'bf16'): {"gemm_share": 1.05, "traffic": 1.51},
        # 10 rows, 4.4 % left of 5.2 %
        ('megatron-deepspeed', 'A100', 'omni-path'): {"network_share": 0.94, "inside_share": 0.231},
        # 6 rows, 4.1 % left of 14.9 %
        ('megatron-zb', 'A100', 'bf16'): {"gemm_share": 0.978, "traffic": 0.966, "loss_bytes": 8},
        # 12 rows, 2.6 % left of 5.2 %
        ('megatron-flash', 'A100', 'bf16'): {"gemm_share": 0.905, "traffic": 2.5, "traffic_backward": 0.907, "loss_bytes": 40.4},
        # 320 rows, 3.8 % left of 9.7 %
    }
)
"""By framework, accelerator, and precision of products or kind of network."""
