"""Rows of published training runs, read into a model, a plan and a cluster.

A row names its columns as `COLUMNS`. What it does not say is completed by the rules of
the framework that it names, each of which is listed in the row's `assumed`; where no
rule holds, the row is refused with a reason. Nothing is guessed silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from minitrain.simulate.hardware import Cluster, Link, accelerator, cluster
from minitrain.simulate.names import (
    ACTIVATIONS,
    FRAMEWORKS,
    MEASURED,
    PRECISION_WORDS,
    QUANTITIES,
    ROTARY,
    SCHEDULE_WORDS,
    SHARED,
    UNLIKE,
    device_name,
    network_bytes_per_second,
)
from minitrain.simulate.plan import (
    Experts,
    Plan,
    Precision,
    Recompute,
    balanced_stages,
)
from minitrain.simulate.software import Software
from minitrain.workload.config import ModelConfig

Row = Mapping[str, str]

MOST = 10**9
"""No field counts more things than that."""
DEEPEST = 10_000
"""No model has more layers."""


class RefusedError(ValueError):
    """A row that cannot be predicted; the message says why."""


@dataclass
class Run:
    """A published run.

    Attributes:
        source: Its `source_id`.
        fabric: Kind of its network, where that has shares of its own.
        model, experts, plan, cluster, software: As `estimate` takes them. The plan's
            micro-batch and interleaving may be open: see `choices`.
        quantity, value: What was measured.
        flops_count: What the source counts as the operations of a step.
        choices: Plans among which the source took the fastest, where it says so.
        assumed: What the row did not say, and the rule that completed it.
    """

    source: str
    model: ModelConfig
    experts: Experts | None
    plan: Plan
    cluster: Cluster
    software: str | Software
    quantity: str
    value: float
    fabric: str = ""
    flops_count: str = "model"
    choices: list[Plan] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)


def read_run(row: Row) -> Run:
    """Read one row.

    Raises:
        RefusedError: A field that no rule completes, or that contradicts another.
    """
    try:
        return _read(_Reader(row))
    except ValueError as error:
        raise RefusedError(str(error)) from None


def source_of(row: Row) -> str:
    """Short name of a row's source."""
    return str(row.get("source_id") or row.get("source") or "unknown").strip()


def _read(reader: _Reader) -> Run:
    if reader.text("quality") == "D":
        raise RefusedError("quality D: the source contradicts itself")
    for word, reason in UNLIKE.items():
        if word in f"{reader.text('model')} {reader.text('framework')}".lower():
            raise RefusedError(reason)
    quantity = reader.quantity()
    software = reader.software()
    model, experts = reader.model(), reader.experts()
    machines = reader.cluster()
    plans = reader.plans(model, experts, machines, software)
    return Run(
        source=source_of(reader.row),
        model=model,
        experts=experts,
        plan=plans[0],
        cluster=machines,
        software=software,
        quantity=quantity,
        value=reader.value(),
        fabric=reader.fabric(),
        flops_count=reader.flops_count(quantity, software),
        choices=plans[1:] and plans,
        assumed=reader.assumed,
    )


