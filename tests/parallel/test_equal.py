"""Data parallelism equals one device, for all that may be uneven."""

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minitrain.parallel.data import ddp, replicate
from minitrain.testing import PROBLEMS, Problem, check_equal

MakeTechnique = Callable[[nn.Module, DeviceMesh], nn.Module]
EVERY = tuple(PROBLEMS.values())
UNEVEN = [
    PROBLEMS[name]
    for name in ("branches", "no tokens", "micro-batches", "buffers", "gradients kept")
]


def plain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return replicate(model, mesh.get_group("dp"))


def small_buckets(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return ddp(model, mesh.get_group("dp"), bucket_bytes=1000)


def one_bucket(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return ddp(model, mesh.get_group("dp"))


def no_overlap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return ddp(model, mesh.get_group("dp"), bucket_bytes=1000, overlap=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ddp_equals_one_device(ranks: int) -> None:
    check_equal(small_buckets, ranks, EVERY)


@pytest.mark.parametrize("technique", [plain, one_bucket, no_overlap])
def test_other_forms_equal_one_device(technique: MakeTechnique) -> None:
    check_equal(technique, 3, UNEVEN)


def averaged(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides by the ranks what was divided by their tokens already."""

    def mean(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
        return dist.all_reduce(buffer, dist.ReduceOp.AVG, group, async_op=True)

    return ddp(model, mesh.get_group("dp"), all_reduce=mean)


def every_micro_batch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sums in every backward what the last one has summed already."""
    ddp(model, mesh.get_group("dp"))
    synchronize = model.set_requires_gradient_sync
    model.set_requires_gradient_sync = lambda flag: synchronize(True)
    return model


def never(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    ddp(model, mesh.get_group("dp"))
    model.set_requires_gradient_sync(False)
    del model.set_requires_gradient_sync
    return model


def marked_too(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Leaves the axis in the placements, so that the sum is summed again."""
    return replicate(ddp(model, mesh.get_group("dp")), mesh.get_group("dp"))


def unwaited(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Goes on with what a bucket held before its message arrived."""

    class Later:
        def wait(self) -> None: ...

    return ddp(model, mesh.get_group("dp"), all_reduce=lambda buffer, group: Later())


@pytest.mark.parametrize(
    ("mutant", "problem", "message"),
    [
        (averaged, "plain", "times what is expected|differs"),
        (every_micro_batch, "micro-batches", "call zero_grad"),
        (never, "plain", "differs"),
        (marked_too, "plain", "times what is expected|differs"),
        (unwaited, "plain", "differs"),
    ],
)
def test_a_wrong_one_is_rejected(
    mutant: MakeTechnique, problem: str, message: str
) -> None:
    one: Problem = PROBLEMS[problem]
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_equal(mutant, 3, one)
