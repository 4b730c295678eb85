"""One rank of a training run: its model, its share of the data, and its steps."""

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitrain import runtime
from minitrain.invariants import check_invariants
from minitrain.parallel.data import ddp
from minitrain.progress import Log
from minitrain.workload.checkpoint import load_checkpoint, save_checkpoint
from minitrain.workload.config import ModelConfig
from minitrain.workload.costs import mfu
from minitrain.workload.dataset import open_data
from minitrain.workload.generate import generate
from minitrain.workload.loader import Loader
from minitrain.workload.model import Transformer
from minitrain.workload.step import (
    Batch,
    TokenLoss,
    accumulate,
    count_tokens,
    finalize_gradients,
)

Metrics = dict[str, Any]


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model on text."""

    model: str = "laptop"
    """Name of a preset."""
    text: Path | None = None
    """Folder of text files. Default: the source of Python's standard library."""
    out: Path | None = None
    """Folder of the run, new or empty. Default: runs/MODEL-N, the next free N."""
    resume: Path | None = None
    """Folder of a run to go on with, from its last checkpoint and with its options."""
    config: Path | None = None
    """TOML file with any of these options; the command line wins over it."""
    ranks: int = 1
    """Processes to start on this machine. Under torchrun leave it out."""
    threads: int = 0
    """CPU threads of each rank; 0: all cores, shared among the ranks."""
    steps: int = 400
    """Optimizer steps."""
    batch: int = 16
    """Sequences in a step, over all ranks."""
    micro_batch: int = 0
    """Most sequences in one forward pass of one rank; 0: the rank's whole share."""
    seq: int = 0
    """Tokens in a sequence; 0: as many as the model can take."""
    lr: float = 5e-3
    """Peak learning rate, after warm-up; falls to a tenth along a cosine."""
    warmup: int = 30
    """Steps over which the learning rate rises."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices; norms and biases are not decayed."""
    clip: float = 1.0
    """Largest norm of the gradients."""
    seed: int = 0
    """Of initial weights and of the order of the data."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of matrix products: float32, or bfloat16 by autocast. Weights are float32."""
    recompute: bool = False
    """Keep only each block's input for backward, and compute the rest again."""
    check: bool = False
    """Verify replicas, tied weights and gradients each step; a fault ends the run."""
    validate_every: int = 100
    """Steps between validations; there is one at the end anyway."""
    validation_batch: int = 32
    """Sequences in a validation, the same ones each time."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is one at the end anyway."""
    keep: int = 2
    """Checkpoints to keep."""
    prompt: str = "def "
    """The generated sample at the end begins with this."""
    sample_tokens: int = 100
    """Length of the sample; 0: none."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of one device, for MFU; 0: of a matrix product, measured first."""
    cache: Path = Path.home() / ".cache" / "minitrain"
    """Folder that keeps vocabularies and tokens between runs."""


@dataclass(frozen=True)
class Job:
    """What every rank needs to know; made by `plan`, once."""

    config: TrainConfig
    model: ModelConfig
    seq: int
    folder: Path
    data: Path
    checkpoint: Path | None
    bar: bool
    columns: int


