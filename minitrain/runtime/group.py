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
    given = os.environ
    if "RANK" in given and "MASTER_ADDR" in given:
        rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
        here = given.get("LOCAL_RANK", rank), given.get("LOCAL_WORLD_SIZE", size)
        join(None, None, rank, size, limit, *map(int, here))
    else:
        join(None, dist.HashStore(), 0, 1, limit)


def join(
    backend: str | None,
    store: dist.Store | None,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    local_rank: int | None = None,
    local_world_size: int | None = None,
) -> None:
    """Make the default group, and the default timeout of all groups made later.

    Args:
        backend: ``"gloo"``, ``"nccl"``, or None to choose by the GPUs there are.
        store: Where the ranks find each other; None under torchrun.
        local_rank: The rank's number on its host, if there are several hosts.
        local_world_size: The number of ranks on this host, likewise.
    """
    local_rank = rank if local_rank is None else local_rank
    local_world_size = local_world_size or world_size
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend is None:
        backend = "nccl" if gpus >= local_world_size else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
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


def simulated() -> bool:
    """Whether the other ranks of this process's group are not really there."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def rank() -> int:
    """This process's global rank; 0 where there is no group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 where there is no group."""
    return dist.get_world_size() if dist.is_initialized() else 1
