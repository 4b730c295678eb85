"""Operators: physics that holds at all sizes, and a few measured points."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.simulate import kernels as k
from minitrain.simulate.constants import ERRORS
from minitrain.simulate.families import Kernels
from minitrain.simulate.hardware import ACCELERATORS

CHIPS = {
    (name, precision): k.chip(a, precision)
    for name, a in ACCELERATORS.items()
    for precision in a.peak_flops
}
H100, H100_FP8 = CHIPS["H100", "bf16"], CHIPS["H100", "fp8"]
chips = st.sampled_from(sorted(CHIPS)).map(CHIPS.get)
sides = st.integers(1, 100_000)
sizes = st.tuples(sides, sides, sides)
heads = st.tuples(
    st.integers(1, 64),  # batch
    st.integers(1, 128),  # heads
    st.integers(1, 8),  # kv heads
    st.integers(1, 50_000),  # queries
    st.integers(1, 50_000),  # keys
    st.sampled_from([32, 64, 96, 128, 192, 256]),
    st.sampled_from([0, 1]),  # causal
    st.sampled_from([0, 1]),  # backward
)
PRODUCTS = (k.gemm_seconds, k.dgrad_seconds, k.wgrad_seconds)
GROUPED = (k.batched_gemm_seconds, k.grouped_gemm_seconds, k.grouped_wgrad_seconds)


# ---- bounds ----


@given(chips, sizes, st.sampled_from(PRODUCTS))
def test_no_product_beats_the_peak_or_the_memory(c, size, price):
    m, n, inner = size
    seconds = price(c, *size)
    assert 2 * m * n * inner / seconds <= c.flops
    inputs, output = {
        k.gemm_seconds: (m * inner + inner * n, m * n * c.output_bytes),
        k.dgrad_seconds: (m * n + inner * n, m * inner * c.output_bytes),
        k.wgrad_seconds: (m * n + m * inner, inner * n * 8),  # added in fp32
    }[price]
    moved = c.input_bytes * inputs + output
    assert moved / seconds <= c.memory_bytes_per_second


@given(chips, st.integers(1, 300), sizes, st.sampled_from(GROUPED))
def test_no_group_of_products_beats_the_peak(c, groups, size, price):
    m, n, inner = size
    assert 2 * groups * m * n * inner / price(c, groups, *size) <= c.flops


@given(chips, heads)
def test_no_attention_beats_the_peak(c, size):
    batch, count, _, queries, keys, width, causal, backward = size
    flops = 4 * batch * count * queries * keys * width * (2.5 if backward else 1)
    flops *= 0.5 if causal else 1
    assert flops / k.attention_seconds(c, *size) <= c.attention_flops


@given(chips, st.floats(0, 1e12))
def test_nothing_moves_faster_than_memory(c, moved):
    assert moved / k.memory_seconds(c, moved) <= c.memory_bytes_per_second
    assert k.optimizer_seconds(c, moved, 16) == k.memory_seconds(c, moved * 16)


@given(chips)
def test_many_bytes_move_at_most_of_the_bandwidth(c):
    assert 0.5 < 1e12 / k.memory_seconds(c, 1e12) / c.memory_bytes_per_second <= 1


# ---- more work takes longer, a better machine less ----


@given(chips, sizes, st.integers(0, 2), st.integers(1, 5000))
def test_more_work_does_not_take_less(c, size, side, more):
    larger = list(size)
    larger[side] += more
    for price in PRODUCTS:
        assert price(c, *larger) >= price(c, *size)
    for price in GROUPED:
        assert price(c, 3, *larger) >= price(c, 3, *size)
        assert price(c, 3 + more, *size) >= price(c, 3, *size)


@given(chips, heads, st.integers(0, 4), st.integers(1, 500))
def test_more_attention_does_not_take_less(c, size, which, more):
    larger = list(size)
    larger[which] += more
    assert k.attention_seconds(c, *larger) >= k.attention_seconds(c, *size)


FASTER = ("flops", "attention_flops", "memory_bytes_per_second")
SLOWER = ("launch_seconds", "flash_launch_seconds", "memory_launch_seconds")


def everything(c, size):
    """One of each operator."""
    m, n, inner = size
    yield from (price(c, *size) for price in PRODUCTS)
    yield from (price(c, 4, *size) for price in GROUPED)
    yield k.attention_seconds(c, 2, 8, 2, m, n, 128, 1, 0)
    yield k.attention_seconds(c, 2, 8, 2, m, n, 128, 1, 1)
    yield k.unfused_attention_seconds(c, 2, 8, m, n, 64, 1, 1, 0)
    yield k.memory_seconds(c, m * inner)
    yield k.optimizer_seconds(c, m * inner, 16)


@given(chips, sizes, st.sampled_from(FASTER), st.floats(1, 10))
def test_a_better_machine_is_not_slower(c, size, field, factor):
    better = c._replace(**{field: getattr(c, field) * factor})
    pairs = zip(everything(c, size), everything(better, size), strict=True)
    assert all(new <= old * (1 + 1e-12) for old, new in pairs)


@given(chips, sizes, st.sampled_from(SLOWER), st.floats(0, 1e-3))
def test_latency_does_not_help(c, size, field, more):
    worse = c._replace(**{field: getattr(c, field) + more})
    pairs = zip(everything(c, size), everything(worse, size), strict=True)
    assert all(new >= old for old, new in pairs)


@given(chips, sizes)
def test_twice_the_work_on_twice_the_machine_takes_as_long(c, size):
    """Twice the SMs, FLOP/s and bandwidth work off twice the groups."""
    both = c._replace(
        flops=2 * c.flops,
        sms=2 * c.sms,
        memory_bytes_per_second=2 * c.memory_bytes_per_second,
    )
    for price in GROUPED:
        assert price(both, 8, *size) == pytest.approx(price(c, 4, *size), rel=1e-9)


@given(chips, st.floats(1e3, 1e11))
def test_twice_the_bytes_take_twice_the_time_after_the_launch(c, moved):
    after = partial(lambda moved: k.memory_seconds(c, moved) - c.memory_launch_seconds)
    assert after(2 * moved) == pytest.approx(2 * after(moved), rel=1e-4)


def test_a_large_product_takes_twice_as_long_at_twice_its_size():
    one, two = (k.gemm_seconds(H100, m, 8192, 8192) for m in (2**14, 2**15))
    assert two / one == pytest.approx(2, rel=0.05)


# ---- arrays ----


@given(chips, st.lists(sizes, min_size=1, max_size=5))
def test_an_array_gives_what_its_numbers_give(c, several):
    arrays = np.array(several, dtype=float).T
    for i, result in enumerate(everything(c, arrays)):
        single = [list(everything(c, size))[i] for size in several]
        np.testing.assert_allclose(result, single, rtol=1e-12)


def test_arrays_broadcast():
    seconds = k.gemm_seconds(H100, np.array([[1024.0], [2048.0]]), np.arange(1, 4), 512)
    assert seconds.shape == (2, 3)


def test_a_flag_may_be_an_array():
    both = k.attention_seconds(H100, 1, 8, 8, 4096, 4096, 128, 1, np.array([0, 1]))
    assert both[1] > both[0]


# ---- measured points: ai-dynamo/aiconfigurator 095f58a5, in microseconds ----

MEASURED = [
    ("A100", "bf16", (4096, 4096, 4096), 549),
    ("A100", "bf16", (8192, 8192, 8192), 4280),
    ("H100", "bf16", (4096, 4096, 4096), 178),
    ("H100", "bf16", (8192, 8192, 8192), 1416),
    ("H100", "bf16", (64, 8192, 8192), 51),  # weights from memory
    ("H200", "bf16", (8192, 8192, 8192), 1375),
    ("B200", "bf16", (8192, 8192, 8192), 696),
]


def agrees(price, within=0.15):
    """Whether a price of products is near what was measured."""
    return all(
        abs(float(price(CHIPS[name, precision], *size)) / (us * 1e-6) - 1) < within
        for name, precision, size, us in MEASURED
    )


WRONG = {
    "milliseconds": lambda c, *s: k.gemm_seconds(c, *s) * 1e3,
    "microseconds": lambda c, *s: k.gemm_seconds(c, *s) * 1e6,
    "one operation for a multiplication and an addition": lambda c, *s: k.gemm_seconds(
        c._replace(flops=2 * c.flops), *s
    ),
    "bits for bytes": lambda c, *s: k.gemm_seconds(
        c._replace(memory_bytes_per_second=c.memory_bytes_per_second / 8), *s
    ),
    "the whole peak": lambda c, m, n, k: 2 * m * n * k / c.flops,
    "no memory": lambda c, *s: k.gemm_seconds(
        c._replace(memory_bytes_per_second=1e30), *s
    ),
}


def test_products_take_what_was_measured():
    assert agrees(k.gemm_seconds)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_price_does_not_agree(wrong):
    assert not agrees(wrong)


def test_casts_are_why_fp8_was_measured_at_half_of_its_peak():
    """32,768 x 4,096 x 4,096 took 1,093 us on H100 with the cast of its input."""
    size = (32768, 4096, 4096)
    product = float(k.gemm_seconds(H100_FP8, *size))
    cast = float(k.cast_seconds(H100_FP8, size[0] * size[2]))
    assert product + cast == pytest.approx(1093e-6, rel=0.1)
    assert 2 * np.prod(size) / product > 0.7 * H100_FP8.flops
    assert k.cast_seconds(H100, 1e9) == 0


def test_small_groups_of_heads_do_not_fill_the_device():
    """A100: 182 TFLOP/s of 64 heads at 4,096, 109 of 8."""

    def rate(heads):
        seconds = k.attention_seconds(
            CHIPS["A100", "bf16"], 1, heads, 1, 4096, 4096, 128, 1, 0
        )
        return 2 * heads * 4096**2 * 128 / seconds / 1e12

    assert rate(64) == pytest.approx(182, rel=0.1)
    assert rate(8) == pytest.approx(109, rel=0.15)


def test_flash_attention_beats_the_unfused_one():
    flash = k.attention_seconds(H100, 1, 32, 32, 4096, 4096, 128, 1, 0)
    old = k.unfused_attention_seconds(H100, 1, 32, 4096, 4096, 128, 1, 1, 0)
    older = k.unfused_attention_seconds(H100, 1, 32, 4096, 4096, 128, 0, 1, 0)
    assert 3 * flash < old < older


def test_unfused_attention_moves_its_scores():
    scores = 2 * 16 * 1024 * 1024
    assert k.score_bytes(2, 16, 1024, 1024, 1, 1, 0) == 9 * scores
    assert k.score_bytes(2, 16, 1024, 1024, 1, 0, 1) == 6 * scores


# ---- records ----


def test_a_record_holds_numbers_only():
    for c in CHIPS.values():
        assert all(isinstance(x, int | float) and np.isfinite(x) for x in c)
        shares = {n: x for n, x in c._asdict().items() if n.endswith("_share")}
        assert all(0 < x <= 1 for x in shares.values()), shares
        launches = [x for n, x in c._asdict().items() if n.endswith("launch_seconds")]
        assert all(0 <= x < 50e-6 for x in launches)
        assert 0 <= c.cast_seconds_per_element < 10e-12
    assert set(Kernels._fields) < set(k.Chip._fields)


def test_what_was_not_measured_says_so():
    assert H100.measured == CHIPS["A800", "bf16"].measured == 1
    assert CHIPS["MI300X", "bf16"].measured == CHIPS["TPUv4", "bf16"].measured == 0
    assert CHIPS["H200", "fp8"].measured == CHIPS["H100", "tf32"].measured == 0


def test_a_power_limit_slows_the_products_in_proportion():
    slow = k.chip(ACCELERATORS["H100"], "bf16", power_derate=0.5)
    assert slow.flops == H100.flops / 2
    assert slow.memory_bytes_per_second == H100.memory_bytes_per_second


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="V100 has no bf16; it has fp32, fp16"):
        k.chip(ACCELERATORS["V100"], "bf16")


def test_fits_are_as_good_as_they_are_said_to_be():
    held_out = {e["fit"]: e["mape_held_out"] for e in ERRORS}
    products = [x for fit, x in held_out.items() if fit.startswith("products")]
    assert len(products) == 6 and max(products) <= 6
    assert max(held_out.values()) <= 10
