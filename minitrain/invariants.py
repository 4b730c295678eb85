"""What must hold between two steps of a training run, checked on the values."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class InvariantError(RuntimeError):
    """Ranks disagree on what must agree; the message names what, the axis and ranks."""


def check_invariants(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Checks replicas, tied weights, gradients and placements; every rank calls it."""
