"""The fit of whole steps finds residuals that are known, and keeps their bounds."""

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from minitrain.simulate.names import COLUMNS  # noqa: E402
from minitrain.simulate.published import read_run  # noqa: E402
from minitrain.simulate.residuals import BOUNDS, RESIDUALS  # noqa: E402
from minitrain.simulate.runs import published_runs  # noqa: E402
from minitrain.simulate.software import (  # noqa: E402
    SOFTWARE,
    residuals_of,
    software,
    within_bounds,
)
from minitrain.simulate.validation import predict  # noqa: E402
from tools import fit_steps  # noqa: E402

KEY = ("megatron-lm", "A100", "bf16")
RULES = SOFTWARE["megatron-lm"]
KNOWN = {
    "gemm_share": 0.90,
    "traffic": 1.3,
    "network_share": 0.8,
    "tensor_hidden": 0.2,
}
ROWS = [row for row in published_runs() if row["gpu"].startswith("A100")]
ROWS = [
    row
    for row in ROWS
    if row["source_id"] in ("korthikanti-t5", "sc21-t1", "sc21-t2")
    and row["framework"] == "Megatron-LM"
]


def synthetic(**known) -> list:
    """Runs that took exactly what these residuals make of them."""
    soft = replace(RULES, **known)
    found = []
    for row in ROWS:
        run = replace(read_run(row), software=soft, choices=[])
        run = replace(run, value=predict(run).predicted)
        found.append(replace(run, software="megatron-lm"))
    return found


def fit(runs: list, names: tuple[str, ...]):
    errors = fit_steps._steps(runs)
    return fit_steps.print_group(KEY, RULES, errors, names, len(runs)), errors


def test_residuals_that_made_the_runs_are_found(capsys, monkeypatch):
    """Where a row counts for much, the rows decide alone."""
    monkeypatch.setattr(fit_steps, "SPREAD", 1e-5)
    soft, errors = fit(synthetic(**KNOWN), tuple(KNOWN))
    assert np.abs(errors(soft)).max() < 1e-3
    for name, value in KNOWN.items():
        assert getattr(soft, name) == pytest.approx(value, rel=0.03), name
    printed = capsys.readouterr().out
    assert f"{KEY!r}: {{" in printed and f"# {len(ROWS)} rows, 0.0 % left" in printed
    assert all(f'"{name}": ' in printed for name in KNOWN)


def test_residuals_are_drawn_towards_what_they_are_without_a_fit():
    """What the rows hardly tell apart stays near; the predictions hold all the same."""
    soft, errors = fit(synthetic(**KNOWN), tuple(KNOWN))
    assert np.abs(errors(soft)).mean() < 0.005 < 0.05 < np.abs(errors(RULES)).mean()
    assert soft.gemm_share == pytest.approx(KNOWN["gemm_share"], abs=0.02)
    for name, value in KNOWN.items():
        usual = getattr(RULES, name)
        assert min(usual, value) - 0.02 < getattr(soft, name), name
        assert getattr(soft, name) < max(usual, value) + 0.02, name


def test_runs_without_a_loss_need_no_residual():
    soft, errors = fit(synthetic(), tuple(KNOWN))
    assert np.abs(errors(soft)).max() < 1e-6
    for name in KNOWN:
        assert getattr(soft, name) == pytest.approx(getattr(RULES, name), abs=1e-4)


@pytest.mark.parametrize(("share", "bound"), [(0.4, 0.7), (2.0, 1.05)])
def test_a_fit_stops_at_its_bounds(share, bound):
    soft, errors = fit(synthetic(gemm_share=share), ("gemm_share",))
    assert soft.gemm_share == pytest.approx(bound, abs=1e-3)
    assert np.abs(errors(soft)).mean() > 0.1  # and says what is left


def test_a_slip_of_a_unit_cannot_be_fitted_away():
    runs = [replace(run, value=run.value / 8) for run in synthetic()]
    soft, errors = fit(runs, tuple(KNOWN))
    assert np.abs(errors(soft)).mean() > 1
    fitted = {name: getattr(soft, name) for name in KNOWN}
    assert within_bounds(fitted)


def test_one_odd_run_does_not_move_the_residual_far():
    """What one row may move is bounded by the width of the residual."""
    runs = synthetic()
    runs[0] = replace(runs[0], value=1.2 * runs[0].value)
    soft, _ = fit(runs, ("gemm_share",))
    assert abs(soft.gemm_share - RULES.gemm_share) < 0.05


# ---- stages ----


def stages(soft, experiments=((2048, 64_000), (4096, 128_000), (2048, 256_000))):
    """Rows of measured stages, as this software would have them."""
    rows = []
    for number, (seq, vocab) in enumerate(experiments):
        common = {
            "experiment": f"run {number}",
            "method": "base",
            "vocab": str(vocab),
            "seq": str(seq),
            "hidden": "3072",
            "heads": "24",
            "layers": "32",
        }
        ones = [common | {"F_us": "1000000", "B_us": "1000000"}] * 8
        logs = fit_steps._stage(ones, soft)  # of seconds over a second
        f, b, last_f, last_b = (int(1e6 * np.exp(log)) for log in logs)
        for place in range(8):
            here = (last_f, last_b) if place == 7 else (f, b)
            rows.append(common | {"F_us": str(here[0]), "B_us": str(here[1])})
    return rows


