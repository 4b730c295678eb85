"""The training program: a real model, real text, one process or many.

    python -m minitrain train                        one device
    python -m minitrain train --ranks 4              four processes on this machine
    torchrun --nproc-per-node 8 -m minitrain train   the ranks that torchrun gives

Everything that can be checked without ranks is checked here, by `plan`; each rank then
runs `minitrain.trainer.train`.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minitrain import options, runtime
from minitrain.invariants import InvariantError
from minitrain.progress import say
from minitrain.runtime.launcher import MAX_RANKS
from minitrain.trainer import Job, Metrics, TrainConfig, train
from minitrain.workload.checkpoint import check_model, latest_checkpoint, read_about
from minitrain.workload.config import ModelConfig
from minitrain.workload.costs import parameters
from minitrain.workload.dataset import open_data, prepare
from minitrain.workload.loader import Loader
from minitrain.workload.presets import preset
from minitrain.workload.text import scan

INTERRUPTED = 130  # exit code of a run that was asked to stop, as shells give it
MAX_THREADS = 1024
MAX_SEED = 2**63 - 1


def main(args: list[str]) -> int:
    """Runs `python -m minitrain train`; returns the exit code.

    0: done. 130: stopped by a signal, with a checkpoint. 2: the options or files make
    no sense, and nothing was changed. 1: the run failed.
    """
    with contextlib.ExitStack() as held:
        try:
            config = parse(args)
            planned = _plan_here if config.ranks > 1 else _plan_together
            job = planned(config, held)
        except ValueError as error:
            return _end(error, 2)
        return _run(job)


def _run(job: Job) -> int:
    try:
        with stop_on_signal(job.folder / "stop"):
            metrics = _start(job)
    except KeyboardInterrupt:
        return _end(f"stopped at once; go on: --resume {job.folder}", INTERRUPTED)
    except (OSError, runtime.LaunchError, InvariantError) as error:
        return _end(error, 1)
    if not metrics["stopped"]:
        return 0
    where = f"stopped after step {metrics['step']}, with a checkpoint"
    return _end(f"{where}; go on: --resume {job.folder}", INTERRUPTED)


def _start(job: Job) -> Metrics:
    ranks = job.config.ranks
    if ranks == 1:
        if job.config.threads:
            torch.set_num_threads(job.config.threads)
        return train(job)
    threads = job.config.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    return runtime.launch(train, ranks, job, timeout=600.0, threads=threads)[0]


def _plan_here(config: TrainConfig, held: contextlib.ExitStack) -> Job:
    if dist.is_torchelastic_launched():
        raise ValueError("torchrun has started the ranks already; leave out --ranks")
    return _plan_alone(config, config.ranks, held)


def _plan_together(config: TrainConfig, held: contextlib.ExitStack) -> Job:
    """Plans on rank 0 for all; another host's cache is filled on the way."""
    joined = dist.is_initialized()
    runtime.init()
    if not joined and runtime.world_size() == 1:  # a larger one may wait for others
        held.callback(dist.destroy_process_group)
    made: list[Job | str] = [""]
    if runtime.rank() == 0:
        try:
            made = [_plan_alone(config, runtime.world_size(), held)]
        except ValueError as error:
            made = [str(error)]
    dist.broadcast_object_list(made)
    job = made[0]
    if isinstance(job, str):
        raise ValueError(job)
    if not job.data.is_dir():
        prepare(scan(config.text), job.model.vocab_size, config.cache)
    return job


def _plan_alone(config: TrainConfig, ranks: int, held: contextlib.ExitStack) -> Job:
    """Plans a run whose folder is its own until `held` closes."""
    if config.resume:
        held.enter_context(_lock(config.resume))
    job = plan(config, ranks)
    if not config.resume:
        held.enter_context(_lock(job.folder))
    return job


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keeps a second run out of a folder; the system lets go if its holder dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is at work in {folder}") from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def stop_on_signal(file: Path) -> Iterator[None]:
    """Makes `file` on the first Ctrl-C or SIGTERM; a second Ctrl-C ends at once.

    Under torchrun, which passes on a signal that the terminal has already sent, the
    second one is not a second wish.
    """

    def ask(number: int, _: object) -> None:
        file.touch()
        if not dist.is_torchelastic_launched():
            signal.signal(number, before[signal.Signals(number)])

    file.unlink(missing_ok=True)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        file.unlink(missing_ok=True)


def _end(why: object, code: int) -> int:
    """Says once why the run ends; returns the exit code."""
    if runtime.rank() == 0:
        word = "" if code == INTERRUPTED else "error: "
        print(f"{word}{why}", file=sys.stderr)
    return code


def parse(args: list[str]) -> TrainConfig:
    """The options of a run: the resumed run's, then the file's, then `args`."""
    read = partial(options.parse, TrainConfig, args, prog="minitrain train")
    first, bases = read(), []
    if first.resume:
        saved = _saved_options(first.resume)
        if dist.is_torchelastic_launched():
            saved.pop("ranks", None)  # torchrun has started as many as it was told
        bases.append(saved)
    if first.config:
        bases.append(options.read_toml(first.config))
        for name in bases[-1].keys() & {"config", "help", "resume"}:
            raise ValueError(f"{first.config}: {name} is for the command line only")
    return read(*bases)


