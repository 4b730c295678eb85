"""What the training software decides: kernels, overlap, widths. One record for each.

A simulated step is hardware and arithmetic, and what a framework makes of them. Here
are the frameworks whose published runs chapter 16 predicts, by their documented
behaviour, and minitrain itself. At most four numbers of a framework on an accelerator
are fitted (`RESIDUALS` in `residuals`), and each has bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from minitrain.simulate.residuals import BOUNDS, RESIDUALS


@dataclass(frozen=True, kw_only=True)
class Software:
    """Rules of a framework; yes and no are 1 and 0, shares are between them.

    Attributes:
        name: Key in `SOFTWARE`.
        flash: Fused attention; without it the matrix is written to memory.
        core_time: Of fused attention, over that of the kernel measured.
        fused_softmax: Scale, mask and softmax are one kernel, where it is not.
        dropout: Masks of dropout are written and read.
        narrow: Casts to 8 bits are passes over memory (only at precision fp8).
        kernels: Kernels that a block launches forward.
        expert_kernels: So many times more for routing, sorting and the experts.
        tensor_hidden: Share of the tensor ranks' messages behind products, forward.
        tensor_hidden_backward: The same, backward.
        context_hidden: Share of a block's computation behind which keys travel.
        expert_hidden: Share of the all-to-alls hidden.
        data_hidden: Share of the last backward pass behind which gradients travel.
        gather_hidden: Share of a forward pass behind which weights are gathered.
        shard_hidden: Share of a block's computation behind which ZeRO-3 travels.
        last_bucket: Share of a message that is never hidden.
        bucket_bytes: Gradients travel in buckets of so many bytes; 0 for one message.
        slowed: Share of its speed that computing loses beside a message.
        pipeline_hidden: Share of the messages between stages hidden in steady state.
        scatter: Stages send 1/tp of the stream and gather it there.
        added_bytes: Bytes a parameter moved to add a micro-batch's gradient.
        first_free: The first micro-batch of a step adds to nothing.
        gradient_bytes: Bytes of a gradient in memory.
        message_bytes: Bytes of a gradient in the messages of data parallelism.
        weight_bytes: Bytes of a weight in messages and in memory.
        reduce_bytes: Bytes of a gradient that ZeRO-3 scatters.
        state_bytes: Bytes a parameter of optimizer state and master weights.
        table_bytes: Bytes an element that the embedding's gradient moves.
        loss_bytes: Bytes a logit that the loss moves forward.
        loss_back_bytes: The same, backward.
        logit_bytes: Bytes a logit that are alive at once in the loss.
        selective_keeps: Of a block's activations, with selective recomputation.
        working: Of a block's activations, what is alive beside them in its backward.
        shards_input: With full recomputation a block's input is split over tp.
        update_bytes: Bytes a parameter that norm, clipping and AdamW move.
        fixed_seconds: Of a step: logging, loss reduction, the optimizer's launches.
        reserved_bytes: Memory of context, communicator and fragments, where the
            reported number counts it.
        gemm_share: Speed of products in training over that of the kernel alone.
        expert_share: Speed of the experts' products, over that of one grouped kernel.
        traffic: Bytes moved beside products, over those that must move, forward.
        traffic_backward: The same, backward, over those forward.
        launch_seconds: Of a kernel, for the host.
        rails: Network cards of a host that one collective uses at most.
        network_share: Network bandwidth over the fitted one.
        inside_share: The same, of the links of a scale-up domain.
        jitter: Share of the step lost for each doubling of hosts.
    """

    name: str
    flash: float = 1
    core_time: float = 1
    fused_softmax: float = 1
    dropout: float = 0
    narrow: float = 0
    kernels: float = 80
    expert_kernels: float = 1
    tensor_hidden: float = 0
    tensor_hidden_backward: float = 0.5
    context_hidden: float = 0.8
    expert_hidden: float = 0.75
    data_hidden: float = 0
    gather_hidden: float = 0
    shard_hidden: float = 0.9
    last_bucket: float = 0.05
    bucket_bytes: float = 0
    slowed: float = 0
    pipeline_hidden: float = 0
    scatter: float = 0
    added_bytes: float = 2
    first_free: float = 0
    gradient_bytes: float = 4
    message_bytes: float = 4
    weight_bytes: float = 2
    reduce_bytes: float = 4
    state_bytes: float = 12
    table_bytes: float = 10
    loss_bytes: float = 40
    loss_back_bytes: float = 14
    logit_bytes: float = 10
    selective_keeps: float = 1
    working: float = 0.5
    shards_input: float = 0
    update_bytes: float = 54
    fixed_seconds: float = 0.01
    reserved_bytes: float = 100 * 2**20
    gemm_share: float = 1.0
    expert_share: float = 0.5
    traffic: float = 1.0
    traffic_backward: float = 1.6
    launch_seconds: float = 10e-6
    rails: float = 1e9
    network_share: float = 1.0
    inside_share: float = 1.0
    jitter: float = 0.003


_megatron = Software(
    # Narayanan et al. 2021 (arXiv:2104.04473): fused scale, mask and softmax; masks of
    # dropout; fp32 gradients, summed after the last backward pass; scatter and gather.
    name="megatron-lm",
    flash=0,
    dropout=1,
    scatter=1,
)

_early = replace(
    # Before 2022 it added gradients in kernels of their own, and waited for messages.
    _megatron,
    name="megatron-2021",
    added_bytes=10,
    tensor_hidden_backward=0,
)

_core = Software(
    # Megatron-Core: fused kernels and loss, distributed optimizer with its messages
    # behind backward and forward, stages' messages behind computation. The host's times
    # are those of small functional tests (its golden values), bound by nothing else.
    name="megatron-core",
    data_hidden=0.9,
    gather_hidden=0.9,
    pipeline_hidden=0.9,
    tensor_hidden=0.5,
    tensor_hidden_backward=0.7,
    loss_bytes=24,
    loss_back_bytes=8,
    logit_bytes=6,
    update_bytes=44,
    launch_seconds=20e-6,
    fixed_seconds=0.017,
)

_fsdp = Software(
    # PyTorch FSDP: weights gathered in bf16, gradients scattered, nothing accumulated.
    name="fsdp",
    loss_bytes=30,
    update_bytes=34,
    added_bytes=0,
    selective_keeps=0.65,
)

_own = Software(
    # This library, as its recorded program is priced with neighbours joined
    # (`simulation.simulate`): bytes of a block, of a logit and of a parameter's update
    # were read off recordings, and nothing is lost beside kernels and messages.
    name="minitrain",
    kernels=13,
    traffic=1.5,
    traffic_backward=1.97,
    loss_bytes=6,
    loss_back_bytes=6,
    table_bytes=2,
    update_bytes=14,
    added_bytes=6,
    first_free=1,
    bucket_bytes=25 * 2**20,
    slowed=0.05,
    message_bytes=2,
    gradient_bytes=2,
    data_hidden=1,
    launch_seconds=5e-6,
    fixed_seconds=0,
    jitter=0,
)

SOFTWARE = MappingProxyType(
    {
        s.name: s
        for s in (
            _megatron,
            _early,
            replace(_megatron, name="megatron-flash", flash=1, dropout=0),
            # Its memory was read from the driver: context, communicators, fragments.
            # Gradients travel in 16 bits.
            replace(
                _early,
                name="megatron-deepspeed",
                reserved_bytes=7.2 * 2**30,
                message_bytes=2,
            ),
            replace(_megatron, name="megatron-zb"),
            _core,
            # FlashAttention-2 on H100s: 1.5 to 2 times the third one's time
            # (Shah et al., arXiv:2407.08608, abstract).
            replace(_core, name="megatron-core-2024", core_time=1.6),
            replace(_core, name="megatron-core-graphs", launch_seconds=2e-6),
            _fsdp,
            replace(_fsdp, name="deepspeed-zero3", flash=0, dropout=1, rails=1),
            # Ranks broadcast the weights that they own one after the other.
            replace(
                _core,
                name="internevo",
                tensor_hidden=0,
                gather_hidden=0,
                message_bytes=2,
                rails=2,
            ),
            # XLA gathers a layer's weights before it starts on it.
            replace(_core, name="maxtext", pipeline_hidden=0, shard_hidden=0),
            replace(_fsdp, name="fsdp-unfused", flash=0, dropout=1),
            # Composer in 2023: nothing compiled, FlashAttention's first version.
            replace(_fsdp, name="composer", core_time=1.7, traffic=2.0),
            _own,
        )
    }
)


def software(
    name: str, accelerator: str = "", precision: str = "bf16", fabric: str = ""
) -> Software:
    """A framework's rules, with what was fitted for it on an accelerator.

    Args:
        name: Key in `SOFTWARE`.
        accelerator: Name in `ACCELERATORS`; residuals of another one of the same
            framework, or none, where nothing was fitted for it.
        precision: Of the plan; residuals of fp8 are their own.
        fabric: Kind of network, where shares were fitted for it.

    Raises:
        ValueError: There is no such framework.
    """
    if name not in SOFTWARE:
        raise ValueError(f"no software {name!r}: there is {', '.join(SOFTWARE)}")
    rules = SOFTWARE[name]
    eight = precision in ("fp8", "fp4")
    assumed = ASSUMED.get((name, accelerator), {})
    fitted: dict[str, Any] = dict(
        residuals_of(name, accelerator, "fp8" if eight else "bf16")
    )
    links: Mapping[str, Any] = RESIDUALS.get((name, accelerator, fabric), {})
    known = {**fitted, **assumed, **links}
    return replace(rules, narrow=float(eight), **known)


def is_borrowed(name: str, accelerator: str) -> bool:
    """Whether a framework was fitted on other accelerators, and not on this one."""
    devices = {device for framework, device, _ in RESIDUALS if framework == name}
    return bool(devices) and accelerator not in devices


def residuals_of(name: str, accelerator: str, kind: str) -> Mapping[str, float]:
    """What was fitted, for this accelerator or the nearest one that has a fit."""
    for device in (accelerator, *NEAREST.get(accelerator, ())):
        for framework in (name, *NEAREST_SOFTWARE.get(name, ())):
            if (framework, device, kind) in RESIDUALS:
                return RESIDUALS[framework, device, kind]
    return {}


ASSUMED: Mapping[tuple[str, str], Mapping[str, float]] = MappingProxyType(
    {
        # Products of the first cuBLAS for Hopper: about 600 TFLOP/s.
        ("composer", "H100"): MappingProxyType({"gemm_share": 0.75}),
    }
)
"""What was assumed, not fitted, for a framework on an accelerator."""

NEAREST = MappingProxyType(
    {
        "A800": ("A100",),
        "H800": ("H100",),
        "H200": ("H100",),
        "B200": ("GB200",),
        "B300": ("B200", "GB200"),
        "GB200": ("B200",),
        "GB300": ("GB200", "B200"),
    }
)
"""Accelerators whose fits are taken where there is none."""

NEAREST_SOFTWARE = MappingProxyType(
    {
        "megatron-core-2024": ("megatron-core",),
        "megatron-core-graphs": ("megatron-core",),
        "fsdp": ("megatron-core", "megatron-flash"),
        "composer": ("megatron-core", "megatron-flash"),
        "deepspeed-zero3": ("megatron-deepspeed",),
    }
)
"""Frameworks whose fits are taken where there is none."""


def within_bounds(fitted: dict[str, float]) -> bool:
    """Whether fitted residuals keep their bounds."""
    return all(BOUNDS[k][0] <= v <= BOUNDS[k][1] for k, v in fitted.items())
