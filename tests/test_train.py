"""The training program, run as a user runs it: the same numbers however it is cut."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minitrain import launch
from minitrain.invariants import InvariantError
from minitrain.testing import assert_close
from minitrain.train import parse, plan
from minitrain.trainer import TrainConfig, Trainer, learning_rate, train
from minitrain.workload.checkpoint import latest_checkpoint, read_about
from minitrain.workload.step import placement

WORDS = "the quick brown fox jumps over the lazy dog while it rains on the plain "
TIMES = {"seconds", "tokens_per_second", "mfu"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    for i in range(30):
        words = WORDS.split()
        lines = [" ".join(words[j % 7 :: i % 3 + 1]) for j in range(40)]
        (root / f"{i:02d}.txt").write_text(f"chapter {i}\n" + "\n".join(lines))
    return root


@pytest.fixture
def options(text: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of seconds: the tiny model, uneven micro-batches, odd batch sizes."""
    cache = text.parent / "cache"
    fixed = {"model": "tiny", "text": text, "cache": cache, "seq": 24, "threads": 1}
    more = {"batch": 7, "micro_batch": 2, "steps": 6, "warmup": 2, "sample_tokens": 4}
    every = {"checkpoint_every": 3, "validate_every": 4, "peak_tflops": 1.0}
    return {**fixed, **more, **every, "out": tmp_path / "run"}


def command(options: dict[str, Any], *more: str) -> list[str]:
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
    return [sys.executable, "-m", "minitrain", "train", *flags, *more]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def figures(folder: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on the clock."""
    return [{k: v for k, v in m.items() if k not in TIMES} for m in metrics(folder)]


def in_ranks(options: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Runs in processes that torch imported already; the program without its shell."""
    job = plan(TrainConfig(**options), ranks)
    launch(train, ranks, job)
    return metrics(job.folder)


def test_ranks_agree_with_one_process_step_by_step(
    options: dict[str, Any], tmp_path: Path
) -> None:
    one = in_ranks(options, 1)
    assert one[-1]["validation_loss"] < one[0]["loss"]
    for ranks in (2, 4):
        some = in_ranks({**options, "out": tmp_path / str(ranks)}, ranks)
        assert len(some) == len(one) == 6 + 2
        for a, b in zip(some, one, strict=True):
            assert a["step"] == b["step"]
            for name in ("loss", "gradient_norm", "validation_loss"):
                if name in b:
                    assert a[name] == pytest.approx(b[name], rel=1e-4)
            assert a.get("tokens") == b.get("tokens")


def test_the_first_steps_are_those_of_plain_torch(options: dict[str, Any]) -> None:
    """Oracle: one forward of the whole batch, torch's mean, AdamW and clipping."""
    config = TrainConfig(**{**options, "steps": 3, "clip": 0.5})

    def oracle_and_ours() -> tuple[list[float], list[float]]:
        ours, oracle = Trainer(job), Trainer(job)
        a, b = [], []
        for step in range(3):
            a.append(ours.step()[0]["loss"])
            batch = oracle.loader.next_batch(config.batch)
            logits = oracle.model(batch.tokens, batch.positions).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.5)
            for group in oracle.optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            oracle.optimizer.step()
            oracle.optimizer.zero_grad()
            b.append(loss.item())
        return a, b

    job = plan(config, 1)
    ours, oracle = launch(oracle_and_ours, 1)[0]
    assert_close(torch.tensor(ours), torch.tensor(oracle))


def test_replicas_stay_equal_and_their_gradients_are_complete(
    options: dict[str, Any],
) -> None:
    job = plan(TrainConfig(**options), 3)

    def replicas() -> tuple[torch.Tensor, bool]:
        trainer = Trainer(job)
        trainer.step()
        partial = [placement(p).partial for p in trainer.model.parameters()]
        return trainer.model.blocks[0].mlp.up.weight.detach(), not any(partial)

    for weight, complete in (replicas_of := launch(replicas, 3)):
        assert_close(weight, replicas_of[0][0], tol=0.0)
        assert complete


def test_check_changes_no_figure(options: dict[str, Any], tmp_path: Path) -> None:
    plain = in_ranks({**options, "steps": 3}, 2)
    checked = {**options, "steps": 3, "out": tmp_path / "checked", "check": True}
    for a, b in zip(in_ranks(checked, 2), plain, strict=True):
        assert a.get("loss") == b.get("loss")


