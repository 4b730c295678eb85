"""How a run is laid out on a cluster: degrees, schedule, batch, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from minitrain.runtime.layout import Layout
from minitrain.workload import costs
from minitrain.workload.config import ModelConfig

Recompute = Literal["none", "selective", "full"]
"""Nothing; the attention core; each block from its input (arXiv:2205.05198)."""

Precision = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
"""Of the operands of matrix products. `fp8` keeps attention and the head in bf16."""

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "vocab-1",
    "vocab-2",
    "interlaced",
)
"""Pipeline schedules by name; the position is the number that the closed forms read.

`vocab-1` and `vocab-2` spread embedding and head over all stages, in passes of their
own with two barriers or one (arXiv:2411.05288); `interlaced` does it in step with the
others (nnScaler)."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What replaces the MLP of a block in a mixture of experts.

    Attributes:
        count: Experts of a layer.
        top_k: Experts that a token is sent to.
        ffn: Width of an expert.
        shared_ffn: Width of the expert that every token passes; 0 if there is none.
        dense_layers: Blocks that keep their MLP.
        imbalance: Tokens of the busiest expert rank over the mean.
        latent: Elements of attention's matrices over those of plain attention, where
            keys and values pass a latent vector (MLA, arXiv:2405.04434).
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    imbalance: float = 1.0
    latent: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.ffn < 1 or not 1 <= self.top_k <= self.count:
            raise ValueError(
                f"experts={self.count}, top_k={self.top_k}, ffn={self.ffn}: a token"
                " goes to at least one expert, and to no more than there are"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A parallel plan for a training step.

    Attributes:
        dp, tp, pp, cp, ep: Degrees of data, tensor, pipeline, context and expert
            parallelism. Experts are spread over ranks of dp * cp, as in `Layout`.
        seq: Tokens of a sequence.
        micro_batch: Sequences of one forward pass on a rank.
        global_batch: Sequences of a step.
        schedule: One of `SCHEDULES`.
        interleave: Model chunks of a stage (Megatron's virtual stages).
        sequence_parallel: Norms and residuals are split over the tensor ranks.
        zero: Stage of ZeRO (arXiv:1910.02054), 0 to 3.
        shard_ranks: Ranks over which ZeRO shards; 0 for all of dp * cp.
        recompute: See `Recompute`.
        precision: See `Precision`.
        stage_layers: Blocks of each stage; empty for an even split, the first stages
            getting one more.
    """

    seq: int
    global_batch: int
    micro_batch: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    shard_ranks: int = 0
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch", "micro_batch", "interleave", "ep"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: at least 1, please")
        choices = {
            "schedule": SCHEDULES,
            "recompute": get_args(Recompute),
            "precision": get_args(Precision),
            "zero": (0, 1, 2, 3),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                words = ", ".join(map(str, known))
                raise ValueError(f"{name}={value!r}: one of {words}")
        _ = self.layout  # refuses degrees that do not fit each other
        ranks = self.dp * self.cp
        if self.shard_ranks < 0 or (self.shard_ranks and ranks % self.shard_ranks):
            raise ValueError(
                f"shard_ranks={self.shard_ranks} does not divide dp*cp={ranks}"
            )
        if self.interleave > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"interleave={self.interleave} needs schedule='interleaved', not"
                f" {self.schedule!r}"
            )

    @property
    def layout(self) -> Layout:
        """The degrees, as the runtime has them; experts may span tensor ranks too."""
        return Layout(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp)

    @property
    def world_size(self) -> int:
        """Number of devices: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank.

        Raises:
            ValueError: The global batch does not divide.
        """
        return self.layout.check_batch(self.global_batch, self.micro_batch)

    def layers_of_stages(self, layers: int) -> tuple[int, ...]:
        """Blocks of each stage."""
        if self.stage_layers:
            return self.stage_layers
        each, more = divmod(layers, self.pp)
        return tuple(each + (stage < more) for stage in range(self.pp))

    def check(
        self,
        model: ModelConfig,
        devices: int | None = None,
        experts: Experts | None = None,
    ) -> None:
        """Refuses what cannot be run; the message names the numbers.

        Args:
            model: To be trained.
            devices: Of the cluster; not compared if None.
            experts: Of the model, if it has any.

        Raises:
            ValueError: A size does not divide, or the devices are too few or too many.
        """
        if devices is not None and devices != self.world_size:
            raise ValueError(
                f"tp*pp*cp*dp = {self.tp}*{self.pp}*{self.cp}*{self.dp} ="
                f" {self.world_size} devices, and the cluster has {devices}"
            )
        broken = []
        for name, size in (("heads", model.heads), ("ffn", model.ffn)):
            if size % self.tp:
                broken.append(f"tp={self.tp} does not divide {name}={size}")
        kv, tp = model.kv_heads, self.tp
        if kv % tp and tp % kv:
            broken.append(f"tp={tp} and kv_heads={kv} do not divide one another")
        if self.seq % (2 * self.cp if self.cp > 1 else 1):
            broken.append(f"seq={self.seq} is not a multiple of 2*cp={2 * self.cp}")
        if self.sequence_parallel and self.seq % (self.tp * self.cp):
            broken.append(f"tp*cp={self.tp * self.cp} does not divide seq={self.seq}")
        stages = self.layers_of_stages(model.layers)
        wrong = len(stages) != self.pp or sum(stages) != model.layers
        if wrong or min(stages) < 0:
            broken.append(f"stages {stages} do not make pp={self.pp} of {model.layers}")
        if not self.stage_layers and model.layers < self.pp:
            broken.append(f"pp={self.pp} stages of {model.layers} layers")
        if self.interleave > 1 and self.pp == 1:
            broken.append(f"interleave={self.interleave} needs more than one stage")
        if self.interleave > max(stages, default=1):
            broken.append(
                f"interleave={self.interleave} chunks of {max(stages)} layers"
            )
        if self.ep > 1 and experts is None:
            broken.append(f"ep={self.ep}, and the model has no experts")
        if experts is not None and experts.count % self.ep:
            broken.append(f"ep={self.ep} does not divide experts={experts.count}")
        if self.dp * self.cp * self.tp % self.ep:
            broken.append(
                f"ep={self.ep} does not divide dp*cp*tp={self.dp * self.cp * self.tp}"
            )
        if broken:
            raise ValueError("; ".join(broken))
        _ = self.micro_batches


def balanced_stages(model: ModelConfig, seq: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, with fewer on the last one, which has the head.

    The head counts as so many blocks as it has operations. Of the splits whose slowest
    stage is within 3 % of the best, the one that moves the fewest blocks; what the last
    stage gives up goes to the stages before it (arXiv:2411.05288, section 2).

    Args:
        model: To be split.
        seq: Tokens of a sequence.
        stages: Number of stages.
    """
    if stages == 1:
        return (model.layers,)
    block = costs.forward_flops(model, 1, seq)
    head = 2 * seq * model.hidden * model.vocab_size
    worth = head / ((block - head) / model.layers)
    each = -(-model.layers // stages)
    splits = {}
    for last in range(each, -1, -1):
        low, more = divmod(model.layers - last, stages - 1)
        slowest = max(low + (more > 0), last + worth)
        late = (low,) * (stages - 1 - more) + (low + 1,) * more
        splits[(*late, last)] = slowest
    best = min(splits.values())
    return next(split for split, slowest in splits.items() if slowest <= 1.03 * best)