def plan(config: TrainConfig, ranks: int) -> Job:
    """Checks a run and prepares its data and folder; nothing is overwritten.

    Raises:
        ValueError: one line that says what does not work, and what would.
    """
    model = preset(config.model)
    seq = config.seq or model.max_seq
    _check(config, model, seq, ranks)
    corpus = scan(config.text)
    say(f"model: {config.model}, {parameters(model):,} parameters")
    skipped = f", {corpus.undecodable} files are not text" * bool(corpus.undecodable)
    names = len(corpus.names)
    say(f"text:  {corpus.root}, {names} documents{skipped}")
    entry = prepare(corpus, model.vocab_size, config.cache)
    data = open_data(entry)
    loader = Loader(data.train, seq, config.seed)
    if (held := len(Loader(data.validation, seq, config.seed))) < ranks:
        raise ValueError(
            f"the validation text holds {held} sequences of {seq} tokens, too few for "
            f"{ranks} ranks; give more text, or a smaller --seq"
        )
    path = latest_checkpoint(config.resume) if config.resume else None
    if path:
        about = read_about(path)
        check_model(path, about, dataclasses.asdict(model))
        _check_data(entry, about["run"])
        loader.load_state_dict(about["run"]["loader"])
        if about["step"] >= config.steps:
            done = f"step {about['step']} of {config.steps}"
            raise ValueError(f"{config.resume} is at {done}; give more --steps")
    folder = config.resume or _new_folder(config)
    tokens = sum(len(shard) for shard in data.train)
    say(f"data:  {tokens:,} tokens to train on, {len(loader):,} sequences of {seq}")
    step = about["step"] if path else "0: no checkpoint counts yet"
    start = f", from step {step}" if config.resume else ""
    say(f"run:   {folder}, {ranks} rank{'s' * (ranks > 1)}{start}")
    bar = sys.stderr.isatty()
    columns = shutil.get_terminal_size().columns
    return Job(config, model, seq, folder, entry, path, bar, columns)


def _check(config: TrainConfig, model: ModelConfig, seq: int, ranks: int) -> None:
    if config.resume and config.out:
        raise ValueError("--resume goes on in the run's own folder; leave out --out")
    if seq > model.max_seq:
        most = f"the most that {config.model} takes, {model.max_seq}"
        raise ValueError(f"--seq {seq} is more than {most}")
    if any("\ud800" <= character <= "\udfff" for character in config.prompt):
        raise ValueError("--prompt holds bytes that are no text")
    _check_numbers(config, ranks)


def _check_numbers(config: TrainConfig, ranks: int) -> None:
    least = dict.fromkeys(("steps", "validate_every", "checkpoint_every", "keep"), 1)
    least |= dict.fromkeys(("batch", "validation_batch"), ranks) | {"ranks": 1}
    least |= dict.fromkeys(("seq", "micro_batch", "warmup", "threads", "seed"), 0)
    least |= dict.fromkeys(("sample_tokens", "weight_decay", "peak_tflops"), 0)
    most = {"ranks": MAX_RANKS, "threads": MAX_THREADS, "seed": MAX_SEED}
    for name, value in dataclasses.asdict(config).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if name in least and not value >= least[name]:  # so that a NaN is refused
            raise ValueError(f"{flag} must be at least {least[name]}")
        if name in most and value > most[name]:
            raise ValueError(f"{flag} must be at most {most[name]}")
        if name in ("lr", "clip") and not value > 0:
            raise ValueError(f"{flag} must be above 0")
        if name in ("lr", "weight_decay", "peak_tflops") and math.isinf(value):
            raise ValueError(f"{flag} must be finite")


def _check_data(entry: Path, run: dict[str, Any]) -> None:
    if run["data"] != entry.name:
        raise ValueError("cannot resume: the run was trained on another text")


def _new_folder(config: TrainConfig) -> Path:
    """Makes the run's folder and writes its options there."""
    saved = {k: v for k, v in dataclasses.asdict(config).items() if v is not None}
    for name in ("out", "resume", "config"):
        saved.pop(name, None)
    saved["cache"] = config.cache.resolve()
    if config.text:
        saved["text"] = config.text.resolve()
    try:
        folder = config.out or _next_folder(config.model)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty; choose another --out, or go on with the run "
                f"in it: --resume {folder}"
            )
        text = json.dumps(saved, indent=1, default=str)
        (folder / "options.json").write_text(text)
    except OSError as error:
        raise ValueError(f"cannot write the run: {error}") from error
    return folder


def _next_folder(model: str) -> Path:
    """Makes the first of runs/MODEL-1, runs/MODEL-2, ... that is not there."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            folder = Path("runs", f"{model}-{number}")
            folder.mkdir(parents=True)
            break
    return folder


def _saved_options(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "options.json").read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} holds no run to go on with ({error})") from error
