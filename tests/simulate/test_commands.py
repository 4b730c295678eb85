"""The commands as they are typed: what they answer, and what they refuse."""

import csv
import json
from pathlib import Path

import pytest

from minitrain.__main__ import main
from minitrain.commands import sweep as sweep_command
from minitrain.commands.question import read_model
from minitrain.simulate.estimate import estimate
from minitrain.simulate.hardware import cluster
from minitrain.simulate.names import COLUMNS
from minitrain.simulate.plan import SCHEDULES, Plan
from minitrain.simulate.timeline import pipeline_of
from minitrain.workload.presets import preset

LLAMA = "simulate --model llama3-405b --cluster h100:2048x8 --tp 8 --pp 16 --dp 128"
LLAMA += " --seq 8192 --global-batch 2048 --sequence-parallel --zero 1"


def run(line: str) -> int:
    return main(line.split())


def answer(line: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert run(f"{line} --json") == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


# ---- simulate ----


def test_json_is_the_estimate(capsys):
    said = answer(LLAMA, capsys)
    plan = Plan(
        dp=128,
        tp=8,
        pp=16,
        seq=8192,
        global_batch=2048,
        sequence_parallel=True,
        zero=1,
    )
    made = estimate(preset("llama3-405b"), plan, cluster("h100:2048x8"))
    assert said["step_seconds"] == made.step_seconds
    assert sum(said["parts_seconds"].values()) == pytest.approx(made.step_seconds)
    assert said["memory_by_kind_bytes"] == dict(made.memory)
    assert said["memory_bytes"] == made.memory_bytes
    assert said["fits"] == made.fits
    assert said["plan"]["dp"] == 128


def test_the_page_says_what_the_estimate_does(capsys):
    assert run(f"{LLAMA} --tokens 15.6e12") == 0
    page = capsys.readouterr().out
    made = answer(LLAMA, capsys)
    assert "llama3-405b on 16,384 H100 (2,048 hosts of 8)" in page
    assert "tp 8 with sequence parallelism, pp 16, dp 128, 1f1b, 16 micro" in page
    assert f"MFU {made['mfu']:.1%}" in page
    assert f"{made['step_seconds']:.2f} s" in page
    days = 15.6e12 / made["tokens_per_second"] / 86400
    assert f"{days:,.1f} days" in page
    assert f"{made['memory_bytes'] / 2**30:,.1f} GiB" in page
    for part, seconds in made["parts_seconds"].items():
        share = seconds / made["step_seconds"]
        assert (f"{share:.1%}" in page and part in page) or share < 5e-4
    assert "…" not in page


def test_devices_left_over_are_data_parallel(capsys):
    said = answer("simulate --cluster h100:4x8 --tp 4 --pp 2", capsys)
    assert said["plan"]["dp"] == 4


def test_options_come_from_a_file(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('cluster = "a100:2x8"\ntp = 8\nglobal-batch = 64\nzero = 1\n')
    said = answer(f"simulate --config {path} --global-batch 128", capsys)
    plan = said["plan"]
    assert (plan["tp"], plan["zero"], plan["global_batch"]) == (8, 1, 128)
    assert said["cluster"] == "a100:2x8"


MODEL = """
vocab_size = 32000
layers = 8
hidden = 1024
heads = 16
[experts]
count = 8
top_k = 2
ffn = 4096
"""


def test_a_model_may_be_a_file(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(MODEL)
    model, experts = read_model(str(path))
    assert (model.layers, experts.count) == (8, 8)
    said = answer(f"simulate --model {path} --cluster h100:1x8 --ep 8", capsys)
    dense = tmp_path / "dense.toml"
    dense.write_text(MODEL.partition("[experts]")[0])
    other = answer(f"simulate --model {dense} --cluster h100:1x8", capsys)
    assert said["step_seconds"] != other["step_seconds"]


def test_the_trace_holds_every_pass_of_the_pipeline(tmp_path, capsys):
    path = tmp_path / "pipeline.json"
    said = answer(f"{LLAMA} --trace {path}", capsys)
    events = json.loads(path.read_text())["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X"]
    assert len(tasks) == 2 * 16 * 16
    assert {e["tid"] for e in tasks} == set(range(16))
    end = max(e["ts"] + e["dur"] for e in tasks) / 1e6
    assert 0.7 * said["step_seconds"] < end < said["step_seconds"]


@pytest.mark.parametrize("schedule", SCHEDULES[:6])
def test_the_replayed_pipeline_is_the_closed_forms(schedule):
    """The busy time and the bubble of the parts, within 2 %."""
    plan = Plan(
        dp=2,
        tp=8,
        pp=4,
        seq=4096,
        global_batch=64,
        schedule=schedule,
        interleave=4 if schedule == "interleaved" else 1,
    )
    made = estimate(preset("llama2-70b"), plan, cluster("h100:8x8"))
    run = pipeline_of(made)
    span = max(e[-1] - s[0] for s, e in zip(run.starts, run.ends, strict=True))
    apart = ("data-parallel messages", "optimizer", "losses of the software")
    parts = sum(s for name, s in made.parts.items() if name not in apart)
    assert span == pytest.approx(parts, rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model llama3-80b", "no model is called 'llama3-80b'; there is llama3-8b"),
        ("--model none.toml", "cannot read none.toml"),
        ("--cluster h1000:1x8", "no accelerator 'h1000'; there is H100"),
        ("--cluster h100", "write NAME:HOSTSxPER_HOST, such as h100:2048x8"),
        ("--cluster none.toml", "cannot read none.toml"),
        ("--tp 3", "tp*pp*cp = 3*1*1 = 3 does not divide the cluster's 64 devices"),
        ("--tp 0", "tp*pp*cp = 0*1*1 = 0"),
        ("--tp -8 --pp -1", "pp=-1"),
        ("--tp 4 --dp 3", "tp*pp*cp*dp = 4*1*1*3 = 12 devices, and the cluster has 64"),
        ("--pp 64", "pp=64 stages of 32 layers"),
        ("--tp 64", "tp=64 does not divide heads=32"),
        ("--global-batch 100", "global_batch=100 is not a multiple of dp*micro_batch"),
        ("--schedule 2f2b", "schedule='2f2b': one of gpipe, 1f1b"),
        ("--interleave 2 --pp 2", "interleave=2 needs schedule='interleaved'"),
        ("--ep 2", "ep=2, and the model has no experts"),
        ("--zero 4", "zero=4: one of 0, 1, 2, 3"),
        ("--seq -1", "seq=-1: at least 1"),
        ("--software deepsped", "no software 'deepsped': there is"),
        ("--precision fp7", "fp7"),
        ("--cluster a100:8x8 --precision fp8", "A100 has no fp8"),
        ("--pp 2 --stage-layers 3 4", "stages (3, 4) do not make pp=2 of 32"),
        ("--micro_batches 3", "unrecognized"),
        ("--trace /none/x.json", "cannot write /none/x.json"),
        ("--config none.toml", "cannot read none.toml"),
    ],
)
def test_what_cannot_be_is_one_line_with_its_numbers(options, words, capsys):
    assert run(f"simulate {options}") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert words.lower() in said.err.lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vocab_size = 8\nlayer = 2", "no layer; there is vocab_size, layers"),
        ("vocab_size = 8", "missing"),
        (
            "vocab_size = 8\nlayers = 0\nhidden = 8\nheads = 1",
            "layers must be at least",
        ),
        (MODEL.replace("top_k = 2", "top_k = 9"), "top_k=9"),
        ("= 3", "cannot read"),
    ],
)
def test_a_wrong_file_of_a_model_is_refused(text, words, tmp_path, capsys):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    assert run(f"simulate --model {path}") == 2
    said = capsys.readouterr().err
    assert words in said and str(path) in said


