"""Checkpoints that exist whole or not at all, and from which a run goes on exactly.

    run/latest                       the name of the folder below that counts
    run/step-00000100/about.json     step, model, run state; digests of files and itself
    run/step-00000100/*.safetensors  weights, optimizer state, each rank's own state

All files are written and flushed into a temporary folder, the folder gets its name,
and only then does `latest` move. Killed anywhere in between, the one before counts.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from minitrain.workload.model import Transformer

FORMAT = 1
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, apart from weights and optimizer state.

    Attributes:
        step: optimizer steps done.
        run: what the program saved of itself (JSON values).
        ranks: each rank's own tensors, in rank order.
    """

    step: int
    run: dict[str, Any]
    ranks: list[Tensors]


def save_checkpoint(
    folder: Path,
    step: int,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Tensor]],
    keep: int = 2,
) -> Path:
    """Writes a checkpoint, points `latest` at it and removes all but the last few.

    Checkpoints of later steps, left by a run that then went on from an earlier one, are
    removed too. One process calls this. State that differs between ranks comes in
    `ranks`, one entry for each, and is stored under keys of its own.

    Args:
        folder: the run's folder.
        step: optimizer steps done; names the checkpoint.
        model: its parameters, tied ones once.
        optimizer: over parameters of `model`.
        run: JSON values that the program needs to go on.
        ranks: each rank's own tensors, such as the state of its generator.
        keep: how many checkpoints to leave in `folder`, this one among them.

    Raises:
        OSError: the disk is full or the folder not writable. The previous checkpoint
            still counts, and nothing half-written is left.
    """
    target = folder / f"step-{step:08d}"
    tensors, groups = _optimizer_tensors(model, optimizer)
    rank_tensors = {
        f"{i}/{name}": value
        for i, own in enumerate(ranks)
        for name, value in own.items()
    }
    weights = {name: p.detach() for name, p in model.named_parameters()}
    made = folder / ".step"
    shutil.rmtree(made, ignore_errors=True)  # left by a writer that was killed
    try:
        made.mkdir()
        for name, content in (
            ("model", weights),
            ("optimizer", tensors),
            ("ranks", rank_tensors),
        ):
            _save_tensors(content, made / f"{name}.safetensors")
        about = {
            "format": FORMAT,
            "step": step,
            "model": dataclasses.asdict(model.config),
            "groups": groups,
            "run": dict(run),
            "ranks": len(ranks),
            "files": {p.name: _fingerprint(p) for p in sorted(made.iterdir())},
        }
        about["digest"] = _digest(about)
        (made / "about.json").write_text(json.dumps(about, indent=1))
        for path in (*made.iterdir(), made):
            _flush(path)
        if target.exists():  # left by a run that was resumed from an earlier one
            shutil.rmtree(target)
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _point(folder, target.name)
    _remove_others(target, keep)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run that counts; None if there is none yet.

    Raises:
        ValueError: `latest` cannot be read, or names no checkpoint that is there.
    """
    pointer = folder / "latest"
    try:
        name = pointer.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot read which checkpoint counts: {error}") from error
    there = [path.name for path in _checkpoints(folder)]
    if name not in there:
        raise ValueError(
            f"{pointer} names {name!r}, which is not there; write one of these "
            f"checkpoints into it: {', '.join(there) or 'there is none'}"
        )
    return folder / name


def read_about(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, after length and digest of each file agree.

    Raises:
        ValueError: a file is missing, cut short or changed, or the format is unknown.
    """
    try:
        about = dict(json.loads((path / "about.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, f"has no readable about.json ({error})") from error
    if (found := about.get("format")) != FORMAT:
        raise _damaged(path, f"has format {found}, and this reads {FORMAT}")
    if about.pop("digest", None) != _digest(about):
        raise _damaged(path, "has another about.json than was written")
    for name, (size_bytes, digest) in about["files"].items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"lacks {name}")
        if (held := file.stat().st_size) != size_bytes:
            raise _damaged(path, f"has {held:,} bytes of {size_bytes:,} in {name}")
        if _fingerprint(file)[1] != digest:
            raise _damaged(path, f"has other bytes in {name} than were written")
    return about


def check_model(path: Path, about: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raises ValueError naming every field in which the checkpoint's model differs."""
    saved = about["model"]
    differences = [
        f"{name} {saved.get(name)!r} there, {model.get(name)!r} here"
        for name in sorted(saved.keys() | model.keys())
        if saved.get(name) != model.get(name)
    ]
    if differences:
        raise ValueError(f"{path} is of another model: {'; '.join(differences)}")


def load_checkpoint(
    path: Path, model: Transformer, optimizer: torch.optim.Optimizer
) -> Checkpoint:
    """Reads a checkpoint into `model` and `optimizer`, in place; tied weights stay so.

    Raises:
        ValueError: the checkpoint is damaged, of another model, or of an optimizer with
            other parameter groups. Nothing has been changed then.
    """
    about = read_about(path)
    check_model(path, about, dataclasses.asdict(model.config))
    weights = load_file(path / "model.safetensors")
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        names = ", ".join(sorted(weights.keys() ^ parameters.keys()))
        raise ValueError(
            f"{path} does not hold the same parameters; differing: {names}"
        )
    _load_optimizer(path, about["groups"], model, optimizer)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    ranks: list[Tensors] = [{} for _ in range(about["ranks"])]
    for key, value in load_file(path / "ranks.safetensors").items():
        rank, name = key.split("/", 1)
        ranks[int(rank)][name] = value
    return Checkpoint(about["step"], about["run"], ranks)


def _optimizer_tensors(
    model: Transformer, optimizer: torch.optim.Optimizer
) -> tuple[Tensors, list[dict[str, Any]]]:
    """State by parameter name, and the groups with names in place of parameters."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors = {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    groups = [
        {**group, "params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return tensors, groups


def _load_optimizer(
    path: Path,
    groups: list[dict[str, Any]],
    model: Transformer,
    optimizer: torch.optim.Optimizer,
) -> None:
    _, own = _optimizer_tensors(model, optimizer)
    if [g["params"] for g in groups] != [g["params"] for g in own]:
        raise ValueError(f"{path} is of an optimizer with other parameter groups")
    tensors = load_file(path / "optimizer.safetensors")
    number = {n: i for i, n in enumerate(n for g in groups for n in g["params"])}
    state: dict[int, Tensors] = {}
    for full, value in tensors.items():
        name, key = full.rsplit("/", 1)
        state.setdefault(number[name], {})[key] = value
    numbered = [{**g, "params": [number[n] for n in g["params"]]} for g in groups]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    try:
        save_file(contiguous, path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"cannot write {path.name}: {error}") from error


def _remove_others(newest: Path, keep: int) -> None:
    """Leaves `newest` and the ones before it, `keep` in all."""
    paths = _checkpoints(newest.parent)
    end = paths.index(newest) + 1
    for path in (*paths[: max(0, end - keep)], *paths[end:]):
        shutil.rmtree(path, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first."""
    named = (p for p in folder.iterdir() if re.fullmatch(r"step-\d{8}", p.name))
    return sorted(named)


def _digest(about: Mapping[str, Any]) -> str:
    """Of the values of about.json, however they are laid out."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _point(folder: Path, name: str) -> None:
    _flush(folder)
    pointer = folder / ".latest"
    pointer.write_text(f"{name}\n")
    _flush(pointer)
    pointer.replace(folder / "latest")
    _flush(folder)


def _damaged(path: Path, why: str) -> ValueError:
    others = [p.name for p in _checkpoints(path.parent) if p.name < path.name]
    hint = (
        f"; to go on from {others[-1]}, write that name into latest" if others else ""
    )
    return ValueError(f"{path} is damaged: it {why}{hint}")