@pytest.mark.parametrize("ranks", [1, 3])
def test_check_names_what_is_broken(options: dict[str, Any], ranks: int) -> None:
    job = plan(TrainConfig(**options, check=True), ranks)

    def broken() -> list[str]:
        trainer, said = Trainer(job), []
        trainer.step()
        weight = trainer.model.blocks[0].mlp.up.weight
        last = torch.distributed.get_rank() == ranks - 1

        def attempt() -> None:
            with pytest.raises(InvariantError) as caught:
                trainer.step()
            said.append(str(caught.value))
            trainer.optimizer.zero_grad()

        hook = weight.register_hook(lambda grad: grad * math.nan if last else grad)
        attempt()
        hook.remove()
        if ranks > 1:
            step = trainer.optimizer.step
            trainer.optimizer.step = lambda: (step(), weight.data.add_(last * 1e-6))
            attempt()
        return said

    for said in launch(broken, ranks):
        assert "blocks.0.mlp.up.weight" in said[0]
        assert "not finite" in said[0]
        if ranks > 1:
            assert "blocks.0.mlp.up.weight" in said[1]
            assert "dp" in said[1]
            assert "ranks 0, 1 | 2" in said[1]


def test_a_failed_check_ends_the_run_in_words(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    from minitrain.train import main

    diverging = {**options, "lr": 1e15, "warmup": 0}
    assert main([*command(diverging)[4:], "--check"]) == 1
    said = capfd.readouterr().err
    assert "error: the ranks do not hold one model" in said
    assert "Traceback" not in said


def test_decay_and_schedule(options: dict[str, Any]) -> None:
    config = TrainConfig(warmup=4, steps=104, lr=1.0)
    rates = [learning_rate(config, step) for step in range(104)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    job = plan(TrainConfig(**options), 1)

    def groups() -> list[tuple[float, set[int]]]:
        made = Trainer(job).optimizer.param_groups
        return [(g["weight_decay"], {p.ndim for p in g["params"]}) for g in made]

    assert launch(groups, 1)[0] == [(0.1, {2}), (0.0, {1})]


@pytest.mark.parametrize("change", [{"recompute": True}, {"precision": "bf16"}])
def test_recompute_changes_no_bit_and_bf16_little(
    options: dict[str, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    plain = in_ranks({**options, "steps": 3}, 2)
    other = in_ranks({**options, "steps": 3, "out": tmp_path / "o", **change}, 2)
    for a, b in zip(other, plain, strict=True):
        if "loss" in b and "recompute" in change:
            assert (a["loss"], a["gradient_norm"]) == (b["loss"], b["gradient_norm"])
        elif "loss" in b:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)
            assert a["loss"] != b["loss"]


def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    options: dict[str, Any],
) -> None:
    job = plan(TrainConfig(**options), 2)

    def poisoned() -> tuple[bool, bool, bool]:
        trainer = Trainer(job)
        weight = trainer.model.blocks[0].mlp.up.weight
        if torch.distributed.get_rank() == 1:
            hook = weight.register_hook(lambda grad: grad * math.inf)
        before = weight.detach().clone()
        skipped = trainer.step()[0]["skipped"]
        same = torch.equal(weight, before)
        if torch.distributed.get_rank() == 1:
            hook.remove()
        return skipped, same, trainer.step()[0]["skipped"]

    assert launch(poisoned, 2) == [(True, True, False)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_9_and_resume_is_the_same_run(
    options: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    # In warm-up the rate does not depend on how many steps there will be.
    options, folder = {**options, "warmup": 10**6, "lr": 1000.0}, options["out"]
    endless = command({**options, "ranks": ranks, "steps": 10**6})
    with subprocess.Popen(endless, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: (folder / "latest").exists())
        process.kill()
    wait_until_still(folder / "metrics.jsonl")
    done = read_about(latest_checkpoint(folder))["step"]
    # Steps that no checkpoint holds, and half a line: what a killed writer may leave.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {done + 1}, "loss": 0.0}}\n{{"step": 39, "lo')
    options = {**options, "steps": done + 5}
    again = {**options, "resume": folder, "out": None}
    whole = {**options, "out": tmp_path / "whole"}
    in_ranks(again, ranks)
    in_ranks(whole, ranks)
    assert figures(folder) == figures(whole["out"])
    assert weights_of(folder) == weights_of(whole["out"])


def wait_until_still(path: Path) -> None:
    """The ranks of a killed launch end a moment after it."""
    size = -1
    while size != path.stat().st_size:
        size = path.stat().st_size
        time.sleep(0.3)


def weights_of(folder: Path) -> list[Any]:
    files = read_about(latest_checkpoint(folder))["files"]
    return [files["model.safetensors"], files["optimizer.safetensors"]]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_resume_on_another_number_of_ranks(
    options: dict[str, Any], tmp_path: Path
) -> None:
    one = in_ranks(options, 1)
    in_ranks({**options, "steps": 3, "out": tmp_path / "cut"}, 2)
    again = parse([f"--resume={tmp_path / 'cut'}", "--steps=6", "--weight-decay=0.5"])
    # The schedule is of another length; the data is what must go on.
    launch(train, 3, plan(again, 3))
    tokens = [m["tokens"] for m in metrics(tmp_path / "cut") if "tokens" in m]
    assert tokens == [m["tokens"] for m in one if "tokens" in m]
    about = read_about(latest_checkpoint(tmp_path / "cut"))
    assert about["run"]["loader"]["samples"] == 42
    assert [group["weight_decay"] for group in about["groups"]] == [0.5, 0.0]


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (3, signal.SIGINT)])
def test_a_signal_ends_the_run_with_a_checkpoint(
    options: dict[str, Any], ranks: int, number: signal.Signals
) -> None:
    options = {**options, "ranks": ranks, "steps": 100_000, "checkpoint_every": 10**6}
    with subprocess.Popen(
        command(options),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        folder = options["out"]
        log = folder / "metrics.jsonl"
        wait_for(lambda: log.exists() and len(log.read_bytes().splitlines()) > 3)
        os.killpg(process.pid, number)  # as a terminal does: to all that is in it
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=60) == 130
    step = metrics(folder)[-1]["step"]
    assert f"stopped after step {step}, with a checkpoint" in said
    assert "Traceback" not in said
    assert read_about(latest_checkpoint(folder))["step"] == step
    assert not (folder / "stop").exists()


def test_under_torchrun(options: dict[str, Any], tmp_path: Path) -> None:
    expected = in_ranks({**options, "steps": 2, "out": tmp_path / "one"}, 1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    rest = command({**options, "steps": 2})[1:]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", *rest],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = [m["loss"] for m in metrics(options["out"]) if "loss" in m]
    assert losses == pytest.approx([m["loss"] for m in expected if "loss" in m])


def test_a_run_that_diverges_ends_without_a_sample(options: dict[str, Any]) -> None:
    job = plan(TrainConfig(**{**options, "lr": 1e15, "warmup": 0, "steps": 3}), 1)
    last = launch(train, 1, job)[0]
    assert not math.isfinite(last["validation_loss"])
    assert "sample" not in last
    assert metrics(job.folder)[-1] == {"step": 3, "validation_loss": None}


def test_a_file_gives_options_and_the_command_line_wins(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "gpt2"\nsteps = 7\nrecompute = true\nlr = 1e-4\n')
    config = parse(["--steps=9", f"--config={file}"])
    got = (config.model, config.steps, config.recompute, config.lr)
    assert got == ("gpt2", 9, True, 1e-4)
    job = plan(TrainConfig(**{**options, "recompute": True}), 1)
    again = parse([f"--resume={job.folder}", "--batch=3"])
    assert (again.batch, again.recompute, again.seq) == (3, True, 24)
    assert "from step" not in capsys.readouterr().out
    plan(again, 1)
    assert "from step 0: no checkpoint counts yet" in capsys.readouterr().out
    file.write_text('prompt = "--x"\nwarmup = 0\n')
    assert parse([f"--config={file}"]).prompt == "--x"


def given(flag: str, name: str, content: bytes = b"") -> Callable[[Path], str]:
    """Makes a file in a folder, and an option that has to do with it."""

    def make(folder: Path) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return flag.format(folder)

    return make


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("--model=gpt5", "no model is called 'gpt5'; there is"),
        ("--stepz", "Unrecognized options: --stepz; perhaps you meant: --steps"),
        ("--steps=many", "invalid literal for int"),
        ("--precision=fp8", "invalid choice 'fp8'"),
        ("--steps=0", "--steps 0 must be at least 1"),
        ("--batch=0", "--batch 0 must be at least 1"),
        ("--micro-batch=-1", "--micro-batch -1 must be at least 0"),
        ("--lr=0", "--lr 0.0 must be above 0"),
        ("--lr=inf", "--lr inf must be finite"),
        ("--weight-decay=-0.1", "--weight-decay -0.1 must be at least 0"),
        ("--weight-decay=inf", "--weight-decay inf must be finite"),
        ("--peak-tflops=nan", "--peak-tflops nan must be at least 0"),
        ("--seed=9223372036854775808", "must be at most 9223372036854775807"),
        ("--threads=99999999999", "must be at most 1024"),
        ("--ranks=300", "--ranks 300 must be at most 256"),
        ("--prompt=\udcff", "--prompt holds bytes that are no text"),
        ("--seq=129", "--seq 129 is more than the most that tiny takes, 128"),
        ("--text=/nowhere/at/all", "is not a folder"),
        ("--resume=/nowhere/at/all", "holds no run to go on with"),
        ("--config=/nowhere.toml", "cannot read /nowhere.toml"),
        (given("--config={}/a", "a", b"resume = 1"), "for the command line only"),
        (given("--resume={}", "options.json", b"1"), "holds no run to go on with"),
        (given("--config={}/a", "a", b"stepz = 4"), "Unrecognized options: --stepz"),
        (given("--text={}/e", "e/.hidden"), "no text in"),
        (given("--text={}/e", "e/bytes", b"\xff\xfe"), "1 files are not UTF-8"),
        (given("--out={}", "precious"), "is not empty; choose another --out, or go on"),
        (given("--out={}/a/run", "a"), "cannot write the run"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    options: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    bad: str | Callable[[Path], str],
    message: str,
) -> None:
    from minitrain.__main__ import main

    flag = bad if isinstance(bad, str) else bad(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*"))
    keep = {k: v for k, v in options.items() if not flag.startswith(f"--{k}=")}
    if "resume" in flag:
        keep.pop("out")
    assert main(["train", *command(keep)[4:], flag]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    assert message in said
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_every_rank_needs_validation_text(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"holds \d sequences of 128 tokens, too few"):
        plan(TrainConfig(**{**options, "seq": 128, "batch": 30}), 30)
    assert not options["out"].exists()


def test_what_cannot_be_resumed_is_one_line(
    options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from minitrain.train import main

    in_ranks({**options, "steps": 2}, 1)
    folder = options["out"]
    path = latest_checkpoint(folder)
    content = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text(WORDS * 99)
    for flags, message in (
        ([], "is at step 2 of 2; give more --steps"),
        (["--model=laptop"], "another model: ffn 192 there, 384 here; "),
        ([f"--text={other}", "--steps=9"], "trained on another text"),
        (["--seq=12", "--steps=9"], "cannot resume the data: epoch_samples was"),
        (["--out=elsewhere"], "leave out --out"),
    ):
        assert main([f"--resume={folder}", *flags]) == 2
        said = capfd.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main([f"--resume={folder}", "--steps=9"]) == 2
    assert "is damaged" in capfd.readouterr().err
    weights.write_bytes(content[weights])
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main([f"--resume={folder}", "--steps=9"]) == 2
    assert "another run is at work in" in capfd.readouterr().err
    os.close(handle)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == content


def test_runs_without_a_name_get_folders_of_their_own(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options.pop("out")
    folders = [plan(TrainConfig(**options), 1).folder for _ in range(2)]
    assert folders == [Path("runs/tiny-1"), Path("runs/tiny-2")]
    with pytest.MonkeyPatch.context() as patch:  # another one was quicker
        patch.setattr(Path, "exists", lambda _: False)
        assert plan(TrainConfig(**options), 1).folder == Path("runs/tiny-3")


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    from minitrain import train as program
    from minitrain.workload import checkpoint

    saved = []

    def full(*arguments: Any) -> None:
        saved.append(arguments)
        if len(saved) > 3:
            raise OSError(28, "No space left on device")
        real(*arguments)

    real = checkpoint.save_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        assert program.main(command(options)[4:]) == 1
    assert not torch.distributed.is_initialized()  # what main made is gone
    assert "error: [Errno 28] No space left" in capfd.readouterr().err
    assert read_about(latest_checkpoint(options["out"]))["step"] == 3
