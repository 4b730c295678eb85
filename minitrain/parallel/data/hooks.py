"""When gradients appear: the calls of autograd that a technique hangs its work on."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minitrain.parallel.data.replicas import copy_from_first
from minitrain.runtime import read


class BackwardHooks:
    """Follows the synchronized backwards of a model, from begin to end.

    A technique fills in `start`, `take` and `finish`. Here is what all of them need: a
    parameter that gets no gradient, micro-batches that only accumulate, a backward that
    ends in an exception, and what must be refused.

    Args:
        model: gets hooks, and `set_requires_gradient_sync(flag)`.
        group: the ranks that hold other data.
        parameters: those whose gradients are summed, in the order of their places.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.model, self.group, self.parameters = model, group, parameters
        self.synchronize = True
        self.backward: int | None = None  # autograd's number of the one that runs
        self.missing: set[int] = set()  # places whose gradient it still owes
        self.summed = False  # gradients hold sums, until they are zeroed
        self.known = set(parameters)
        self.made_of = [(p.dtype, p.device) for p in parameters]
        for i, parameter in enumerate(parameters):
            hook = partial(self._gradient_is_ready, i)
            parameter.register_post_accumulate_grad_hook(hook)
        model.register_forward_hook(self._forward_ends)
        model.set_requires_gradient_sync = self._set_synchronize  # type: ignore[assignment]

    def start(self) -> None:
        """A synchronized backward begins."""

    def take(self, i: int) -> None:
        """The gradient of parameter `i` is complete here; None counts as zero."""
        raise NotImplementedError

    def finish(self) -> None:
        """All gradients were taken: returns when `.grad` holds the sums."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a data-parallel model cannot be copied or pickled, since its hooks sum "
            "the gradients of this one: give its state_dict() to a plain model"
        )

    # ---- the calls of autograd

    def _set_synchronize(self, flag: bool) -> None:
        self.synchronize = flag

    def _forward_ends(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Backward will begin where forward ends: at the gradient of an output."""
        if self.backward is not None and torch._C._current_graph_task_id() < 0:
            self._drop_failed()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor | None = None, at: int | None = None) -> None:
        """Seen at an output, or at the first gradient: that of the parameter `at`."""
        number = torch._C._current_graph_task_id()
        if number == self.backward:  # another output of the same one
            return
        if self.backward is not None:
            self._drop_failed()
        self._refuse(at)
        if self.synchronize:
            self.backward, self.missing = number, set(range(len(self.parameters)))
            torch.autograd.Variable._execution_engine.queue_callback(self._ends)
            self.start()

    def _gradient_is_ready(self, i: int, _: Tensor) -> None:
        if not self.synchronize:
            return
        if self.backward is None:  # an output that we did not see led here
            self._backward_begins(at=i)
        try:
            self.missing.remove(i)
        except KeyError:
            raise RuntimeError(
                "a parameter got its gradient in two parts, and the first has been "
                "sent; use torch.utils.checkpoint with use_reentrant=False"
            ) from None
        if self.parameters[i].grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise RuntimeError("a gradient is sparse: make the layer with sparse=False")
        self.take(i)

    def _ends(self) -> None:
        """Backward is over: sums become gradients, and replicas whole again."""
        for i in sorted(self.missing):
            self.take(i)
        self.finish()
        self.backward, self.summed = None, True
        for buffer in self.model.buffers():
            copy_from_first(buffer, self.group)

    # ---- what would be silently wrong

    def _drop_failed(self) -> None:
        """The last backward ended in an exception, and others wait for its messages.

        They get NaN for what it still owed, so that their step is not taken either.
        """
        for parameter in (self.parameters[i] for i in self.missing):
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, math.nan)
        self._ends()
        self.summed = False
        for parameter in self.parameters:
            parameter.grad = None

    def _refuse(self, at: int | None) -> None:
        trained = (p for p in self.model.parameters() if p.requires_grad)
        if self.synchronize and not self.known.issuperset(trained):
            raise RuntimeError(
                "a parameter was unfrozen, added or replaced after the model was made "
                "data-parallel, so nothing would sum its gradient; do that before"
            )
        if self.synchronize and self.made_of != [
            (p.dtype, p.device) for p in self.parameters
        ]:
            raise RuntimeError(
                "the model went to another dtype or device after it was made "
                "data-parallel; do that before"
            )
        held = (
            p.grad
            for i, p in enumerate(self.parameters)
            if p.grad is not None and i != at
        )
        if self.summed and any(read(grad.any(), expected=False) for grad in held):
            raise RuntimeError(
                "gradients hold the sum over the ranks already, and a second backward "
                "would sum it again: call zero_grad() first, or before all backwards "
                "but the last model.set_requires_gradient_sync(False)"
            )
        self.summed = False