class Trainer:
    """The four values of a step, and where the run is.

    Args:
        job: what `plan` made; if it has a checkpoint, the run goes on from there.
    """

    def __init__(self, job: Job) -> None:
        runtime.init()
        config = job.config
        self.job, self.config, self.device = job, config, runtime.device()
        self.mesh = runtime.Layout(dp=runtime.world_size()).mesh(self.device.type)
        self.model = Transformer(job.model, self.device, seed=config.seed)
        if config.recompute:
            recompute(self.model)
        if config.precision == "bf16":
            autocast(self.model, self.device, torch.bfloat16)
        ddp(self.model, self.mesh.get_group("dp"))
        self.optimizer = adamw(self.model, config)
        self.data = open_data(job.data)
        where = {"rank": runtime.rank(), "ranks": runtime.world_size()}
        self.loader = Loader(self.data.train, job.seq, config.seed, **where)
        self.validation = Loader(self.data.validation, job.seq, config.seed, **where)
        self.done, self.tokens = 0, 0
        if job.checkpoint:
            self._resume(job.checkpoint)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        peak = config.peak_tflops * 1e12 or measured_peak_flops(self.device, dtype)
        self.peak_flops = self._sum(peak)[0]

    def step(self, stop: bool = False) -> tuple[Metrics, bool]:
        """One optimizer step on the next global batch.

        Args:
            stop: whether this rank wants the run to end.

        Returns:
            The step's figures, and whether any rank wants the run to end; both the
            same on every rank.
        """
        start, job, size = time.perf_counter(), self.job, self.config.batch
        rate = learning_rate(self.config, self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = self._micro_batches(self.loader.next_batch(size))
        tokens = count_tokens(parts, self.mesh)
        loss = accumulate(self.model, parts, TokenLoss(tokens))
        norm = finalize_gradients(self.optimizer, self.mesh, self.config.clip)
        self._check()
        # The norm is the same on every rank, so all of them skip, or none.
        skipped = not math.isfinite(runtime.read(norm, expected=1.0))
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._check()
        loss_sum = runtime.read(loss.sum, expected=0.0)
        loss_sum, stops = self._sum(loss_sum, float(stop))
        seconds = time.perf_counter() - start
        self.done += 1
        self.tokens += tokens
        metrics = {
            "step": self.done,
            "loss": loss_sum / max(tokens, 1),
            "gradient_norm": runtime.read(norm, expected=1.0),
            "learning_rate": rate,
            "tokens": self.tokens,
            "skipped": skipped,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": mfu(job.model, size, job.seq, seconds, self.peak_flops),
        }
        return metrics, stops > 0

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token on the first samples of the validation text."""
        self.validation.samples = 0
        size = min(self.config.validation_batch, len(self.validation))
        parts = self._micro_batches(self.validation.next_batch(size))
        loss_fn = TokenLoss(count_tokens(parts, self.mesh))
        losses = [loss_fn(self.model(p.tokens, p.positions), p).sum for p in parts]
        total = self._sum(sum(runtime.read(loss, expected=0.0) for loss in losses))[0]
        return total / loss_fn.divisor

    def save(self) -> None:
        """Writes a checkpoint of all ranks; returns when it counts."""
        own = {"rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        ranks: list[Any] = [None] * runtime.world_size()
        dist.all_gather_object(ranks, own)
        if runtime.rank() == 0:
            run = {
                "tokens": self.tokens,
                "data": self.job.data.name,
                "loader": self.loader.state_dict(),
            }
            folder, keep = self.job.folder, self.config.keep
            save_checkpoint(
                folder, self.done, self.model, self.optimizer, run, ranks, keep
            )
        dist.barrier()

    def _resume(self, path: Path) -> None:
        read = load_checkpoint(path, self.model, self.optimizer)
        # A checkpoint brings back its own decay; this run may have been given another.
        self.optimizer.param_groups[0]["weight_decay"] = self.config.weight_decay
        self.done, self.tokens = read.step, read.run["tokens"]
        self.loader.load_state_dict(read.run["loader"])
        # A rank's generator means something only among as many ranks as before.
        if len(read.ranks) == runtime.world_size():
            own = read.ranks[runtime.rank()]
            torch.set_rng_state(own["rng"])
            if self.device.type == "cuda" and "cuda_rng" in own:
                torch.cuda.set_rng_state(own["cuda_rng"], self.device)

    def _check(self) -> None:
        if self.config.check:
            check_invariants(self.model, self.mesh, self.optimizer)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        sequences = len(batch.tokens)
        limit = self.config.micro_batch or sequences
        return batch.to(self.device).split(math.ceil(sequences / limit))

    def _sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        ranks = runtime.world_size()
        return [
            runtime.read(one, expected=ranks * value)
            for one, value in zip(total, values, strict=True)
        ]


def train(job: Job) -> Metrics:
    """Runs the job in this rank, to its last step or until it is asked to stop.

    It is asked by a file called `stop` in the run's folder: rank 0 looks for it, and
    all ranks end after the same step, with a checkpoint.

    Returns:
        The figures of the last step, with `stopped` and, unless it was, the
        `validation_loss`, and a `sample` if that loss is a number.
    """
    config, trainer = job.config, Trainer(job)
    log = Log(job.folder, config.steps, trainer.done, job.bar, job.columns)
    how = "as given" if config.peak_tflops else "measured by a matrix product"
    log.say(f"peak:  {trainer.peak_flops / 1e12:.3g} TFLOP/s in all, {how}")
    metrics, stop = Metrics(step=trainer.done), False
    saved = trainer.done if job.checkpoint else None
    while trainer.done < config.steps and not stop:
        asked = runtime.rank() == 0 and (job.folder / "stop").exists()
        metrics, stop = trainer.step(asked)
        log.step(metrics)
        if trainer.done % config.checkpoint_every == 0:
            trainer.save()
            saved = trainer.done
        if trainer.done % config.validate_every == 0 and trainer.done < config.steps:
            log.validation(trainer.done, trainer.validate())
    if saved != trainer.done:
        trainer.save()
    metrics["stopped"] = stop and trainer.done < config.steps
    if not metrics["stopped"]:
        metrics["validation_loss"] = loss = trainer.validate()
        log.validation(trainer.done, loss)
        if config.sample_tokens and runtime.rank() == 0 and math.isfinite(loss):
            metrics["sample"] = generate(
                trainer.model,
                trainer.data.tokenizer,
                config.prompt,
                config.sample_tokens,
                job.seq,
                seed=config.seed,
            )
            log.say(f"sample:\n{metrics['sample']}")
    log.close()
    return metrics


# ------------------------------------------------------------------ plain techniques


def recompute(model: Transformer) -> Transformer:
    """Keeps each block's input alone; backward computes the block again (torch's)."""
    for block in filter(None, model.blocks):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Runs the forward's matrix products in `dtype`."""
    model.forward = torch.autocast(device.type, dtype)(model.forward)
    return model


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    decay = config.weight_decay
    return torch.optim.AdamW(groups, config.lr, (0.9, 0.95), weight_decay=decay)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak; `step` counts from 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


# ------------------------------------------------------------------ speed


def measured_peak_flops(
    device: torch.device, dtype: torch.dtype, size: int = 1024
) -> float:
    """FLOP/s of a square matrix product here and now, the best of five."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        runtime.read((a @ a)[0, 0], expected=size)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
