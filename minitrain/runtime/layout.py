"""The arithmetic of a parallel layout: which rank stands where on the five axes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "cp", "tp")  # outermost first: neighbours in tp are neighbour ranks
EXPERT_AXES = ("pp", "edp", "ep", "tp")


@dataclass(frozen=True)
class Layout:
    """How many ways each axis splits the ranks.

    ``dp`` data, ``pp`` pipeline, ``cp`` context (sequence) and ``tp`` tensor
    parallelism together use ``dp * pp * cp * tp`` ranks. ``ep`` takes no ranks of its
    own: experts see the same ranks through a second mesh, in which ``dp * cp`` is
    split into ``edp`` replicas of ``ep`` groups of experts.

    Pure arithmetic: no process is needed to ask whether a layout is legal.

    Raises:
        ValueError: A degree is not a positive integer, or ``ep`` does not divide
            ``dp * cp``.

    Example:
        >>> layout = Layout(dp=2, tp=2)
        >>> layout.world_size, layout.groups("tp")
        (4, [(0, 1), (2, 3)])
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{field.name}={degree!r}: a degree is 1, 2, 3, ...")
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp*cp = {self.dp}*{self.cp} = "
                f"{self.dp * self.cp}: experts are spread over those ranks"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: ``dp * pp * cp * tp``."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Replicas of each expert: ``dp * cp / ep``."""
        return self.dp * self.cp // self.ep

    # ---- where a rank stands

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a global rank on each axis, ``{"pp": .., "dp": .., ..}``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def rank(self, **place: int) -> int:
        """The global rank at a place; axes left out are at 0."""
        if unknown := set(place) - set(AXES):
            raise ValueError(f"no axis {sorted(unknown)}: there are {', '.join(AXES)}")
        rank = 0
        for axis in AXES:
            index, degree = place.get(axis, 0), getattr(self, axis)
            if not 0 <= index < degree:
                raise ValueError(f"{axis}={index} is outside 0..{degree - 1}")
            rank = rank * degree + index
        return rank

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ along ``axis`` only, in rank order."""
        expert = axis in ("ep", "edp")
        if axis not in AXES and not expert:
            raise ValueError(f"no axis {axis!r}: {', '.join((*AXES, 'ep', 'edp'))}")
        axes = EXPERT_AXES if expert else AXES
        degrees = [getattr(self, name) for name in axes]
        groups: dict[tuple, list[int]] = {}
        where = axes.index(axis)
        for rank, place in enumerate(itertools.product(*map(range, degrees))):
            groups.setdefault(place[:where] + place[where + 1 :], []).append(rank)
        return [tuple(group) for group in groups.values()]

    # ---- what a layout may be used for

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError unless the layout uses exactly ``world_size`` ranks."""
        if world_size != self.world_size:
            raise ValueError(
                f"{self} needs {self.world_size} ranks, and there are {world_size}"
            )

    def check_model(
        self, *, layers: int, heads: int, kv_heads: int, ffn: int, sequence: int
    ) -> None:
        """Raise ValueError unless a Transformer of these sizes can be split so.

        Every rule is checked, and the message lists all that are broken.
        """
        rules = {
            f"tp={self.tp} does not divide heads={heads}": heads % self.tp,
            f"tp={self.tp} does not divide kv_heads={kv_heads}": kv_heads % self.tp,
            f"tp={self.tp} does not divide ffn={ffn}": ffn % self.tp,
            f"pp={self.pp} stages of {layers} layers": layers < self.pp,
            f"cp={self.cp} needs a sequence divisible by {2 * self.cp}, not {sequence} "
            "(each rank takes one early and one late piece)": self.cp > 1
            and sequence % (2 * self.cp),
        }
        if broken := [rule for rule, fault in rules.items() if fault]:
            raise ValueError("; ".join(broken))

    def check_batch(self, global_batch: int, micro_batch: int) -> int:
        """The number of micro-batches of a step on each data-parallel rank.

        Args:
            global_batch: Sequences of one step over all ranks.
            micro_batch: Sequences of one forward pass on one rank.

        Raises:
            ValueError: They do not divide.
        """
        share = self.dp * micro_batch
        if micro_batch < 1 or global_batch < 1 or global_batch % share:
            raise ValueError(
                f"global_batch={global_batch} is not a multiple of dp*micro_batch = "
                f"{self.dp}*{micro_batch} = {share}"
            )
        return global_batch // share

    # ---- meshes

    def mesh(self, device_type: str | None = None) -> "DeviceMesh":
        """Torch's DeviceMesh of this layout, axes ``pp, dp, cp, tp``.

        Every rank of the world must call it.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``; by default what the group uses.
        """
        return self._mesh(AXES, device_type)

    def expert_mesh(self, device_type: str | None = None) -> "DeviceMesh":
        """The second view of the same ranks, axes ``pp, edp, ep, tp``."""
        return self._mesh(EXPERT_AXES, device_type)

    def _mesh(self, axes: tuple[str, ...], device_type: str | None) -> "DeviceMesh":
        from torch.distributed.device_mesh import init_device_mesh

        from minitrain.runtime import group

        self.check_world_size(group.world_size())
        shape = tuple(getattr(self, axis) for axis in axes)
        device = device_type or group.device().type
        return init_device_mesh(device, shape, mesh_dim_names=axes)

    def __str__(self) -> str:
        degrees: Mapping[str, int] = vars(self)
        used = [f"{axis}={n}" for axis, n in degrees.items() if n > 1]
        return f"Layout({', '.join(used)})"
