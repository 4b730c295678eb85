"""Data sheets: numbers lie where machines lie, and slips of a unit are seen."""

from dataclasses import replace

import pytest

from minitrain.collectives.cost import Link
from minitrain.simulate.hardware import (
    ACCELERATORS,
    Accelerator,
    Cluster,
    accelerator,
    cluster,
)

GB = 1e9
PORTS = {25, 50, 100, 200, 300, 400, 800}  # Gb/s that network cards are sold with
PCIE = 32 * GB  # of PCI Express 4, where there is nothing better
EVERY = sorted(ACCELERATORS)


def whole(value: float, unit: float) -> bool:
    return abs(value / unit - round(value / unit)) < 1e-6


def faults(a: Accelerator) -> list[str]:
    """What cannot be right about an accelerator: a slip of a unit shows here."""
    half = a.peak_flops.get("bf16", a.peak_flops.get("fp16", 0.0))
    bandwidth = a.memory_bytes_per_second
    network = a.network_bytes_per_second
    cloud = a.family == "TPU"  # whose network serves input and little else
    least, most = (3.125, 12.5) if cloud else (6.25, 100)
    unit = GB if a.name in ("B300", "GB200", "GB300") else 2**30  # as the driver says
    inside, card = a.scale_up_bytes_per_second, a.name.endswith("PCIe")
    checks = {
        "half precision": 1e14 <= half <= 3e15,
        "fp8": abs(a.peak_flops.get("fp8", 2 * half) / half - 2) < 0.02,
        "tf32": abs(a.peak_flops.get("tf32", half / 2) / half - 0.5) < 0.02,
        "fp32": a.peak_flops.get("fp32", 0.0) < half / 2,
        "operations for a byte": 80 <= half / bandwidth <= 600,
        "memory": whole(a.memory_bytes, unit) and 16 <= a.memory_bytes / unit <= 288,
        "a pass over memory": 10e-3 <= a.memory_bytes / bandwidth <= 60e-3,
        "bandwidth in GB/s": whole(bandwidth, GB),
        "cache": 0 <= a.l2_bytes <= 256 * 2**20,
        "inside": inside == PCIE if card else 0.055 <= inside / bandwidth <= 0.32,
        "a port": min(abs(network * 8 / GB - p) for p in PORTS) < 1e-6,
        "network": least <= network / GB <= most,
        "network, of memory": cloud or 1 / 170 <= network / bandwidth <= 1 / 40,
        "tiles": 1 <= a.sms <= 304,
        "watts": a.watts is None or 1e11 <= half / a.watts <= 3e12,
        "domain": a.scale_up_ranks >= a.per_host,
    }
    return [name for name, right in checks.items() if not right]


@pytest.mark.parametrize("name", EVERY)
def test_numbers_lie_where_machines_lie(name):
    assert faults(ACCELERATORS[name]) == []


SLIPS = {"milli": 1e-3, "kilo": 1e3, "bytes as bits": 8, "bits as bytes": 1 / 8}
FIELDS = (
    "memory_bytes",
    "memory_bytes_per_second",
    "scale_up_bytes_per_second",
    "network_bytes_per_second",
    "peak_flops",
)


def slipped(a: Accelerator, field: str, factor: float) -> Accelerator:
    value = getattr(a, field)
    if field == "peak_flops":
        return replace(a, peak_flops={p: v * factor for p, v in value.items()})
    return replace(a, **{field: value * factor})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("factor", SLIPS.values(), ids=SLIPS)
def test_a_slip_of_a_unit_is_seen(field, factor):
    for a in ACCELERATORS.values():
        assert faults(slipped(a, field, factor)), a.name


@pytest.mark.parametrize("field", ["memory_bytes", "memory_bytes_per_second"])
def test_gib_for_gb_is_seen(field):
    for a in ACCELERATORS.values():
        assert faults(slipped(a, field, 2**30 / GB)), a.name


def test_peak_with_sparsity_is_seen():
    sparse = dict(ACCELERATORS["H100"].peak_flops) | {"fp8": 3957.8e12}
    assert faults(replace(ACCELERATORS["H100"], peak_flops=sparse))


def test_the_table_is_complete():
    wanted = (
        "A100 A800 H100 H800 H200 B200 B300 GB200 GB300 MI250X MI300X MI325X MI355X"
    )
    wanted += " TPUv3 TPUv4 TPUv5e TPUv5p TPUv6e TPUv7x Gaudi2 V100"
    assert set(wanted.split()) <= set(ACCELERATORS)
    assert all(name == a.name for name, a in ACCELERATORS.items())