# ---- sweep ----

GRID = "sweep --model llama2-7b --cluster h100:2x8 --global-batch 64 --tp 1 2 8"
GRID += " --pp 1 2 5 --micro-batch 1 3 --zero 1 --recompute none full"


def test_a_sweep_is_the_estimate_of_every_layout(capsys):
    said = answer(f"{GRID} --best 100", capsys)
    assert said["layouts"] == said["fit"] + said["too_large"] + sum(
        said["refused"].values()
    )
    assert said["fit"] == len(said["best"]) > 3
    steps = [entry["step_seconds"] for entry in said["best"]]
    assert steps == sorted(steps)
    machines = cluster("h100:2x8")
    for entry in said["best"]:
        fields = entry["plan"] | {"stage_layers": tuple(entry["plan"]["stage_layers"])}
        made = estimate(preset("llama2-7b"), Plan(**fields), machines)
        assert entry["step_seconds"] == pytest.approx(made.step_seconds, rel=1e-9)
        assert entry["memory_bytes"] == pytest.approx(made.memory_bytes, rel=1e-9)
        assert entry["mfu"] == pytest.approx(made.mfu, rel=1e-9)
        assert made.fits


def test_a_sweep_says_why_layouts_are_not_there(capsys):
    assert run(GRID) == 0
    page = capsys.readouterr().out
    said = answer(GRID, capsys)
    assert f"{said['layouts']:,} layouts, {said['fit']:,} fit" in page
    assert said["too_large"] == 0 and "do not fit" not in page
    for reason, count in said["refused"].items():
        assert f"{count:,} refused: {reason}" in page
    reasons = " ".join(said["refused"])
    assert "tp*pp*cp does not divide 16 devices" in reasons
    assert "the global batch is no multiple of dp times the micro-batch" in reasons


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_a_sweep_is_drawn(name, tmp_path, capsys):
    path = tmp_path / name
    assert run(f"{GRID} --out {path}") == 0
    start = path.read_bytes()[:8]
    assert start == (b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<svg rol")


def test_nothing_fits(capsys):
    line = "sweep --model llama3-405b --cluster h100:1x8 --tp 8 --pp 1 --recompute none"
    assert run(line) == 0
    assert "the smallest needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3 5", "no layout of the grid can be run"),
        ("--out plot.pdf", "a file that ends with .svg or .png"),
        ("--out /none/plot.svg", "/none/plot.svg"),
        ("--cluster x:1x1", "no accelerator 'x'"),
        ("--recompute some", "some"),
    ],
)
def test_a_wrong_sweep_is_refused(options, words, capsys):
    assert run(f"sweep --tp 1 --pp 1 --micro-batch 1 {options}") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert words in said


