"""The process group of this rank: joined under torchrun, in a launch, or alone.

What differs between gloo and NCCL is here and nowhere else.
"""

import datetime
import os

import torch
import torch.distributed as dist


def init(timeout: float = 600.0) -> None:
    """Join the process group that this process was started for.

    Inside :func:`minitrain.launch` the group exists already, and nothing happens.
    Under ``torchrun`` the group of all its ranks is joined: with NCCL where each
    rank of this host has a GPU of its own, else with gloo. A process started by
    neither becomes a world of one, so that the same program runs everywhere.

    Args:
        timeout: Longest wait for one message, in seconds.
    """
    if dist.is_initialized():
        return
    limit = datetime.timedelta(seconds=timeout)
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        join(None, None, int(os.environ["RANK"]), _world(), limit, local)
    else:
        join(None, dist.HashStore(), 0, 1, limit)


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])


def join(
    backend: str | None,
    store: dist.Store | None,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    local_world_size: int | None = None,
) -> None:
    """Make the default group, and the default timeout of all groups made later.

    Args:
        backend: ``"gloo"``, ``"nccl"``, or None to choose by the GPUs there are.
        store: Where the ranks find each other; None under torchrun.
        local_world_size: Ranks on this host, if not all of them.
    """
    local_world_size = local_world_size or world_size
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend is None:
        backend = "nccl" if gpus >= local_world_size else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    elif world_size == local_world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    where = {"init_method": "env://"} if store is None else {"store": store}
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, timeout=timeout, **where
    )
    # Groups made later, by a mesh for example, otherwise wait for half an hour.
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


def _loopback() -> str:
    return "lo" if os.uname().sysname == "Linux" else "lo0"


def device() -> torch.device:
    """The device of this rank: its GPU under NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank() -> int:
    """This process's global rank; 0 where there is no group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 where there is no group."""
    return dist.get_world_size() if dist.is_initialized() else 1
