"""Copies of the data that an update changes, made just before the update, so that it can be undone bitwise.

`ChunkCopy` copies some parameters of an optimizer that updates each one separately
(`plimsoll.models.optimizers.is_separable`). `WholeCopy` copies any other optimizer, with all state that it reaches
(`plimsoll.step.undo.find_state`).

Not handled: a tensor that a hook, or the owner of a gradient, first writes in an update that fails and is not observed.
`WholeCopy` names the tensor if it has a version counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as optimizer_module  # the global optimizer hooks have no public name
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.base import Backend
from plimsoll.device.off_device import Copier, Lender
from plimsoll.models.optimizers import settings_of
from plimsoll.step.undo.find_state import SMALL_BYTES
from plimsoll.step.undo.saved import SavedPlace, SavedTensor
from plimsoll.step.undo.snapshot import Change, Snapshot
from plimsoll.step.undo.user_state import Kept
from plimsoll.step.undo.written import Write, Writes, bytes_in, has_storage, key_of
from plimsoll.step.update.scratch import Layout, Scratch
from plimsoll.step.update.sparse import bytes_of, changed_rows
from plimsoll.step.update.transient_memory import Members


class Memory(NamedTuple):
    """The memory in which copies are made.

    Attributes:
        layout: the layout of the previous copy, if any.
        scratch: reused memory for small copies.
        copy_outside: copies large tensors outside the device's memory, if available.
        lender: lends the update states that live outside the device, if any; the originals change only in
            `ChunkCopy.keep`.
    """

    layout: Layout | None
    scratch: Scratch
    copy_outside: Copier | None
    lender: Lender | None = None


class _Values:
    """Copies of the values of tensors. Tensors whose layout allows it are copied by one call for many."""

    def __init__(self, tensors: list[Tensor], memory: Memory) -> None:
        layout, scratch, copy_outside, lender = memory
        self.layout = layout if layout is not None and layout.is_of(tensors) else Layout(tensors)
        self._alike: list[tuple[list[Tensor], Tensor]] = []
        if copy_outside is not None and sum(map(bytes_of, tensors)) > scratch.kept_bytes:
            copies = lender.copies_of(tensors) if lender else map(copy_outside, tensors)
            self._others = [*zip(tensors, copies, strict=True)]
        else:
            for key, flat in self.layout.alike.items():
                self._alike.append((flat, scratch.copy_of(key, flat, self.layout.num_elements[key])))
            self._others = [(tensor, tensor.detach().clone()) for tensor in self.layout.others]

    def put_back(self) -> None:
        for flat, copies in self._alike:
            for tensor, value in zip(flat, torch.split(copies, [*map(len, flat)]), strict=True):
                tensor.copy_(value)
        for tensor, value in self._others:
            tensor.copy_(value)


class ChunkCopy:
    """A copy of some parameters of an optimizer and of their states.

    For embedding tables with sparse gradients, only the rows that change are copied (`plimsoll.step.update.sparse`).
    States that an update borrows (`plimsoll.device.off_device.Lender`) are not copied: the originals change only in
    `keep`.

    Args:
        optimizer: the optimizer, which updates each parameter separately.
        members: the parameters, each with the index of its group.
        memory: the memory in which copies are made.
        changes_gradients: whether the update changes gradients. With ``None``, `run` observes it.

    Attributes:
        layout: the layout of this copy, to be reused for the next copy.
        changes_gradients: whether the update changes gradients; ``None`` if not observed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Members,
        memory: Memory,
        changes_gradients: bool | None,
    ) -> None:
        self._optimizer = optimizer
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._fresh: list[nn.Parameter] = []
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._writes: Writes | None = None
        self._lender = memory.lender
        self.changes_gradients = changes_gradients
        tensors: list[Tensor] = []
        for group, parameter in members:
            state = optimizer.state.get(parameter)
            if state is None:
                self._fresh.append(parameter)
            else:
                self._states.append((parameter, dict(state)))
            values = [value for value in (state or {}).values() if isinstance(value, Tensor)]
            if self._lender is not None:
                values = [value for value in values if not self._lender.is_lent(parameter, value)]
            tensors.extend(self._without_rows(group, parameter, values))
        self._values = _Values(tensors, memory)
        self.layout = self._values.layout
        gradients = [parameter.grad for _, parameter in members if parameter.grad is not None and changes_gradients]
        self._gradients = [(gradient, gradient.clone()) for gradient in gradients]
        # Some optimizers store counters in their groups. The caller restores the parameters of the groups.
        self._settings = settings_of(optimizer)
        # SGD with Nesterov momentum and ``foreach`` changes gradients, so the first update is observed.
        if changes_gradients is None and all(has_storage(one) for _, one in members):
            states = (value for _, state in self._states for value in state.values() if has_storage(value))
            self._writes = Writes(key_of(one) for one in (*(parameter for _, parameter in members), *states))

    def run(self, work: Callable[[], object]) -> None:
        """Run the update of these parameters, and observe whether it changes gradients if that is not known yet."""
        with self._lender.holding_back() if self._lender else nullcontext(), self._writes or nullcontext():
            work()
        if self._writes is None:
            return
        is_fused = any(group.get("fused") for group in self._optimizer.param_groups)
        written = self._writes.written.values()
        # Fused kernels declare that they write gradients, but write them only to unscale.
        self.changes_gradients = any(map(_has_changed, written)) if is_fused else bool(written)

    def _without_rows(self, group: int, parameter: nn.Parameter, values: list[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors that must be copied whole. Of all other tensors, copy only the rows that change."""
        rows_U = changed_rows(self._optimizer, self._optimizer.param_groups[group], parameter)
        for tensor in (parameter, *values):
            if rows_U is None or tensor.shape != parameter.shape:
                yield tensor
            else:
                self._rows.append((tensor, rows_U, tensor.detach().index_select(0, rows_U)))

    def keep(self) -> None:
        """Make the update permanent: write the borrowed states back, if there are any."""
        if self._lender is not None:
            self._lender.keep()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied state. It may be called repeatedly."""
        if self._lender is not None:
            self._lender.drop()
        self._values.put_back()
        for gradient, value in self._gradients:
            gradient.copy_(value)
        for write in self._writes.written.values() if self._writes else ():
            bytes_in(write.storage).copy_(write.content)
        for tensor, rows_U, value in self._rows:
            tensor.index_copy_(0, rows_U, value)
        for parameter, state in self._states:
            self._optimizer.state[parameter].clear()
            self._optimizer.state[parameter].update(state)
        for parameter in self._fresh:
            self._optimizer.state.pop(parameter, None)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


class Learned:
    """Facts about an optimizer, learned from successful updates.

    Attributes:
        kept: the state that the optimizer reaches, and the state that only its hooks and global optimizer hooks reach.
        written: names of tensors that hooks have written.
        changes_gradients: whether an update has changed a gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kept = Kept(partial(_roots_of, optimizer), partial(_hooks_of, optimizer))
        self.written: set[str] = set()
        self.changes_gradients = False


class WholeCopy:
    """A copy of all state that an optimizer reaches, with the random state.

    State that only hooks reach may be large. It is copied if a hook was observed to write it. The first updates and
    some later ones are observed (`plimsoll.step.undo.written`), to see the writes of hooks and changes of gradients.

    Args:
        optimizer: any optimizer.
        learned: facts from earlier updates; `run` adds to them.
        memory: the memory in which copies are made.
        backend: the backend of the device, whose random state is copied too.
        is_again: whether this update has failed before; it is then observed.

    Attributes:
        layout: the layout of this copy, to be reused for the next copy.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learned: Learned,
        memory: Memory,
        backend: Backend,
        *,
        is_again: bool,
    ) -> None:
        learned.kept.begin(is_again=is_again)
        own, hooked = learned.kept.parts
        self._learned, self._backend, self._random_state = learned, backend, backend.random_state()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._is_observed = learned.kept.is_due and not any(map(_is_fake, parameters))
        tensors = [tensor for _, tensor in own.tensors.values()]
        self._versions: list[tuple[str, Tensor, int]] = []
        for name, tensor in hooked.tensors.values():
            if name in learned.written or tensor.nbytes <= SMALL_BYTES:
                tensors.append(tensor)
            elif not tensor.is_inference():  # inference tensors have no version counter
                self._versions.append((name, tensor, tensor._version))
        self._remember_gradients(parameters)
        plain: list[Tensor] = []
        special: list[Tensor] = []
        for tensor in tensors:
            (plain if _is_writable(tensor) else special).append(tensor)
        self._values = _Values(plain, memory)
        self.layout: Layout | None = self._values.layout
        self._special = [SavedTensor.of(tensor) for tensor in special]
        stored = [tensor for tensor in plain if has_storage(tensor)]
        self._places = [SavedPlace.of(tensor) for tensor in stored]
        self._names: dict[int, str] = {}
        copied: list[int] = []
        if self._is_observed:
            self._names = {key_of(tensor): name for name, tensor in hooked.tensors.values() if has_storage(tensor)}
            copied = [key_of(one) for one in stored if one.nbytes == one.untyped_storage().nbytes()]
        self._snapshot = Snapshot(
            learned.kept,
            is_observed=self._is_observed,
            is_state=lambda name: ".state" in name or ".param_groups" in name,
            copied=copied,
        )

    @property
    def changes(self) -> list[Change]:
        """Changes that failed updates made and successful updates never did."""
        return self._snapshot.changes

    def run(self, work: Callable[[], object], left: list[Change]) -> None:
        """Run the whole update and learn from it.

        Args:
            work: the update.
            left: changes that earlier failed tries made; they are made again before the update runs.
        """
        self._snapshot.run(work, left, self.restore)
        writes = self._snapshot.writes
        for key in writes.written if writes else ():
            if key in self._gradient_keys:
                self._learned.changes_gradients = True
            elif key in self._names:
                self._learned.written.add(self._names[key])
        self._learned.written.update(self._lost_tensors())
        self._learned.changes_gradients = self._learned.changes_gradients or self.has_lost_gradients
        if not self._learned.kept.lasts:  # the next copy has other tensors
            self.layout = None

    def restore(self) -> None:
        """Restore all state except the objects named in ``lost``. It may be called repeatedly."""
        self._snapshot.put_back()
        self._put_back_own()

    @property
    def lost(self) -> list[str]:
        """Names of state that was written but not copied."""
        return [*self._lost_tensors(), *self._snapshot.lost]

    def _lost_tensors(self) -> list[str]:
        versions = [] if self._is_observed else self._versions
        return [name for name, tensor, version in versions if tensor._version != version]

    @property
    def has_lost_gradients(self) -> bool:
        """True if gradients were written but not copied."""
        return any(gradient._version != version for gradient, version in self._gradient_versions)

    def _remember_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Record the gradient of each parameter; copy gradients that change or cannot be observed."""
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        present = [gradient for _, gradient in self._gradients if gradient is not None]
        stored = [one for one in present if has_storage(one)]
        is_fake = any(map(_is_fake, present))
        copied = present if self._learned.changes_gradients else [] if is_fake else _others(present, stored)
        self._gradient_copies = [(one, one.clone()) for one in copied]
        self._gradient_keys = {*map(key_of, stored)} if self._is_observed else set()
        is_free = self._is_observed or self._learned.changes_gradients
        self._gradient_versions = [] if is_free else [(one, one._version) for one in stored]

    @torch.no_grad()
    def _put_back_own(self) -> None:
        for place in self._places:
            place.restore()
        self._values.put_back()
        for saved in self._special:
            saved.restore()
        for gradient, value in self._gradient_copies:
            gradient.copy_(value)
        for parameter, its_gradient in self._gradients:
            if parameter.grad is not its_gradient:
                parameter.grad = its_gradient
        self._backend.restore_random_state(self._random_state)


def _hooks_of(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Return the hooks of an optimizer and the global optimizer hooks, by kind."""
    own = [value for name, value in vars(optimizer).items() if name.endswith("_hooks") and isinstance(value, dict)]
    return [*own, optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks]


def _roots_of(optimizer: torch.optim.Optimizer) -> list[list[tuple[str, Any]]]:
    own: list[tuple[str, Any]] = [("optimizer", optimizer)]
    # One by one, because the search skips very large containers.
    own += [("optimizer.param_groups", one) for group in optimizer.param_groups for one in group["params"]]
    own += [("optimizer.state", state) for state in optimizer.state.values()]
    hooks = (hook for of_kind in _hooks_of(optimizer) for hook in of_kind.values())
    return [own, [("a hook of the optimizer", hook) for hook in hooks]]


def _others(tensors: list[Tensor], known: list[Tensor]) -> list[Tensor]:
    ids = {*map(id, known)}
    return [tensor for tensor in tensors if id(tensor) not in ids]


def _has_changed(write: Write) -> bool:
    return not torch.equal(bytes_in(write.storage), write.content)


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether a tensor itself can be written, not only its storage."""
    if tensor.layout == torch.strided and tensor.is_contiguous():
        return not tensor.is_inference()
    is_expanded = has_storage(tensor) and any(
        num_items > 1 and stride == 0 for num_items, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not is_expanded and not tensor.is_inference()