def test_a_grid_too_large_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sweep_command, "MOST", 10)
    assert run(GRID) == 2
    assert "more than 10 layouts" in capsys.readouterr().err


# ---- validate ----

RUN = {
    "source": "A paper",
    "source_id": "paper",
    "model": "GPT-3 175B",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "vocab": "51200",
    "seq_len": "2048",
    "precision": "fp16",
    "gpu": "A100-SXM-80G",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "tp": "8",
    "pp": "8",
    "dp": "1",
    "micro_batch": "1",
    "global_batch": "64",
    "schedule": "1f1b",
    "recompute": "full",
    "measured_quantity": "step_time_s",
    "value": "30",
    "framework": "Megatron-LM",
    "quality": "A",
}


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_last_line_is_json_of_every_source(tmp_path, capsys):
    rows = [RUN, RUN | {"source_id": "other", "gpu": "Abacus"}, RUN | {"value": "60"}]
    path, out = table(tmp_path / "runs.csv", *rows), tmp_path / "rows.csv"
    assert run(f"validate {path} --out {out}") == 0
    page = capsys.readouterr().out.rstrip("\n").split("\n")
    sources = json.loads(page[-1])["sources"]
    assert set(sources) == {"paper", "other"}
    keys = {"rows", "predicted", "mape", "bias", "p90", "coverage", "tau"}
    assert all(set(s) == keys | {"baseline_mape"} for s in sources.values())
    assert (sources["paper"]["rows"], sources["paper"]["predicted"]) == (2, 2)
    assert (sources["other"]["rows"], sources["other"]["predicted"]) == (1, 0)
    assert any("other: 1 refused: " in line and "Abacus" in line for line in page)
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 3
    assert [bool(row["refused"]) for row in written] == [False, True, False]
    assert float(written[2]["predicted"]) == float(written[0]["predicted"])


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", ["", "?", "-1", "0", "nan", "1e400", "é, x;y"])
def test_a_row_is_predicted_or_refused_whatever_it_says(
    column, value, tmp_path, capsys
):
    path = table(tmp_path / "runs.csv", RUN | {column: value})
    assert run(f"validate {path}") == 0
    page = capsys.readouterr().out
    sources = json.loads(page.rstrip("\n").split("\n")[-1])["sources"]
    (numbers,) = sources.values()
    assert numbers["rows"] == 1
    assert numbers["predicted"] == (0 if "refused" in page else 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("", "has no column model, gpu, measured_quantity, value"),
        ("a,b\n1,2\n", "has no column model"),
        ("model,gpu,measured_quantity,value\n", "has no rows"),
    ],
)
def test_what_is_no_such_table_is_refused(text, words, tmp_path, capsys):
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    assert run(f"validate {path}") == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and words in said.err
    assert said.out == ""