def test_a_table_cannot_be_changed():
    with pytest.raises(TypeError):
        ACCELERATORS["H100"].peak_flops["bf16"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize("text", ["h100", "H100", "gb-200", "tpu v5p", "A100 40GB"])
def test_a_name_is_found_by_any_spelling(text):
    plain = text.lower().replace(" ", "").replace("-", "")
    assert accelerator(text).name.lower().replace("-", "") == plain


def test_an_unknown_accelerator_is_refused_with_its_neighbours():
    with pytest.raises(ValueError, match=r"no accelerator 'h10'.*H100"):
        accelerator("h10")
    with pytest.raises(ValueError, match="there is A100"):
        accelerator("zzz")


# ---- clusters ----


def test_a_cluster_in_a_word():
    made = cluster("h100:2048x8")
    assert (made.hosts, made.per_host, made.world_size) == (2048, 8, 16384)
    assert made.inside.bytes_per_second == 450e9
    assert made.across.bytes_per_second == 50e9
    assert made.domain_ranks == 8


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("h100:4x4", 4),  # NVLink ends at the host
        ("gb200:36x4", 72),  # a rack
        ("gb200:2x4", 8),  # no more than there are
        ("tpuv4:1024x4", 4096),
        ("a100:1x1", 1),
    ],
)
def test_a_domain_ends_where_its_links_do(text, ranks):
    assert cluster(text).domain_ranks == ranks


@pytest.mark.parametrize("text", ["h100", "h100:8", "h100:2x", "h100:2*8", ":2x8", ""])
def test_a_word_that_says_no_cluster_is_refused(text):
    with pytest.raises(ValueError, match="NAME:HOSTSxPER_HOST"):
        cluster(text)


def test_a_cluster_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 hosts of 8"):
        cluster("h100:0x8")


TEXT = """
hosts = 16
power_derate = 0.9
[accelerator]
like = "h100"
name = "H100 of ours"
memory_bytes = 96e9
peak_flops = { bf16 = 800e12 }
[inside]
ranks = 4
latency_seconds = 2e-6
[across]
bytes_per_second = 25e9
"""


@pytest.fixture
def document(tmp_path):
    def write(text):
        path = tmp_path / "ours.toml"
        path.write_text(text)
        return path

    return write


def test_a_cluster_from_a_file(document):
    made = cluster(document(TEXT))
    device = made.accelerator
    assert (device.name, device.memory_bytes) == ("H100 of ours", 96e9)
    assert device.peak_flops["bf16"] == 800e12
    assert device.peak_flops["fp8"] == ACCELERATORS["H100"].peak_flops["fp8"]
    assert (made.hosts, made.per_host, made.domain_ranks) == (16, 8, 4)
    assert made.inside == Link(2e-6, 450e9)
    assert made.across.bytes_per_second == 25e9
    assert made.power_derate == 0.9


def test_a_file_may_name_only_what_it_must(document):
    made = cluster(document('accelerator = "a100"\nhosts = 2\n'))
    assert made == cluster("a100:2x8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('accelerator = "h100"', "hosts must be given"),
        ("hosts = 2", "accelerator must be given"),
        ('accelerator = "h10"\nhosts = 2', "there is H100"),
        ('accelerator = "h100"\nhosts = 2\nhost = 3', "no field 'host'.*hosts"),
        ('accelerator = "h100"\nhosts = 2.5', "hosts=2.5 is not a whole number"),
        ('accelerator = "h100"\nhosts = "2"', "hosts='2' is not a number"),
        ('accelerator = "h100"\nhosts = 2\npower_derate = 9', "a share"),
        (
            'accelerator = "h100"\nhosts = 2\n[across]\nbandwidth = 1',
            "bytes_per_second",
        ),
        (
            'accelerator = "h100"\nhosts = 2\n[across]\nbytes_per_second = -1',
            "more than",
        ),
        ('accelerator = "h100"\nhosts = 2\n[inside]\nranks = 64', "domain of 64"),
        ("accelerator = 3\nhosts = 2", "a name, or a table"),
        ('hosts = 2\n[accelerator]\nlike = "h100"\nmemory = 1', "memory_bytes"),
        ('hosts = 2\n[accelerator]\nlike = "h100"\nmemory_bytes = -1', "more than 0"),
        ('hosts = 2\n[accelerator]\nlike = "h100"\npeak_flops = {bf17 = 1}', "bf17"),
        ("accelerator = ", "Invalid value"),
    ],
)
def test_a_file_that_says_no_cluster_is_refused_in_words(document, text, words):
    with pytest.raises(ValueError, match=words):
        cluster(document(text))


def test_a_cluster_holds_its_numbers_together():
    device, link = ACCELERATORS["H100"], Link(1e-6, 1e9)
    with pytest.raises(ValueError, match="domain of 16 in a cluster of 8"):
        Cluster(device, 1, 8, link, link, 16)
    with pytest.raises(ValueError, match="a share"):
        Cluster(device, 1, 8, link, link, 8, power_derate=1.2)