def test_stages_tell_of_the_loss_and_of_what_moves_bytes(monkeypatch):
    monkeypatch.setattr(fit_steps, "SPREAD", 1e-4)
    rules = SOFTWARE["megatron-flash"]
    known = {"gemm_share": 0.9, "traffic": 1.6, "loss_bytes": 30.0}
    soft = fit_steps.print_group(
        ("megatron-flash", "A100", "bf16"),
        rules,
        fit_steps._stages(stages(replace(rules, **known))),
        tuple(known),
        24,
    )
    for name, value in known.items():
        assert getattr(soft, name) == pytest.approx(value, rel=0.03), name


def test_other_methods_of_stages_are_left_out():
    rows = stages(SOFTWARE["megatron-flash"])
    odd = [row | {"method": "interlaced", "experiment": "odd"} for row in rows[:8]]
    assert len(fit_steps._stages(rows + odd)(SOFTWARE["megatron-flash"])) == 3 * 4


# ---- what is fitted on what ----


def write(path: Path, rows: list[dict[str, str]], names: tuple[str, ...] = COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Tables in the place of those that were measured."""
    odd = [
        ROWS[0] | {"measured_quantity": "peak memory GB"},
        ROWS[0] | {"gpu": "Abacus"},
        ROWS[0] | {"experts": "8", "topk": "2"},
    ]
    write(tmp_path / "calibration.csv", ROWS + odd)
    held = published_runs("zb-t4", "nemo2407", "mcore-h100")
    write(tmp_path / "validation.csv", held)
    measured = stages(SOFTWARE["megatron-flash"])
    write(tmp_path / "stage_times.csv", measured, tuple(measured[0]))
    return tmp_path


def test_of_the_held_rows_only_plain_pipelines_are_used(folder):
    groups = fit_steps.read_groups(folder)
    assert set(groups) == {
        ("megatron-lm", "A100", "bf16"),
        ("megatron-2021", "A100", "bf16"),
        ("megatron-zb", "A100", "bf16"),
    }
    zero_bubble = groups["megatron-zb", "A100", "bf16"]
    assert len(zero_bubble) == 12
    assert {run.plan.schedule for run in zero_bubble} == {"1f1b"}
    assert sum(map(len, groups.values())) == len(ROWS) + 12
    assert all(run.experts is None for runs in groups.values() for run in runs)


def test_few_runs_fit_one_residual_and_none_more_than_four():
    run = read_run(ROWS[0])
    for name in SOFTWARE:
        for kind in ("bf16", "fp8", "omni-path"):
            for count in (1, 3, 4, 40):
                names = fit_steps.names_of((name, "A100", kind), [run] * count)
                assert 1 <= len(names) <= 4
                assert set(names) <= set(BOUNDS)
    assert fit_steps.names_of(("fsdp", "H100", "bf16"), [run]) == ("gemm_share",)


def test_what_is_printed_is_the_library_s_module(folder, capsys):
    fit_steps.main(str(folder))
    printed = capsys.readouterr().out
    made: dict = {}
    exec(compile(printed, "residuals.py", "exec"), made)
    assert dict(made["BOUNDS"]) == dict(BOUNDS)
    assert ("megatron-zb", "A100", "bf16") in made["RESIDUALS"]
    assert ("megatron-flash", "A100", "bf16") in made["RESIDUALS"]
    for fitted in made["RESIDUALS"].values():
        assert within_bounds(fitted) and len(fitted) <= 4
    # The stages were made without losses: nothing is found.
    found = made["RESIDUALS"]["megatron-flash", "A100", "bf16"]
    for name, value in found.items():
        usual = getattr(SOFTWARE["megatron-flash"], name)
        assert value == pytest.approx(usual, rel=0.01)


# ---- what the library has ----


@pytest.mark.parametrize("key", sorted(RESIDUALS), ids="-".join)
def test_the_residuals_keep_their_bounds_and_number(key):
    fitted = dict(RESIDUALS[key])
    assert within_bounds(fitted) and 1 <= len(fitted) <= 4
    assert key[0] in SOFTWARE
    low, _ = BOUNDS["gemm_share"]
    assert not within_bounds({"gemm_share": low - 0.01})


def test_residuals_of_a_network_come_on_top():
    plain = software("megatron-deepspeed", "A100")
    path = software("megatron-deepspeed", "A100", "bf16", "omni-path")
    fitted = RESIDUALS["megatron-deepspeed", "A100", "omni-path"]
    assert path.inside_share == fitted["inside_share"] != plain.inside_share
    assert path.gemm_share == plain.gemm_share


def test_near_accelerators_and_frameworks_lend_their_residuals():
    known = RESIDUALS["megatron-core", "H100", "bf16"]
    assert residuals_of("megatron-core", "H800", "bf16") == known
    assert residuals_of("megatron-core-2024", "H100", "bf16") == known
    assert residuals_of("megatron-core", "TPU v4", "bf16") == {}
    assert software("megatron-core", "H100", "fp8").narrow == 1
    assert software("megatron-core", "H100", "bf16").narrow == 0
    with pytest.raises(ValueError, match="no software 'abacus': there is megatron-lm"):
        software("abacus")
