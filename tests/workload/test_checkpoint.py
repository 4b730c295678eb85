"""Checkpoints: exact, atomic, and refused when they are torn or of another model."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minitrain.testing import assert_all_close, weights
from minitrain.workload import checkpoint
from minitrain.workload.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_about,
    save_checkpoint,
)
from minitrain.workload.config import ModelConfig
from minitrain.workload.model import Transformer
from minitrain.workload.step import Batch, TokenLoss, accumulate

CONFIG = ModelConfig(
    vocab_size=31, layers=1, hidden=16, heads=4, tie_embeddings=True, max_seq=16
)


def make(
    config: ModelConfig = CONFIG, seed: int = 0
) -> tuple[Transformer, torch.optim.Optimizer]:
    model = Transformer(config, seed=seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(model: Transformer, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        data = torch.randint(31, (2, 9), generator=generator)
        accumulate(model, [Batch.from_sequences(data)], TokenLoss(16))
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, step: int, keep: int = 2, seed: int = 0) -> Path:
    model, optimizer = make(seed=seed)
    train(model, optimizer, 0)
    return save_checkpoint(folder, step, model, optimizer, {"x": step}, [{}], keep)


def test_going_on_is_the_same_as_never_stopping(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    # Each rank has state of its own, and gets its own back.
    own = [{"rng": torch.full((3,), rank, dtype=torch.uint8)} for rank in range(3)]
    run = {"samples": 4, "text": None}
    path = save_checkpoint(tmp_path, 2, model, optimizer, run, own)
    assert latest_checkpoint(tmp_path) == path
    train(model, optimizer, 2, 3)

    other, its_optimizer = make(seed=1)
    read = load_checkpoint(path, other, its_optimizer)
    assert (read.step, read.run) == (2, run)
    assert [r["rng"].tolist() for r in read.ranks] == [[r] * 3 for r in range(3)]
    train(other, its_optimizer, 2, 3)
    assert_all_close(weights(other), weights(model), tol=0.0)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_all_close(its_optimizer.state[q], optimizer.state[p], tol=0.0)
    assert its_optimizer.param_groups[1]["weight_decay"] == 0
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    stored = load_file(path / "model.safetensors")
    assert "embed.tokens.weight" in stored
    assert "head.weight" not in stored
    model, optimizer = make(seed=1)
    load_checkpoint(path, model, optimizer)
    assert model.head is not None
    assert model.embed is not None
    assert model.head.weight is model.embed.tokens.weight


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 10, 200):
        save(tmp_path, step)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["latest", "step-00000010", "step-00000200"]
    # Gone back to step 10 and on from there: step 200 is of another run now.
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000200"
    save(tmp_path, 11)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["latest", "step-00000010", "step-00000011"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000011"
    save(tmp_path, 11, keep=1)
    assert read_about(tmp_path / "step-00000011")["step"] == 11
    assert not (tmp_path / "step-00000010").exists()


def test_a_later_checkpoint_is_no_way_to_go_on(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (tmp_path / "step-00000009").mkdir()
    cut(path / "model.safetensors")
    with pytest.raises(ValueError, match="is damaged") as caught:
        read_about(path)
    assert "step-00000009" not in str(caught.value)


def test_a_killed_writer_is_cleared_up_after_and_folders_are_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fingerprint", lambda _: 1 / 0)
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            save(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 1
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 2)
    finally:
        os.umask(before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", path.name]
    assert path.stat().st_mode & 0o777 == 0o755


def test_a_full_disk_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write model.safetensors: .*No space"):
        save(tmp_path, 1)


@pytest.mark.parametrize("name", ["save_file", "_fingerprint", "_flush", "_point"])
@pytest.mark.parametrize("error", [OSError("No space left on device"), SystemExit])
def test_a_writer_stopped_anywhere_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    before = save(tmp_path, 1)
    calls, real = [], getattr(checkpoint, name)

    def fail(*arguments: object) -> object:
        calls.append(name)
        if len(calls) == (1 if name == "_point" else 3):
            raise error
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, name, fail)
        with pytest.raises((OSError, SystemExit)):
            save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == before
    read_about(before)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".step")]
    save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"


def test_files_are_on_the_disk_before_they_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    real = checkpoint._flush

    def flush(path: Path) -> None:
        if path.name == ".latest":
            assert path.read_text() == "step-00000001\n"
            assert {"model", "optimizer", "ranks", "about"} <= set(flushed)
        flushed.append(path.stem)
        real(path)

    monkeypatch.setattr(checkpoint, "_flush", flush)
    save(tmp_path, 1)
    assert ".latest" in flushed


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def flip_all(path: Path) -> None:
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", cut, r"bytes of [\d,]+ in model.safetensors"),
        ("optimizer.safetensors", flip, "other bytes in optimizer.safetensors"),
        ("ranks.safetensors", Path.unlink, "lacks ranks.safetensors"),
        ("about.json", cut, "no readable about.json"),
        ("about.json", flip_all, "no readable about.json"),
        ("about.json", lambda p: p.write_text("[1]"), "no readable about.json"),
        ("about.json", lambda p: edit(p, files={}), "another about.json than was"),
        ("about.json", lambda p: edit(p, step="2"), "another about.json than was"),
        ("about.json", lambda p: edit(p, format=0), "has format 0, and this reads 1"),
    ],
)
def test_torn_files_are_found(
    tmp_path: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    damage(path / file)
    model, optimizer = make(seed=1)
    before = copy.deepcopy(weights(model))
    with pytest.raises(ValueError, match=message + ".*go on from step-00000001"):
        load_checkpoint(path, model, optimizer)
    assert_all_close(weights(model), before, tol=0.0)
    assert not optimizer.state


def test_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    config = dataclasses.replace(CONFIG, layers=3, norm="layer")
    with pytest.raises(
        ValueError, match="another model: layers 1 there, 3 here; norm 'rms' there"
    ):
        load_checkpoint(path, *make(config))
    model, _ = make()
    with pytest.raises(ValueError, match="other parameter groups"):
        load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "latest").write_text("step-00000007\n")
    with pytest.raises(ValueError, match=r"names 'step-0\w+7', which is not there"):
        latest_checkpoint(tmp_path)


def test_a_pointer_to_nothing_says_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for content in (b"", b"\xff\xfe", b".", b"../step-00000003"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not there; write .*: step-00000003"):
            latest_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(ValueError, match="cannot read which checkpoint counts"):
        latest_checkpoint(tmp_path)
