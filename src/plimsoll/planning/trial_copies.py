"""Copies of all state that the passes of a trial may write, made before the first of them and outside of the device.

A training observes one step of a kind and copies what that has written. A trial goes on from one pass to the next and
has to undo them all, so it cannot wait until a pass writes a tensor for the first time: a target network may be
refreshed, or a codebook be written, every so many passes. So whatever is reached is copied, but what an update writes,
which has copies of its own (`plimsoll.step.update.undo`). What places hold is the undo's
(`plimsoll.step.undo.step_state`).

Does NOT see what nothing reaches (`plimsoll.step.undo.find_state`): of that the undo sees what the first pass writes.
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
    """State that is reached, to be copied and put back.

    Args:
        remembered: the state of before the trial of a candidate, whose techniques are at work.
        updated: what an update writes.

    Attributes:
        names: of the tensors that are reached.
        num_bytes: of what is copied.
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
        """Why it is not known that everything can be put back, or takes too long with more than ``most_bytes``."""
        if self._iterators:
            return said_of_iterators(self._iterators)
        if self._large:
            return f"{self._large[0]} cannot be copied, so what a pass writes into it would not be put back"
        if self.num_bytes > most_bytes:
            return f"to copy {format_bytes(self.num_bytes)} of tensors and put them back would take longer"
        return None

    @torch.no_grad()
    def make(self, copy_outside: Copier) -> None:
        """Copy it as it is now."""
        self._copies = [SavedTensor(owner, copy_outside(bytes_in(owner))) for owner in self._owners]
        self._places = [SavedPlace.of(tensor) for tensor in self._stored if not is_marked(tensor)]

    def restore(self) -> None:
        """Put back what differs. It may be called again."""
        for place in self._places:
            place.restore()
        for copied in self._copies:
            now, content = copied.value, copied.content
            if now.shape != content.shape or not torch.equal(now.to(content.device), content):
                copied.restore()


def updated_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What an update changes: parameters, once each, and their states."""
    yield from {id(one): one for group in optimizer.param_groups for one in group["params"]}.values()
    yield from (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def copier_for(kind: str) -> Copier:
    """What copies to where the budget does not count it: a mapped file, or the host's memory."""
    return MappedPool().copy_of if kind == "cpu" else _copy_on_host


def _copy_on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
