"""What is trained on what: the options that `simulate` and `sweep` share."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minitrain.simulate.hardware import Cluster, cluster
from minitrain.simulate.plan import Experts, Precision
from minitrain.workload.config import ModelConfig
from minitrain.workload.presets import preset


@dataclass(frozen=True)
class Question:
    """A model, a cluster and a batch."""

    model: str = "llama3-8b"
    """Name of a preset; or a TOML file with the sizes of a model, and of its experts
    under [experts]."""
    cluster: str = "h100:8x8"
    """Accelerator, hosts and accelerators of a host, as h100:2048x8; or a TOML file."""
    seq: int = 0
    """Tokens in a sequence; 0: as many as the model can take."""
    global_batch: int = 1024
    """Sequences in a step, over all devices."""
    precision: Precision = "bf16"
    """Of the operands of matrix products."""
    software: str = "megatron-core"
    """Whose kernels, overlap and buffers: megatron-core, fsdp, minitrain, ..."""
    config: Path | None = None
    """TOML file with any of these options; the command line wins over it."""
    json: bool = False
    """Print one JSON object instead of a page."""


@dataclass(frozen=True)
class Given:
    """The same, read and found to exist."""

    name: str
    model: ModelConfig
    experts: Experts | None
    machines: Cluster
    machines_name: str
    seq: int


def given(asked: Question) -> Given:
    """Reads what a question names.

    Raises:
        ValueError: A name is unknown, or a file cannot be read.
    """
    try:
        machines = cluster(asked.cluster)
    except OSError as error:
        raise ValueError(f"cannot read {asked.cluster}: {error}") from error
    model, experts = read_model(asked.model)
    name = Path(asked.model).stem if asked.model.endswith(".toml") else asked.model
    seq = asked.seq or model.max_seq
    return Given(name, model, experts, machines, asked.cluster, seq)


def read_model(name: str) -> tuple[ModelConfig, Experts | None]:
    """A preset, or the model in a TOML file.

    Raises:
        ValueError: There is none, or its sizes do not fit each other.
    """
    if not name.endswith(".toml"):
        return preset(name), None
    try:
        table = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {name}: {error}") from error
    experts = table.pop("experts", None)
    model = _made(ModelConfig, table, name)
    return model, _made(Experts, experts, f"{name} [experts]") if experts else None


def _made(kind: type, table: dict[str, Any], where: str) -> Any:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {table!r}, and not a table of sizes")
    known = [field.name for field in fields(kind)]
    whole = {f.name for f in fields(kind) if f.type in ("int", int)}
    for name, value in table.items():
        odd = isinstance(value, bool) or not isinstance(value, int)
        if name in whole and odd:
            raise ValueError(f"{where}: {name}={value!r} is not a whole number")
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(
            f"{where}: no {', '.join(unknown)}; there is {', '.join(known)}"
        )
    try:
        return kind(**table)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition(') ')[2]}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
