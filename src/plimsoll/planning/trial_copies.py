"""Copies of all state that a trial of candidates may change, made before its first pass and outside the device.

The undo of a single training step observes the step, and copies only the state that it changes. A trial must undo many
passes at once. Some tensors are written only every few passes, such as a target network or a codebook. So all reachable
state is copied in advance, except for tensors that an update writes, which have separate copies
(`plimsoll.step.update.undo`). References are restored by the undo (`plimsoll.step.undo.step_state`).

Unreachable state (`plimsoll.step.undo.find_state`) is not copied. For it, the undo restores changes of the first pass
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.device.off_device import Copier, is_marked
from plimsoll.records.units import format_bytes
from plimsoll.step.retry import said_of_iterators
from plimsoll.step.undo.find_state import SMALL_BYTES
from plimsoll.step.undo.saved import SavedPlace, SavedTensor
from plimsoll.step.undo.state_before_step import Before
from plimsoll.step.undo.written import bytes_in, has_storage, key_of


class TrialCopies:
    """Copies of reachable state, to be restored later.

    Args:
        remembered: the parts of the state before the trial of a candidate, with its techniques installed.
        updated: tensors that an update writes.

    Attributes:
        names: names of the reachable tensors.
        num_bytes: number of bytes to copy.
    """

    def __init__(self, remembered: Sequence[Before], updated: Iterable[Tensor]) -> None:
        ids = {*map(id, updated)}
        reached = [one.reached for one in remembered]
        tensors = [one for part in reached for one in part.tensors.values() if not one[1].is_meta]
        self.names = {name for name, _ in tensors}
        self._stored = [tensor for _, tensor in tensors if has_storage(tensor)]
        others = [tensor for tensor in self._stored if id(tensor) not in ids]
        owners = {key_of(tensor): tensor.untyped_storage() for tensor in others}
        self._owners = [one for one in owners.values() if one.nbytes()]
        self._iterators = [name for part in reached for name, _ in part.iterators]
        self._large = [name for name, tensor in tensors if id(tensor) not in ids and not has_storage(tensor)]
        arrays = [one for part in reached for one in part.arrays]
        self._large += [name for name, one in arrays if one.flags.writeable and one.nbytes > SMALL_BYTES]
        self._copies: list[SavedTensor] = []
        self._places: list[SavedPlace] = []
        self.num_bytes = sum(one.nbytes() for one in self._owners)

    def reason_against(self, most_bytes: int) -> str | None:
        """Return why not to copy the state: it cannot be restored, or exceeds ``most_bytes``. Else return ``None``."""
        if self._iterators:
            return said_of_iterators(self._iterators)
        if self._large:
            return f"{self._large[0]} cannot be copied, so changes by a pass could not be undone"
        if self.num_bytes > most_bytes:
            return f"copying and restoring {format_bytes(self.num_bytes)} of tensors would take too long"
        return None

    @torch.no_grad()
    def make(self, copy_outside: Copier) -> None:
        """Copy the current state."""
        self._copies = [SavedTensor(owner, copy_outside(bytes_in(owner))) for owner in self._owners]
        self._places = [SavedPlace.of(tensor) for tensor in self._stored if not is_marked(tensor)]

    def restore(self) -> None:
        """Restore the state that has changed since `make`. This method may be called again."""
        for place in self._places:
            place.restore()
        for copied in self._copies:
            now, content = copied.value, copied.content
            if now.shape != content.shape or not torch.equal(now.to(content.device), content):
                copied.restore()


def updated_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an update changes: each parameter once, and the optimizer states."""
    yield from {id(one): one for group in optimizer.param_groups for one in group["params"]}.values()
    yield from (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def copier_for(kind: str) -> Copier:
    """Return a function that copies tensors outside the budget: on a CPU to a mapped file, on a GPU to host memory."""
    return MappedPool().copy_of if kind == "cpu" else _copy_on_host


def _copy_on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
