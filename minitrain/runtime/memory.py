"""Whose memory it is: every live storage, with one label for its whole life.

A storage is labelled by what is done with it, not by who made it: used as a
parameter, accumulated as a gradient, kept by an optimizer, handed to a collective,
saved for backward. The strongest of these uses counts, from its first byte to its
last, so the label is known only when the trace ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PARAMETERS, GRADIENTS, STATE, COMMUNICATION, ACTIVATIONS, OTHER = range(6)

KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "communication",
    "activations",
    "other",
)

Change = tuple[float, str, int]
"""When (seconds), which kind, and how many bytes came (or went, if negative)."""


class _Storage:
    """What is known of one storage. `found`: it was there before we looked."""

    __slots__ = ("forward", "found", "kind", "nbytes", "number", "watch")

    def __init__(self, kind: int, nbytes: int, found: bool, forward: bool) -> None:
        self.number = -1
        self.kind = kind
        self.nbytes = nbytes
        self.found = found
        self.forward = forward
        self.watch: _Watch | None = None


class _Watch(weakref.ref):
    """A weak reference that remembers the storage's address."""

    __slots__ = ("address",)
    address: int


class Storages:
    """The live storages of this process, and every change to their bytes.

    Args:
        now: The clock, in seconds since the trace began.
        freed: Is told the number of each storage that goes.
    """

    def __init__(
        self, now: Callable[[], float], freed: Callable[[int], None] | None = None
    ) -> None:
        self._now = now
        self._freed = freed
        self._met = 0
        self._live: dict[int, _Storage] = {}
        self._changes: list[tuple[float, _Storage, int]] = []

    def see(
        self,
        tensor: Tensor,
        kind: int = OTHER,
        found: bool = True,
        forward: bool = False,
    ) -> _Storage:
        """Meet a tensor's storage, and strengthen its label to `kind`.

        Args:
            tensor: A tensor on that storage.
            kind: What it is used for.
            found: If we have not met it before, it is older than this moment.
            forward: If we have not met it before, backward did not make it.
        """
        if tensor.layout is not torch.strided:  # sparse: its parts are met themselves
            return _Storage(OTHER, 0, True, False)
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None:
            known = self._meet(storage, found, forward)
        if kind < known.kind:
            known.kind = kind
        return known

    def _meet(
        self, storage: torch.UntypedStorage, found: bool, forward: bool
    ) -> _Storage:
        known = _Storage(OTHER, storage.nbytes(), found, forward)
        known.number = self._met
        self._met += 1
        # The Python object of a storage lives as long as the memory it stands for.
        known.watch = _Watch(storage, self._free)
        known.watch.address = storage._cdata
        self._live[storage._cdata] = known
        self._changes.append((self._now(), known, known.nbytes))
        return known

    def _free(self, watch: _Watch) -> None:
        known = self._live.pop(watch.address, None)
        if known is not None:
            self._changes.append((self._now(), known, -known.nbytes))
            if self._freed is not None:
                self._freed(known.number)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Account for a storage that may have been resized in place."""
        known = self._live.get(storage._cdata)
        if known is None:
            self._meet(storage, found=True, forward=False)
        elif (size := storage.nbytes()) != known.nbytes:
            self._changes.append((self._now(), known, size - known.nbytes))
            known.nbytes = size

    def close(self) -> list[Change]:
        """Stop watching, and return the changes with their final labels.

        What was found, and is kept over steps (parameters, gradients, optimizer
        state, communication buffers), was there when the trace began. Other found
        storages, such as a batch of data, count from when they were met.
        """
        self._live.clear()
        before, during = [], []
        for seconds, storage, delta in self._changes:
            change = (seconds, KINDS[storage.kind], delta)
            if storage.found and storage.kind <= COMMUNICATION:
                storage.found = False  # only its first change
                before.append((0.0, *change[1:]))
            else:
                during.append(change)
        return before + during


def local(tensor: Tensor) -> Tensor:
    """The tensor that holds this rank's part of a `DTensor`; others as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def running(changes: Iterable[Change]) -> Iterable[tuple[float, dict[str, int]]]:
    """Live bytes by kind after each change, with its time in seconds.

    The dictionary is one and the same, updated in place: copy what you keep.
    """
    live = dict.fromkeys(KINDS, 0)
    for seconds, kind, delta in changes:
        live[kind] += delta
        yield seconds, live


def peaks(changes: Iterable[Change]) -> tuple[dict[str, int], dict[str, int]]:
    """The peak of each kind, and the kinds at the peak of their sum, in bytes."""
    highest, at_peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    total = highest_total = 0
    live = dict.fromkeys(KINDS, 0)
    for _, kind, delta in changes:
        live[kind] += delta
        total += delta
        highest[kind] = max(highest[kind], live[kind])
        if total > highest_total:
            highest_total, at_peak = total, dict(live)
    return highest, at_peak