class _Reader:
    """A row, its fields, and what was assumed on the way."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        return str(self.row.get(name) or "").strip()

    def number(self, name: str, default: float | None = None, rule: str = "") -> float:
        """A number, or what a rule says where the field is empty."""
        if text := self.text(name):
            try:
                if math.isfinite(value := float(text.replace(",", ""))):
                    return value
            except ValueError:
                pass
            raise RefusedError(f"{name}={text!r} is not a number")
        if default is None:
            raise RefusedError(f"{name} is not given")
        if rule:
            self.assumed.append(f"{name}={default:g}: {rule}")
        return default

    def whole(
        self, name: str, default: int | None = None, rule: str = "", least: int = 0
    ) -> int:
        """A number of things: at least so many, and not more than `MOST`."""
        value = self.number(name, default, rule)
        if value != int(value) or not least <= value <= MOST:
            raise RefusedError(f"{name}={value:g} is no number of things in a run")
        return int(value)

    # ---- what was measured, by what

    def value(self) -> float:
        if not 1e-15 < (value := self.number("value")) < 1e15:
            raise RefusedError(f"value={value:g} cannot have been measured")
        if self.quantity() in ("mfu_percent", "hfu_percent") and value < 1:
            raise RefusedError(f"value={value:g}: utilization in per cent, please")
        return value

    def quantity(self) -> str:
        said = self.text("measured_quantity").lower()
        for word, name in QUANTITIES:
            if word in said:
                return name
        raise RefusedError(f"measured_quantity {said!r} {MEASURED}")

    def software(self) -> str:
        said = self.text("framework").lower()
        for word, name in FRAMEWORKS:
            if word in said:
                return self.version(name)
        if not said:
            raise RefusedError("framework is not given")
        raise RefusedError(f"no rules for the framework {self.text('framework')!r}")

    def version(self, name: str) -> str:
        """Megatron-LM of the year of the source, where its arXiv number says one."""
        paper = re.search(r"arXiv[ :]*(\d\d)\d\d\.\d+", self.text("source"))
        if name == "megatron-lm" and paper and int(paper[1]) < 22:
            self.assumed.append("Megatron-LM as it was in 2021")
            return "megatron-2021"
        said = f"{self.text('framework')} {self.text('source')}"
        graphs = "cuda graph" in self.text("note").lower()
        if name == "megatron-core" and (graphs or self.captures(said)):
            self.assumed.append("CUDA graphs: layers are launched as a whole")
            return "megatron-core-graphs"
        if name == "megatron-core" and re.search(r"\b(0\.\d|24\.\d\d)\b", said):
            self.assumed.append("Megatron-Core of 2024, before FlashAttention-3")
            return "megatron-core-2024"
        return name

    def captures(self, said: str) -> bool:
        """Megatron-Bridge's recipes for NVL72 racks capture layers in CUDA graphs."""
        device = self.text("gpu").lower()
        return "bridge" in said.lower() and device.startswith(("gb200", "gb300"))

    def flops_count(self, quantity: str, software: str) -> str:
        """Whether a source's FLOP/s count recomputation; its note says, or a rule."""
        note = (self.text("note") + self.text("measured_quantity")).lower()
        if "meta internal" in self.text("framework").lower():
            self.assumed.append("attention counted where the mask lets it")
            return "causal"
        hfu = "hfu" in note.split("mfu")[0][:60] and quantity != "mfu_percent"
        if "counts recompute" in note or hfu:
            return "hardware"
        if quantity == "tflops" and software in (
            "megatron-lm",
            "megatron-2021",
            "megatron-deepspeed",
            "deepspeed-zero3",
        ):
            self.assumed.append("FLOP/s count recomputation: Megatron-LM's formula")
            return "hardware"
        return "model"

    # ---- the model

    def model(self) -> ModelConfig:
        name = self.text("model").lower()
        layers = self.whole("layers", least=1)
        if layers > DEEPEST:
            raise RefusedError(f"layers={layers}: no model has more than {DEEPEST}")
        hidden = self.whole("hidden", least=1)
        width = 128 if hidden >= 2048 else 64
        guess, rule = max(1, hidden // width), f"{width} columns a head"
        if "deepspeed" in self.text("framework").lower() and hidden > 12288:
            guess, rule = 64, "64 heads, as in the runs beside it"
        heads = self.whole("heads", guess, rule, least=1)
        kv = self.whole("kv_heads", heads, "as many as heads") or heads
        gated = any(word in name for word in ACTIVATIONS)
        ffn = self.whole("ffn_hidden", 4 * hidden, "4 * hidden") or 4 * hidden
        vocab = self.whole("vocab", 50_257, "GPT-2's vocabulary")
        rotary = any(word in name for word in ROTARY)
        head_dim = 0 if hidden % heads == 0 else max(1, hidden // heads)
        for word, width in (("qwen3", 128), ("gpt-oss", 64), ("palm", 256)):
            head_dim = width if word in name else head_dim
        return ModelConfig(
            vocab_size=vocab,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv,
            head_dim=head_dim,
            ffn=ffn,
            max_seq=self.whole("seq_len"),
            norm="rms" if gated else "layer",
            positions="rope" if rotary else "learned",
            activation="swiglu" if gated else "gelu",
            bias=not gated,
            tie_embeddings=not rotary,
            parallel_block="palm" in name,
        )

    def experts(self) -> Experts | None:
        if self.whole("experts", 0) < 2:
            return None
        name = self.text("model").lower()
        shared, dense, latent = next(
            (known for word, known in SHARED.items() if word in name), (0, 0, 1.0)
        )
        dense = 0 if "reduced" in name else dense
        return Experts(
            count=self.whole("experts"),
            top_k=self.whole("topk"),
            ffn=self.whole("moe_ffn", self.whole("ffn_hidden", 0), "the MLP's width"),
            shared_ffn=shared,
            dense_layers=min(dense, self.whole("layers")),
            latent=latent,
        )

    # ---- the machines

    def cluster(self) -> Cluster:
        said = self.text("gpu")
        if not said:
            raise RefusedError("gpu is not given")
        device = accelerator(device_name(said))
        devices = self.whole("n_gpus", least=1)
        usual = min(device.per_host, devices)
        per_host = min(self.whole("gpus_per_node", usual, "usual", 1), devices)
        if devices % per_host:
            raise RefusedError(f"{devices} devices do not fill hosts of {per_host}")
        made = cluster(f"{device.name}:{devices // per_host}x{per_host}")
        network = network_bytes_per_second(self.text("interconnect"), per_host)
        if network:
            made = replace(made, across=Link(made.across.latency_seconds, network))
        else:
            self.assumed.append(f"network: {device.network_bytes_per_second:.3g} B/s")
        if limit := re.search(r"(\d+) ?W\b", f"{said} {self.text('interconnect')}"):
            watts = device.watts or float(limit[1])
            # Clocks follow power with about its square root near the limit.
            share = min(1.0, (float(limit[1]) / watts) ** 0.5)
            made = replace(made, power_derate=share)
        if "hbm2e" in said.lower() and "h100" in said.lower():
            slower = replace(device, memory_bytes_per_second=2.4e12, memory_bytes=96e9)
            made = replace(made, accelerator=slower)
        return made

    def fabric(self) -> str:
        said = self.text("interconnect").lower()
        return "omni-path" if "omni-path" in said else ""

    # ---- the plan

    def plans(
        self,
        model: ModelConfig,
        experts: Experts | None,
        machines: Cluster,
        software: str,
    ) -> list[Plan]:
        """The row's plan, or those among which the source took the best."""
        pp, tp, cp = (self.whole(name, 1, least=1) for name in ("pp", "tp", "cp"))
        if pp > model.layers:
            raise RefusedError(f"pp={pp} stages of {model.layers} layers")
        rest = machines.world_size // (pp * tp * cp)
        dp = self.whole("dp", rest, "what the other degrees leave") or rest
        if pp * tp * cp * dp != machines.world_size:
            raise RefusedError(
                f"tp*pp*cp*dp = {tp}*{pp}*{cp}*{dp} = {tp * pp * cp * dp}, and"
                f" n_gpus={machines.world_size}"
            )
        zero = self.zero(software)
        schedule, chunks = self.schedule(pp)
        common: dict[str, Any] = dict(  # noqa: C408
            seq=self.whole("seq_len"),
            global_batch=self.whole("global_batch"),
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=self.whole("ep", 1, least=1),
            schedule=schedule,
            sequence_parallel=self.text("sequence_parallel").lower().startswith("y")
            and tp > 1,
            zero=zero[0],
            shard_ranks=min(zero[1], dp * cp),
            recompute=self.recompute(software),
            precision=self.precision(),
            stage_layers=self.stage_layers(model, pp, software),
        )
        micro = self.micro_batches_of(dp, pp)
        stage = -(-model.layers // pp)
        divisors = [v for v in range(2, stage + 1) if stage % v == 0]
        chunk_choices = chunks or divisors or [1]
        plans, reasons = [], []
        for b in micro:
            for v in chunk_choices:
                named = "interleaved" if v > 1 else schedule
                named = "1f1b" if v == 1 and named == "interleaved" else named
                try:
                    plan = Plan(
                        micro_batch=b, interleave=v, **common | {"schedule": named}
                    )
                    plan.check(model, machines.world_size, experts)
                    if v > 1 and plan.micro_batches % pp:
                        raise ValueError(f"{plan.micro_batches} micro-batches, pp={pp}")
                    plans.append(plan)
                except ValueError as error:
                    reasons.append(str(error))
        if not plans:
            raise RefusedError(reasons[0])
        if len(plans) > 1:
            self.assumed.append("micro_batch or interleave_v: the fastest that fits")
        return plans

    def micro_batches_of(self, dp: int, pp: int) -> list[int]:
        if self.text("micro_batch"):
            return [self.whole("micro_batch")]
        if pp > 1:
            self.assumed.append("micro_batch=1: as pipelines of many stages are run")
            return [1]
        share = self.whole("global_batch") / dp
        return [b for b in (1, 2, 4, 8, 16) if share % b == 0] or [1]

    def zero(self, software: str) -> tuple[int, int]:
        """Stage, and the ranks of a sharding group (0: all)."""
        text = self.text("zero_stage")
        group = re.search(r"(\d+)-GPU group", text)
        shard = int(group[1]) if group else 0
        if text and not re.match(r"[0-3](?![.\d])", text):
            raise RefusedError(f"zero_stage={text!r} is none of 0, 1, 2 and 3")
        if text.startswith("2") and self.whole("pp", 1) > 1:
            self.assumed.append("zero_stage=1: in a pipeline gradients stay whole")
            return 1, shard
        if text:
            return int(text[0]), shard
        usual = 3 if software.startswith(("fsdp", "deepspeed-zero3")) else 0
        usual = 1 if software.startswith(("megatron-core", "internevo")) else usual
        self.assumed.append(f"zero_stage={usual}: the framework's default")
        return usual, shard

    def schedule(self, pp: int) -> tuple[str, list[int]]:
        """Name, and the numbers of chunks it may have."""
        said = self.text("schedule").lower()
        if pp == 1:
            return "1f1b", [1]
        for word, name in SCHEDULE_WORDS:
            if word in said:
                return name, [1]
        if "interleaved" in said or self.whole("interleave_v", 1) > 1:
            if self.text("interleave_v"):
                return "interleaved", [max(1, self.whole("interleave_v"))]
            if "zb" in self.text("framework").lower():
                stage = -(-self.whole("layers") // pp)
                return "interleaved", [stage]
            return "interleaved", []
        return "1f1b", [1]

    def stage_layers(
        self, model: ModelConfig, pp: int, software: str
    ) -> tuple[int, ...]:
        """Blocks of each stage, where the framework does not split them evenly."""
        layers = model.layers
        if software == "megatron-zb" and pp > 1 and (layers + 2) % pp == 0:
            self.assumed.append("first and last stage have one block less")
            each = (layers + 2) // pp
            return (each - 1, *[each] * (pp - 2), each - 1)
        if "redistributed" in self.text("schedule"):
            return balanced_stages(model, self.whole("seq_len"), pp)
        return ()

    def recompute(self, software: str) -> Recompute:
        said = self.text("recompute").lower()
        for word in get_args(Recompute):
            if said.startswith(word):
                return word
        if said.startswith(("no", "off", "false")):
            return "none"
        if re.search("mlp|att|core|norm|moe|layer|act", said):
            return "selective"
        if said:
            raise RefusedError(f"recompute={said!r} is none of none, selective, full")
        self.assumed.append("recompute=none: nothing is said")
        return "none"

    def precision(self) -> Precision:
        said = self.text("precision").lower()
        for word, name in PRECISION_WORDS:
            if word in said:
                return name
        raise RefusedError(f"precision={said!r} is no format of numbers")
