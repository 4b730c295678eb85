"""Which sample comes when, and who gets it: a pure function of (seed, sample count).

Samples are windows of the token stream. Each epoch is one permutation of them, and the
epochs follow one another without a gap, so the n-th sample of a run is the same on any
number of ranks, with any batch size, and after any interruption.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from minitrain.workload.dataset import Shard
from minitrain.workload.step import Batch

State = dict[str, int]


class Loader:
    """Gives one data-parallel rank its share of each global batch.

    Args:
        shards: token ids, each a run of the stream; a sample lies within one shard.
        seq: tokens that a sample trains on; it reads seq + 1, the last as a target.
        seed: of the order. Epoch e is shuffled by (seed, e).
        rank: this rank's place among `ranks` data-parallel ones.
        ranks: how many ranks share each batch.

    Raises:
        ValueError: the shards hold no whole sample, or `rank` is not one of `ranks`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        seq: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks")
        self.shards, self.seq, self.seed = shards, seq, seed
        self.rank, self.ranks = rank, ranks
        self.samples = 0
        counts = [max(0, (len(shard) - 1) // seq) for shard in shards]
        self._ends = np.cumsum([0, *counts])  # [shards + 1]
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        if not len(self):
            longest = max((len(shard) for shard in shards), default=0)
            raise ValueError(
                f"no sample of {seq} tokens fits in {longest:,} tokens; give more text "
                "or a shorter sequence"
            )

    def __len__(self) -> int:
        """Samples in one epoch."""
        return int(self._ends[-1])

    def next_batch(self, size: int) -> Batch:
        """This rank's part of the next `size` samples, which are then consumed.

        Parts are runs of neighbours and differ by at most one sample.

        Raises:
            ValueError: there are fewer samples than ranks.
        """
        if size < self.ranks:
            raise ValueError(
                f"a global batch of {size} sequences leaves some of {self.ranks} "
                f"ranks without work; use at least {self.ranks}"
            )
        start = self.samples + self.rank * (size // self.ranks)
        start += min(self.rank, size % self.ranks)
        count = size // self.ranks + (self.rank < size % self.ranks)
        self.samples += size
        windows = [self._window(self.index(n)) for n in range(start, start + count)]
        return Batch.from_sequences(torch.from_numpy(np.stack(windows)))

    def index(self, n: int) -> int:
        """The window, 0 to len(self) - 1, that is the n-th sample of the run."""
        epoch, at = divmod(n, len(self))
        if epoch != self._epoch:
            digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
            generator = torch.Generator()
            generator.manual_seed(int.from_bytes(digest[:7], "big"))
            self._order = torch.randperm(len(self), generator=generator)
            self._epoch = epoch
        return int(self._order[at])

    def _window(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index` of the stream, [seq + 1]."""
        shard = int(np.searchsorted(self._ends, index, side="right")) - 1
        start = (index - int(self._ends[shard])) * self.seq
        return self.shards[shard][start : start + self.seq + 1].astype(np.int64)

    def state_dict(self) -> State:
        """Where the run is: a count of samples, and what the count depends on."""
        return {
            "samples": self.samples,
            "epoch_samples": len(self),
            "seq": self.seq,
            "seed": self.seed,
        }

    def load_state_dict(self, state: State) -> None:
        """Continues at the exact sample, on this or another number of ranks.

        Raises:
            ValueError: the state is of other data, another seed or sequence length.
        """
        for name, mine in self.state_dict().items():
            if name != "samples" and state.get(name) != mine:
                raise ValueError(
                    f"cannot resume the data: {name} was {state.get(name)}, now {mine}"
                )
        self.samples = state["samples"]
