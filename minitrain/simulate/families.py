"""Whose measured constants an accelerator uses, and what is assumed where none are.

`constants` holds what was fitted. An accelerator that was not measured takes the shares
of the family that is nearest to it in design, with three corrections that were
measured or published: what its best matrix product reaches, how its links are wired,
and whether its switches add.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from minitrain.simulate.constants import ACROSS, ATTENTION, PRODUCTS, PROTOCOLS


class Kernels(NamedTuple):
    """The constants of a chip's kernels; the fields are those of `kernels.Chip`."""

    gemm_share: float
    gemm_small_share: float
    gemm_ramp: float
    gemm_quantum: float
    gemm_padding: float
    gemm_heat: float
    gemm_memory_share: float
    launch_seconds: float
    cast_seconds_per_element: float
    cast_launch_seconds: float
    dgrad_share: float
    wgrad_share: float
    grouped_share: float
    grouped_wgrad_share: float
    memory_share: float
    memory_launch_seconds: float
    flash_share: float
    flash_ramp: float
    flash_tail: float
    flash_backward_share: float
    flash_backward_tail: float
    flash_softmax: float
    flash_launch_seconds: float


MEMORY_SHARE = 0.8
"""Of memory's bandwidth, by fused elementwise operators: aiconfigurator's own rule;
0.67 to 0.91 by operator were measured on B200 (SimuMax)."""
MEMORY_LAUNCH_SECONDS = 3e-6
"""Of the device, of such an operator: aiconfigurator's own rule."""
SOFTMAX: Mapping[str, float] = MappingProxyType({"A100": 0.1})
"""Share of attention that does not shrink with the head's width. Assumed, after figures
of FlashAttention-2 (A100) and 3 (H100): no width but 128 was measured."""
SOFTMAX_ELSEWHERE = 0.3

NEAR: Mapping[str, str] = MappingProxyType(
    {"H200": "H100", "B300": "B200", "GB200": "B200"}
)
"""The measured family nearest to one; A100 to all others."""

_B200 = PRODUCTS["B200", "bf16"]["gemm_share"]
_B200_FP8 = PRODUCTS["B200", "fp8"]["gemm_share"]
GEMM_SHARE: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        # The best shape of mamf-finder (Bekman, ml-engineering, 2025), less the 5 %
        # by which a usual large product stays behind it on the measured families.
        ("MI300X", "bf16"): 0.95 * 668.4 / 1307.4,
        ("MI325X", "bf16"): 0.95 * 784.9 / 1307.4,
        ("MI355X", "bf16"): 0.95 * 1565.0 / 2516.6,
        ("MI300X", "fp8"): 0.95 * 668.4 / 1307.4,  # assumed: as bf16
        ("MI325X", "fp8"): 0.95 * 784.9 / 1307.4,  # assumed: as bf16
        ("MI355X", "fp8"): 0.95 * 1565.0 / 2516.6,  # assumed: as bf16
        ("Gaudi2", "bf16"): 0.95 * 418.7 / 432.0,
        ("Gaudi2", "fp8"): 0.95 * 826.5 / 865.0,
        # As B200, less what its best shape falls behind that of B200.
        ("GB200", "bf16"): _B200 * (1822.0 / 2500.0) / (1745.0 / 2250.0),
        ("GB200", "fp8"): _B200_FP8 * (3615.6 / 5000.0) / (3432.5 / 4500.0),
        ("TPU", "bf16"): 0.9,  # assumed: one large systolic array, no tiles to fill
        ("TPU", "fp8"): 0.9,  # assumed: as bf16
    }
)
"""Share of the peak by large products, of families whose constants are another's."""

WITHOUT_LIMIT = ("TPU",)
"""Families whose domains reach the network through all their hosts: assumed. Of the 72
devices of a GB200 rack, as many cards as `across_rails` were seen to be busy."""
MESH = ("MI300X", "MI325X", "MI355X", "Gaudi2")
"""Families whose devices have a link to each other and no switch between."""
ADDING = ("H100", "H200", "B200", "B300", "GB200")
"""Families whose switches can add (NVLS)."""


LAUNCH_SECONDS: Mapping[str, float] = MappingProxyType({"TPU": 1e-6})
"""Of the device, where programs are compiled as a whole: assumed."""


def kernels_of(family: str, precision: str) -> tuple[Kernels, float]:
    """The constants of a family at a precision; and 1 if measured there, else 0.

    Attention that was not measured falls behind its source as the products do.
    """
    like = "fp8" if precision in ("fp8", "fp4") else "bf16"
    near = family if (family, "bf16") in PRODUCTS else NEAR.get(family, "A100")
    flash = near if near in ATTENTION else NEAR[near]
    source = next(k for k in (near, flash, "H100") if (k, like) in PRODUCTS)
    products, attention = dict(PRODUCTS[source, like]), dict(ATTENTION[flash])
    products["gemm_share"] = GEMM_SHARE.get((family, like), products["gemm_share"])
    usual = PRODUCTS[flash, "bf16"]["gemm_share"]
    behind = min(1.0, GEMM_SHARE.get((family, "bf16"), usual) / usual)
    attention["flash_share"] *= behind
    attention["flash_backward_share"] *= behind
    if (launch := LAUNCH_SECONDS.get(family)) is not None:
        products["launch_seconds"] = attention["flash_launch_seconds"] = launch
    constants = Kernels(
        **products,
        **attention,
        memory_share=MEMORY_SHARE,
        memory_launch_seconds=LAUNCH_SECONDS.get(family, MEMORY_LAUNCH_SECONDS),
        flash_softmax=SOFTMAX.get(flash, SOFTMAX_ELSEWHERE),
    )
    exact = precision in ("fp16", "bf16", "fp8") and (family, like) in PRODUCTS
    return constants, float(exact)


def protocols_of(family: str) -> tuple[Mapping[str, float], float]:
    """The constants of a family's collectives; and 1 if measured there, else 0."""
    near = family if family in PROTOCOLS else NEAR.get(family, "A100")
    known = {**PROTOCOLS[near], **ACROSS}
    if family in WITHOUT_LIMIT:
        known["across_rails"] = 1e9
    return known, float(family in PROTOCOLS or family in NEAR)
