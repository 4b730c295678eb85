"""The closed forms bound to numbers: what they say is what NumPy says."""

import random
from types import ModuleType

import numpy as np
import pytest

from minitrain.simulate import bubbles, footprint, kernels, layer, network, step
from minitrain.simulate.estimate import machine_records
from minitrain.simulate.hardware import cluster
from minitrain.simulate.plan import SCHEDULES, Experts, Plan
from minitrain.simulate.scalars import NUMBERS, for_numbers
from minitrain.simulate.sizes import sizes
from minitrain.simulate.software import SOFTWARE, software
from minitrain.workload.presets import PRESETS

MODULES = (kernels, network, bubbles, layer, step, footprint)


def draw_step(draw: random.Random) -> tuple:
    """Sizes, hardware and software of a plan that can be run."""
    while True:
        tp, pp, cp = (2 ** draw.randint(0, most) for most in (3, 4, 2))
        dp = 2 ** draw.randint(3, 6)
        schedule = draw.choice(SCHEDULES) if pp > 1 else "1f1b"
        model = PRESETS[draw.choice(list(PRESETS))]
        experts = Experts(count=8, top_k=2, ffn=4096) if draw.random() < 0.2 else None
        device = draw.choice(["a100", "h100", "b200", "mi300x", "gb200"])
        try:
            plan = Plan(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=draw.choice([1, 8]) if experts else 1,
                seq=2 ** draw.randint(9, 15),
                micro_batch=draw.choice([1, 2]),
                global_batch=dp * 2 * draw.randint(1, 40),
                schedule=schedule,
                interleave=2 if schedule == "interleaved" else 1,
                sequence_parallel=tp > 1 and draw.random() < 0.5,
                zero=draw.randint(0, 3),
                recompute=draw.choice(["none", "selective", "full"]),
            )
            machines = cluster(f"{device}:{plan.world_size // 8}x8")
            plan.check(model, machines.world_size, experts)
        except ValueError:
            continue
        soft = software(draw.choice(list(SOFTWARE)), machines.accelerator.name)
        records = machine_records(machines, "bf16", soft)
        return sizes(model, plan, machines.hosts, experts), records, soft


def test_numbers_give_what_arrays_give():
    one, draw = for_numbers(MODULES), random.Random(6)
    for _ in range(400):
        s, records, soft = draw_step(draw)
        for got, expected in (
            (one.step.step_seconds, step.step_seconds),
            (one.footprint.rank_bytes, footprint.rank_bytes),
        ):
            given = (s, *records, soft) if expected is step.step_seconds else (s, soft)
            numbers, arrays = got(*given), expected(*given)
            assert list(numbers) == pytest.approx(list(map(float, arrays)), rel=1e-13)
            assert not any(isinstance(x, np.generic | np.ndarray) for x in numbers)


def test_no_copy_calls_an_original():
    one = for_numbers(MODULES)
    originals = {
        id(value)
        for module in MODULES
        for value in vars(module).values()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and not isinstance(value, type)
    }
    for module in MODULES:
        copies = vars(getattr(one, module.__name__.rpartition(".")[2])).values()
        for copy in copies:
            for name in copy.__code__.co_names:
                value = copy.__globals__.get(name)
                assert id(value) not in originals, (copy, name)
                assert not isinstance(value, ModuleType) or value not in MODULES
            assert copy.__globals__["np"] is NUMBERS


def test_the_originals_stay_as_they_are():
    for_numbers(MODULES)
    assert all(module.np is np for module in MODULES if hasattr(module, "np"))
    assert kernels.memory_seconds.__globals__ is vars(kernels)


@pytest.mark.parametrize(
    "name", ["abs", "ceil", "floor", "log2", "sqrt", "maximum", "minimum", "where"]
)
def test_each_function_is_numpys(name):
    draw = random.Random(name)
    wanted = {"maximum": 2, "minimum": 2, "where": 3}.get(name, 1)
    for _ in range(200):
        low = 0.01 if name in ("log2", "sqrt") else -9
        values = [
            draw.choice([draw.uniform(low, 9), 0.0 if low < 0 else 1.0, 2.0])
            for _ in range(wanted)
        ]
        got = getattr(NUMBERS, name)(*values)
        assert got == pytest.approx(float(getattr(np, name)(*values)), rel=1e-15)
