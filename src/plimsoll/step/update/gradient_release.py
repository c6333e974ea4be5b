"""Gradient release: each parameter is updated in backward once its gradient is complete, and the gradient is freed.

The step stays a transaction. Memory may run out in backward after some parameters were updated. So before each update,
values and states of its parameters are copied outside the device's memory. Every step pays for these copies.

Results are bitwise equal to a normal update, because the same update runs on the same gradients. Not handled: steps
that need all gradients first (accumulation, clipping, a gradient scaler) and optimizers whose update depends on several
parameters. A gradient that arrives in parts, each of which looks complete (checkpointing with ``use_reentrant=True``),
is detected and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import InputError
from plimsoll.models.optimizers import is_separable, settings_of
from plimsoll.models.workload import Workload
from plimsoll.step.failpoints import failpoint
from plimsoll.step.update.commit import only

# Parameters wait until their gradients have this size in bytes. Smaller updates cost more than they free, on a GPU
# because of kernel launches.
_CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 16 << 20}


class GradientRelease:
    """The updates of one step of one optimizer, performed during backward; create a new object for each step.

    Args:
        optimizer: the optimizer, which updates each parameter separately.
        copy_outside: copies a tensor to memory outside the device, and returns the copy.
        kind: the kind of the device.
        chunk_bytes: bytes of gradients that may wait for an update; ``None`` for a default that suits the device.
        leave_out: see `plimsoll.models.hooks.EarlyUpdates`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copy_outside: Callable[[Tensor], Tensor],
        kind: str,
        chunk_bytes: int | None = None,
        leave_out: str = "update when backward has ended",
    ) -> None:
        self._optimizer = optimizer
        self._copy_outside = copy_outside
        self._leave_out = leave_out
        self._chunk_bytes = chunk_bytes or _CHUNK_BYTES[kind]
        self._group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._settings = settings_of(optimizer)
        self._lock = Lock()  # device and host gradients complete in different threads
        self._waiting: list[nn.Parameter] = []
        self._before: dict[nn.Parameter, _Before] = {}

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Update parameters in every backward of the block. All updates are done if the block ends without error."""
        trainable = [parameter for parameter in self._group_of if parameter.requires_grad]
        # Autograd calls the hook when a gradient is fully accumulated, so a tied weight is updated once.
        handles = [parameter.register_post_accumulate_grad_hook(self._is_complete) for parameter in trainable]
        try:
            yield
            self._update()
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def undo(self) -> None:
        """Restore every updated parameter and its states."""
        self._waiting.clear()
        for parameter, before in self._before.items():
            before.restore(parameter, self._optimizer)
        self._before.clear()
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)

    def _is_complete(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        with self._lock:
            self._add(parameter)

    def _add(self, parameter: nn.Parameter) -> None:
        if parameter in self._before or any(parameter is one for one in self._waiting):
            raise InputError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} came in more than one part, so it "
                f"cannot be updated in backward: use checkpoint(..., use_reentrant=False), or {self._leave_out}"
            )
        self._waiting.append(parameter)
        if sum(one.nbytes for one in self._waiting) >= self._chunk_bytes:
            self._update()

    def _update(self) -> None:
        """Back up the waiting parameters and their optimizer states, then update the parameters."""
        if not self._waiting:
            return
        chunk, self._waiting = self._waiting, []
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in chunk:
            self._before[parameter] = _Before(parameter, self._optimizer.state.get(parameter), self._copy_outside)
            members.setdefault(self._group_of[parameter], []).append(parameter)
        with only(self._optimizer, members):
            self._optimizer.step()
        failpoint("optimizer")
        for parameter in chunk:
            parameter.grad = None


def gradient_release(workload: Workload, micro_batch: int, num_samples: int) -> GradientRelease | None:
    """Return the gradient release for a step, or ``None`` if it is not requested or not possible.

    Args:
        workload: the training run.
        micro_batch: the number of samples of a micro-batch.
        num_samples: the number of samples of the batch.
    """
    needs_all = workload.clip_norm is not None or workload.precision == "fp16" or not is_separable(workload.optimizer)
    is_cut = micro_batch < num_samples or workload.hooks.cut.depends_on_values or not workload.ranks.is_alone
    early = workload.hooks.update_early
    if early is None or is_cut or needs_all:
        return None
    return GradientRelease(workload.optimizer, early.copy_outside, workload.device.type, leave_out=early.leave_out)


class _Before:
    """A parameter's value and optimizer states before the update. The states are ``None`` if it had no states."""

    def __init__(
        self, parameter: nn.Parameter, state: dict[str, Any] | None, copy_outside: Callable[[Tensor], Tensor]
    ) -> None:
        self._state = None if state is None else dict(state)
        tensors = [parameter, *(value for value in (state or {}).values() if isinstance(value, Tensor))]
        self._copies = [(tensor, copy_outside(tensor)) for tensor in tensors]

    def restore(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        if self._state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(self._state)