def test_validate_without_a_file_judges_the_book_s_runs(capsys):
    assert run("validate") == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert sum(s["rows"] for s in json.loads(last)["sources"].values()) == 155


def test_validate_does_not_overwrite_its_table(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    row = {"model": "gpt", "gpu": "A100", "measured_quantity": "MFU %", "value": "40"}
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    before = path.read_text()
    assert run(f"validate {path} --out {path}") == 2
    assert "is the table itself" in capsys.readouterr().err
    assert path.read_text() == before


def test_the_best_layout_can_be_asked_for_again(capsys):
    best = answer(GRID, capsys)["best"][0]
    assert run(GRID) == 0
    (line,) = [
        text
        for text in capsys.readouterr().out.splitlines()
        if text.startswith("python -m minitrain simulate")
    ]
    again = answer(line.removeprefix("python -m minitrain "), capsys)
    assert again["step_seconds"] == pytest.approx(best["step_seconds"])
    assert again["memory_bytes"] == pytest.approx(best["memory_bytes"])


@pytest.mark.parametrize(
    "text",
    [
        'accelerator = "h100"\nhosts = inf',
        'accelerator = "h100"\nhosts = 1\ninside = 3',
        'accelerator = "h100"\nhosts = 1\nacross = [1, 2]',
        'hosts = 1\n[accelerator]\nlike = "h100"\nmemory_bytes = "big"',
        "hosts = 1\n[accelerator]\nlike = 5",
        'hosts = 1\n[accelerator]\nlike = "h100"\npeak_flops = 5',
        'hosts = 1\n[accelerator]\nlike = "h100"\npeak_flops = {bf16 = "a"}',
    ],
)
def test_an_odd_cluster_file_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    assert run(f"simulate --cluster {path}") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "ours.toml" in said


def test_a_cluster_like_another_keeps_its_fit(tmp_path, capsys):
    path = tmp_path / "ours.toml"
    like = 'hosts = 8\n[accelerator]\nlike = "h100"\nname = "H100 of ours"'
    path.write_text(like)
    ours = answer(f"simulate --cluster {path}", capsys)
    theirs = answer("simulate --cluster h100:8x8", capsys)
    assert ours["step_seconds"] == theirs["step_seconds"]
    assert ours["interval_seconds"] == theirs["interval_seconds"]


def test_a_page_says_where_nothing_was_fitted(capsys):
    assert run("simulate --cluster a100:8x8") == 0
    assert "no run of megatron-core on A100" in capsys.readouterr().out
    assert run("simulate") == 0
    assert "no run of" not in capsys.readouterr().out
