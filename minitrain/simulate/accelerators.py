"""Accelerators as data: what their data sheets promise.

Rates are dense (without structured sparsity) and one device's; bytes are bytes, not
GiB; a link's rate is of one direction. Every number has its source in its own line.
What these machines reach in practice stands in `constants`.

Names of the sources: DS is the vendor's data sheet of that product (SXM or OAM form
unless said), WP the vendor's white paper on the architecture, TPU the table of the
system's page at cloud.google.com/tpu/docs, ISCA23 is Jouppi et al., TPU v4, table 4,
JAX the book jax-ml.github.io/scaling-book, FRONTIER the user guide of the Frontier
system. "Usual" is what such hosts are sold with; a cluster can say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
"""Number formats of a matrix product's inputs."""

GB = 1e9
"""Bytes in a gigabyte of a data sheet."""
GIB = 2**30
"""Bytes in a gibibyte: memory chips are built in powers of two, and sold as GB."""
MIB = 2**20
"""Bytes in a mebibyte: caches are built in powers of two."""
TERA = 1e12
"""Operations or bytes in a second, in the unit of a data sheet."""


@dataclass(frozen=True)
class Accelerator:
    """One device, as a program sees it.

    Attributes:
        name: As in `ACCELERATORS`.
        peak_flops: FLOP/s of dense matrix products, by the format of their inputs.
        memory_bytes: Of device memory.
        memory_bytes_per_second: Its bandwidth.
        l2_bytes: Of the last cache before memory; 0 where there is none.
        sms: Units that work on tiles of their own: SMs, compute units, tensor cores.
        watts: Power limit of the device, or None where no one has published it.
        scale_up_bytes_per_second: Out of one device into its scale-up domain (NVLink,
            Infinity Fabric, ICI), all links together, one direction.
        scale_up_ranks: Devices of a full scale-up domain.
        scale_up_hosts: 1 where a domain may span hosts, 0 where it ends at the host.
        network_bytes_per_second: Usual share of one device in its host's network
            cards, one direction.
        per_host: Usual devices of a host.
        family: Whose measured shares it uses where it has none of its own.
        like: Whose fits of whole steps it uses, if not its own.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    l2_bytes: float
    sms: int
    watts: float | None
    scale_up_bytes_per_second: float
    scale_up_ranks: int
    network_bytes_per_second: float
    family: str
    scale_up_hosts: int = 0
    per_host: int = 8
    like: str = ""

    @property
    def fitted_as(self) -> str:
        """Name under which residuals of whole steps are found."""
        return self.like or self.name

    def __post_init__(self) -> None:
        unknown = sorted(set(self.peak_flops) - set(PRECISIONS))
        if unknown or not self.peak_flops:
            raise ValueError(f"{self.name}: precisions {unknown}, not {PRECISIONS}")
        sizes = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_second": self.memory_bytes_per_second,
            "sms": self.sms,
            "scale_up_bytes_per_second": self.scale_up_bytes_per_second,
            "scale_up_ranks": self.scale_up_ranks,
            "network_bytes_per_second": self.network_bytes_per_second,
            "per_host": self.per_host,
            **{f"peak_flops of {p}": rate for p, rate in self.peak_flops.items()},
        }
        wrong = {field: size for field, size in sizes.items() if not size > 0}
        if wrong:
            raise ValueError(f"{self.name}: must be more than 0: {wrong}")
        object.__setattr__(self, "peak_flops", MappingProxyType({**self.peak_flops}))


V100 = Accelerator(
    name="V100",
    peak_flops={
        "fp32": 15.7 * TERA,  # DS V100 SXM2
        "fp16": 125.0 * TERA,  # DS V100 SXM2; no bf16
    },
    memory_bytes=32 * GIB,  # DS V100 SXM2 32 GB, in chips of 8 GiB
    memory_bytes_per_second=900 * GB,  # DS V100 SXM2
    l2_bytes=6 * MIB,  # WP Volta
    sms=80,  # WP Volta
    watts=300,  # DS V100 SXM2
    scale_up_bytes_per_second=150 * GB,  # DS V100: 300 GB/s both ways
    scale_up_ranks=8,  # DGX-1
    network_bytes_per_second=6.25 * GB,  # DGX-1: 4 cards of 100 Gb/s for 8 devices
    family="V100",
)

A100 = Accelerator(
    name="A100",
    peak_flops={
        "fp32": 19.5 * TERA,  # DS A100
        "tf32": 156.0 * TERA,  # DS A100
        "fp16": 312.0 * TERA,  # DS A100
        "bf16": 312.0 * TERA,  # DS A100
    },
    memory_bytes=80 * GIB,  # DS A100 80 GB SXM, in chips of 16 GiB
    memory_bytes_per_second=2039 * GB,  # DS A100 80 GB SXM
    l2_bytes=40 * MIB,  # WP Ampere
    sms=108,  # WP Ampere
    watts=400,  # DS A100 80 GB SXM
    scale_up_bytes_per_second=300 * GB,  # DS A100: 600 GB/s both ways
    scale_up_ranks=8,  # DGX A100
    network_bytes_per_second=25 * GB,  # usual: HDR 200 Gb/s a device
    family="A100",
)

H100 = Accelerator(
    name="H100",
    peak_flops={
        "fp32": 67.0 * TERA,  # DS H100 SXM
        "tf32": 494.7 * TERA,  # WP Hopper, table 2, dense
        "fp16": 989.4 * TERA,  # WP Hopper, table 2, dense
        "bf16": 989.4 * TERA,  # WP Hopper, table 2, dense
        "fp8": 1978.9 * TERA,  # WP Hopper, table 2, dense
    },
    memory_bytes=80 * GIB,  # DS H100 SXM: 80 GB, in chips of 16 GiB
    memory_bytes_per_second=3350 * GB,  # DS H100 SXM
    l2_bytes=50 * MIB,  # WP Hopper
    sms=132,  # WP Hopper
    watts=700,  # DS H100 SXM
    scale_up_bytes_per_second=450 * GB,  # DS H100: 900 GB/s both ways
    scale_up_ranks=8,  # DGX H100
    network_bytes_per_second=50 * GB,  # usual: NDR 400 Gb/s a device
    family="H100",
)

B200 = Accelerator(
    name="B200",
    peak_flops={
        "fp32": 75.0 * TERA,  # DS HGX B200: 600 of eight
        "tf32": 1125.0 * TERA,  # DS HGX B200: 18 PF of eight with sparsity
        "fp16": 2250.0 * TERA,  # DS HGX B200: 36 PF of eight with sparsity
        "bf16": 2250.0 * TERA,  # DS HGX B200: 36 PF of eight with sparsity
        "fp8": 4500.0 * TERA,  # DS HGX B200: 72 PF of eight with sparsity
        "fp4": 9000.0 * TERA,  # DS HGX B200: 72 PF of eight, dense
    },
    memory_bytes=179 * GIB,  # what its driver shows; DS DGX B200 180 GB
    memory_bytes_per_second=8000 * GB,  # DS DGX B200: 64 TB/s of eight
    l2_bytes=126 * MIB,  # CUDA device query of B200
    sms=148,  # CUDA device query of B200
    watts=1000,  # DS HGX B200
    scale_up_bytes_per_second=900 * GB,  # DS HGX B200: 1.8 TB/s both ways
    scale_up_ranks=8,  # DGX B200
    network_bytes_per_second=50 * GB,  # usual: 400 Gb/s a device
    family="B200",
)

MI300X = Accelerator(
    name="MI300X",
    peak_flops={
        "fp32": 163.4 * TERA,  # DS MI300X
        "tf32": 653.7 * TERA,  # DS MI300X
        "fp16": 1307.4 * TERA,  # DS MI300X
        "bf16": 1307.4 * TERA,  # DS MI300X
        "fp8": 2614.9 * TERA,  # DS MI300X
    },
    memory_bytes=192 * GIB,  # DS MI300X: 192 GB, in chips of 24 GiB
    memory_bytes_per_second=5300 * GB,  # DS MI300X
    l2_bytes=256 * MIB,  # DS MI300X: Infinity Cache
    sms=304,  # DS MI300X: compute units
    watts=750,  # DS MI300X
    scale_up_bytes_per_second=448 * GB,  # DS MI300X: 7 links of 128 GB/s both ways
    scale_up_ranks=8,  # DS MI300X platform
    network_bytes_per_second=50 * GB,  # usual: 400 Gb/s a device
    family="MI300X",
)

TPU_V4 = Accelerator(
    name="TPUv4",
    peak_flops={"bf16": 275.0 * TERA},  # TPU v4
    memory_bytes=32 * GIB,  # TPU v4
    memory_bytes_per_second=1200 * GB,  # ISCA23
    l2_bytes=128 * MIB,  # ISCA23: CMEM
    sms=2,  # ISCA23: tensor cores
    watts=192,  # ISCA23: the most that was measured
    scale_up_bytes_per_second=300 * GB,  # ISCA23: 6 links of 50 GB/s
    scale_up_ranks=4096,  # TPU v4: chips of a pod
    scale_up_hosts=1,  # the torus crosses hosts
    network_bytes_per_second=6.25 * GB,  # JAX: data-centre network of a chip
    family="TPU",
    per_host=4,  # TPU v4
)

_DERIVED = (
    replace(
        A100,
        name="A100-40GB",
        memory_bytes=40 * GIB,  # DS A100 40 GB SXM, in chips of 8 GiB
        memory_bytes_per_second=1555 * GB,  # DS A100 40 GB SXM
    ),
    replace(
        A100,
        name="A100-PCIe",
        memory_bytes_per_second=1935 * GB,  # DS A100 80 GB PCIe
        watts=300,  # DS A100 80 GB PCIe
        scale_up_bytes_per_second=32 * GB,  # DS A100 PCIe: 64 GB/s both ways
    ),
    replace(
        A100,
        name="A800",
        scale_up_bytes_per_second=200 * GB,  # DS A800: 400 GB/s both ways
    ),
    replace(
        H100,
        name="H100-HBM2e",  # Meta's: Liang et al., TorchTitan, 2024
        memory_bytes=95 * GIB,  # TorchTitan: 96 GB, of which 95 GiB are free
        memory_bytes_per_second=2400 * GB,  # assumed: five stacks of HBM2e
        watts=500,  # assumed, below the data sheet's 700
    ),
    replace(
        H100,
        name="H800",
        scale_up_bytes_per_second=200 * GB,  # DS H800: 400 GB/s both ways
    ),
    replace(
        H100,
        name="H200",
        memory_bytes=140 * GIB,  # what its driver shows; DS H200 141 GB
        memory_bytes_per_second=4800 * GB,  # DS H200
        family="H200",
    ),
    replace(
        B200,
        name="B300",
        peak_flops={
            "fp32": 75.0 * TERA,  # DS HGX B300: 600 of eight
            "tf32": 1125.0 * TERA,  # DS HGX B300: 18 PF of eight with sparsity
            "fp16": 2250.0 * TERA,  # DS HGX B300: 36 PF of eight with sparsity
            "bf16": 2250.0 * TERA,  # DS HGX B300: 36 PF of eight with sparsity
            "fp8": 4500.0 * TERA,  # DS HGX B300: 72 PF of eight with sparsity
            "fp4": 13500.0 * TERA,  # DS HGX B300: 108 PF of eight, dense
        },
        memory_bytes=288 * GB,  # DS DGX B300: 2.3 TB of eight
        watts=1100,  # DS HGX B300
        network_bytes_per_second=100 * GB,  # usual: ConnectX-8, 800 Gb/s a device
        family="B300",
    ),
    replace(
        B200,
        name="GB200",
        peak_flops={
            "fp32": 80.0 * TERA,  # DS GB200 NVL72: 5,760 of 72
            "tf32": 1250.0 * TERA,  # DS GB200 NVL72: 180 PF of 72 with sparsity
            "fp16": 2500.0 * TERA,  # DS GB200 NVL72: 360 PF of 72 with sparsity
            "bf16": 2500.0 * TERA,  # DS GB200 NVL72: 360 PF of 72 with sparsity
            "fp8": 5000.0 * TERA,  # DS GB200 NVL72: 720 PF of 72 with sparsity
            "fp4": 10000.0 * TERA,  # DS GB200 NVL72: 1,440 PF of 72 with sparsity
        },
        memory_bytes=186 * GB,  # DS GB200 NVL72: 13.4 TB of 72
        watts=1200,  # DS GB200 superchip: 2,700 W with its CPU
        scale_up_ranks=72,  # DS GB200 NVL72
        scale_up_hosts=1,  # DS GB200 NVL72: a domain is 18 trays
        per_host=4,  # DS GB200 NVL72: a tray
        family="GB200",
    ),
    replace(
        B200,
        name="GB300",
        peak_flops={
            "fp32": 80.0 * TERA,  # DS GB300 NVL72: 6 PF of 72
            "tf32": 1250.0 * TERA,  # DS GB300 NVL72: 180 PF of 72 with sparsity
            "fp16": 2500.0 * TERA,  # DS GB300 NVL72: 360 PF of 72 with sparsity
            "bf16": 2500.0 * TERA,  # DS GB300 NVL72: 360 PF of 72 with sparsity
            "fp8": 5000.0 * TERA,  # DS GB300 NVL72: 720 PF of 72 with sparsity
            "fp4": 15000.0 * TERA,  # DS GB300 NVL72: 1,080 PF of 72, dense
        },
        memory_bytes=288 * GB,  # DS GB300: HBM3e of a device
        watts=1400,  # DS GB300 NVL72
        scale_up_ranks=72,  # DS GB300 NVL72
        scale_up_hosts=1,  # DS GB300 NVL72: a domain is 18 trays
        per_host=4,  # DS GB300 NVL72: a tray
        network_bytes_per_second=100 * GB,  # DS GB300 NVL72: ConnectX-8, 800 Gb/s
        family="GB200",
    ),
    replace(
        MI300X,
        name="MI250X",  # one of the two dies of the module: a device to a program
        peak_flops={
            "fp32": 47.9 * TERA,  # DS MI250X: 95.7 of two, matrix
            "fp16": 191.5 * TERA,  # DS MI250X: 383 of two
            "bf16": 191.5 * TERA,  # DS MI250X: 383 of two
        },
        memory_bytes=64 * GIB,  # DS MI250X: 128 GB of two, in chips of 16 GiB
        memory_bytes_per_second=1638 * GB,  # DS MI250X: 3,277 of two
        l2_bytes=8 * MIB,  # DS MI250X
        sms=110,  # DS MI250X: 220 compute units of two
        watts=280,  # DS MI250X: 560 W of two
        scale_up_bytes_per_second=100 * GB,  # FRONTIER: 50 to 200 GB/s to a neighbour
        network_bytes_per_second=12.5 * GB,  # FRONTIER: 4 cards of 25 GB/s, 8 dies
        family="MI250X",
    ),
    replace(
        MI300X,
        name="MI325X",
        memory_bytes=256 * GIB,  # DS MI325X: 256 GB, in chips of 32 GiB
        memory_bytes_per_second=6000 * GB,  # DS MI325X
        watts=1000,  # DS MI325X
        family="MI325X",
    ),
    replace(
        MI300X,
        name="MI355X",
        peak_flops={
            "fp32": 157.3 * TERA,  # DS MI355X
            "fp16": 2516.6 * TERA,  # DS MI355X
            "bf16": 2516.6 * TERA,  # DS MI355X
            "fp8": 5033.2 * TERA,  # DS MI355X
            "fp4": 10066.3 * TERA,  # DS MI355X
        },
        memory_bytes=288 * GIB,  # DS MI355X: 288 GB, in chips of 36 GiB
        memory_bytes_per_second=8000 * GB,  # DS MI355X
        sms=256,  # DS MI355X: compute units
        watts=1400,  # DS MI355X
        scale_up_bytes_per_second=537.6 * GB,  # DS MI355X: 7 x 153.6 GB/s both ways
        family="MI355X",
    ),
    replace(
        TPU_V4,
        name="TPUv3",
        peak_flops={"bf16": 123.0 * TERA},  # TPU v3
        memory_bytes=32 * GIB,  # TPU v3
        memory_bytes_per_second=900 * GB,  # ISCA23
        l2_bytes=0,  # ISCA23: no CMEM
        watts=262,  # ISCA23: the most that was measured
        scale_up_bytes_per_second=280 * GB,  # ISCA23: 4 links of 70 GB/s
        scale_up_ranks=1024,  # TPU v3: chips of a pod
    ),
    replace(
        TPU_V4,
        name="TPUv5e",
        peak_flops={"bf16": 197.0 * TERA},  # TPU v5e
        memory_bytes=16 * GIB,  # TPU v5e
        memory_bytes_per_second=819 * GB,  # TPU v5e
        l2_bytes=0,  # not published
        sms=1,  # TPU v5e: tensor cores
        watts=None,  # not published
        scale_up_bytes_per_second=200 * GB,  # TPU v5e: 1,600 Gb/s
        scale_up_ranks=256,  # TPU v5e
        per_host=8,  # TPU v5e
        network_bytes_per_second=3.125 * GB,  # JAX
    ),
    replace(
        TPU_V4,
        name="TPUv5p",
        peak_flops={"bf16": 459.0 * TERA},  # TPU v5p
        memory_bytes=95 * GIB,  # TPU v5p
        memory_bytes_per_second=2765 * GB,  # TPU v5p
        l2_bytes=0,  # not published
        watts=None,  # not published
        scale_up_bytes_per_second=600 * GB,  # TPU v5p: 4,800 Gb/s
        scale_up_ranks=8960,  # TPU v5p
    ),
    replace(
        TPU_V4,
        name="TPUv6e",
        peak_flops={"bf16": 918.0 * TERA},  # TPU v6e
        memory_bytes=32 * GIB,  # TPU v6e
        memory_bytes_per_second=1638 * GB,  # TPU v6e
        l2_bytes=0,  # not published
        sms=1,  # TPU v6e: tensor cores
        watts=None,  # not published
        scale_up_bytes_per_second=400 * GB,  # TPU v6e: 800 GB/s both ways
        scale_up_ranks=256,  # TPU v6e
        per_host=8,  # TPU v6e
        network_bytes_per_second=12.5 * GB,  # JAX
    ),
    replace(
        TPU_V4,
        name="TPUv7x",
        peak_flops={
            "bf16": 2307.0 * TERA,  # TPU v7x
            "fp8": 4614.0 * TERA,  # TPU v7x
        },
        memory_bytes=192 * GIB,  # TPU v7x
        memory_bytes_per_second=7380 * GB,  # TPU v7x
        l2_bytes=0,  # not published
        watts=None,  # not published
        scale_up_bytes_per_second=600 * GB,  # TPU v7x: 9,600 Gb/s both ways
        scale_up_ranks=9216,  # TPU v7x
        network_bytes_per_second=12.5 * GB,  # usual: as v6e, not published
    ),
    Accelerator(
        name="Gaudi2",
        peak_flops={
            "bf16": 432.0 * TERA,  # WP Gaudi 2
            "fp8": 865.0 * TERA,  # WP Gaudi 2
        },
        memory_bytes=96 * GIB,  # DS Gaudi 2: 96 GB, in chips of 16 GiB
        memory_bytes_per_second=2450 * GB,  # DS Gaudi 2
        l2_bytes=48 * 1e6,  # DS Gaudi 2: SRAM
        sms=24,  # DS Gaudi 2: tensor cores
        watts=600,  # DS Gaudi 2
        scale_up_bytes_per_second=262.5 * GB,  # DS HLS-Gaudi 2: 21 ports of 100 Gb/s
        scale_up_ranks=8,  # DS HLS-Gaudi 2
        network_bytes_per_second=37.5 * GB,  # DS HLS-Gaudi 2: 3 ports of 100 Gb/s
        family="Gaudi2",
    ),
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {a.name: a for a in (V100, A100, H100, B200, MI300X, TPU_V4, *_DERIVED)}
)
"""By name; `hardware.accelerator` finds one by any spelling."""
