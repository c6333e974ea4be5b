"""Saving and restoring the state that a step can change before its update, besides the gradients.

Writes are observed, not guessed. Passes are observed in the first step, and again when modules switch between training
and evaluation or a batch has other fields (`plimsoll.step.undo.written`). From then on the same tensors are copied
before each step. Python state is copied one level deep wherever training code can hold it
(`plimsoll.step.undo.find_state`).

A tensor that is first written in a later step is noticed by its version counter. If that step succeeds, the tensor is
copied from then on. If the step is undone, the tensor cannot be restored and is named in ``lost``.

Not handled: a first write in a later step that does not change the version counter (through ``.data``), and state
that `find_state` and `written` do not reach. Pass such state as ``extra_state``.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase

from plimsoll.device.base import Backend
from plimsoll.device.cpu import onednn
from plimsoll.device.cuda import cudnn_dropout
from plimsoll.device.off_device import is_marked
from plimsoll.step.oom_boundary import fitting
from plimsoll.step.sampled_steps import SampledSteps
from plimsoll.step.undo.between_batches import Between, Moment
from plimsoll.step.undo.contents import Places, contents_of
from plimsoll.step.undo.find_state import SMALL_BYTES, Place, Reached, may_hold_state, name_of_item, reached_from
from plimsoll.step.undo.hooks import SavedHooks, containers_of
from plimsoll.step.undo.saved import SavedArray, SavedGenerator, SavedIterator, SavedPlace, SavedTensor, Stateful
from plimsoll.step.undo.state_before_step import Before, Watched
from plimsoll.step.undo.written import Writes, bytes_in, has_storage, key_of

_MOST_ARRAY_BYTES = 64 << 20
"""Numpy arrays above this size are not copied in observed steps, unless an earlier step has written them."""
_OPTIMIZER = "optimizer"


class Undo:
    """A saved state from before the step, and the means to restore it.

    Args:
        roots: objects from which training code can reach its state, by name: the model, the loss, hooks.
        backend: the backend of the device; its random state is saved too.
        extra_state: user objects that are saved and restored through their ``state_dict``.
        optimizer: the optimizer of the model. Changes that passes make to it are undone here; other code undoes the
            update.
        observes: whether to observe passes and restore Python state. False in a dry run, and if ranks shard parameters.

    Attributes:
        lost: names of the objects that the last `restore` could not put back.
        is_updating: whether the update is running. Other code undoes its writes to the trained parameters.
        kinds: observed combinations of the modules' modes (training or evaluation) and the kind of batch.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        backend: Backend,
        extra_state: Sequence[Stateful] = (),
        optimizer: torch.optim.Optimizer | None = None,
        observes: bool = True,
    ) -> None:
        self.lost: tuple[str, ...] = ()
        self._moments: list[tuple[Before, Moment]] = []  # after the last passes, if an update has several batches
        self._resumed: Any = ()  # to revert the last `resume`
        self._between: list[Between] = []  # changes by the loop after each batch
        self._roots, self._backend, self._extra_state, self._optimizer = dict(roots), backend, extra_state, optimizer
        self._reached: Reached | None = None
        self._walked = contents_of(Reached())  # contents whose objects have all been searched
        self._watched: Watched | None = None  # of `_reached`
        self._watched_for: tuple[Any, ...] = ()  # the conditions for which `_watched` was selected
        self.is_updating = False
        self._new_ids: set[int] = set()  # ids of the new objects that the last check found
        self._stays: list[tuple[str, Any]] = []  # new objects found by two checks in a row
        self._has_looked = False  # whether changes were searched for since the last pass
        self._before: list[Before] = []  # one for the roots, then one per batch
        self._moving: set[str] = set()  # names of places that passes have changed
        self._failed: list[tuple[str, Place, Any, Any]] = []  # other places: contents before and after a failed try
        self._left: list[tuple[str, Place, Any]] = []  # kept as the failed try left them
        self._late: set[str] = set()  # names of tensors first written in this update
        self._written: set[str] = set()  # names of tensors and arrays that passes have written
        self._placed: set[str] = set()  # names of tensors that passes moved to another storage
        self._old_copies: dict[str, Tensor] = {}  # copies of earlier steps, whose memory is reused
        self._writes: Writes | None = None
        self._observes = observes
        self.kinds: set[Any] = set()
        self._kinds_in_hand: list[Any] = []  # kinds of the batches of this update
        self._extra: list[Any] = []
        self._random_state: dict[str, Any] = {}
        self._strangers: dict[int, StorageWeakRef] = {}  # storages that passes wrote but no root reaches
        self._sampled_steps = SampledSteps()
        for model in (one for one in roots.values() if isinstance(one, nn.Module)):
            cudnn_dropout.find_for(model)
            fitting(partial(onednn.prepare_for, model), backend, "oneDNN was prepared for an LSTM", " to a new process")

    def remember(self, batch: Any = None) -> None:
        """Save the current state, including ``batch``, as the state to which `restore` returns."""
        self.lost, self.is_updating, self._has_looked, self._late = (), False, False, set()
        self._let_go()
        self._random_state = self._backend.random_state()
        if self._reached is None:
            self._reached = self._walk()
            self._walked = contents_of(self._reached)
        self._kinds_in_hand = [self._kind_with_modes(batch)]
        before = self._remembered(self._reached, is_new=False)
        roots = [("batch", batch), *self._news(before), *(news for one in self._between for news in one.news)]
        before.copies += [("", copied) for copied in self._copied_strangers()]
        news = self._remembered(reached_from(roots, self._reached), is_new=True)
        self._extra = [copy.deepcopy(one.state_dict()) for one in self._extra_state]
        self._before = [before, news]

    def pause(self) -> None:
        """Record the state after the passes of a batch, so that later changes are attributed to the loop."""
        self._moments = [(before, Moment(before)) for before in self._before if not before.is_batch]

    @property
    def remembered(self) -> Sequence[Before]:
        """The saved states, if any; the first belongs to the objects that the roots reach."""
        return self._before

    def resume(self, batch: Any = None) -> None:
        """Record the changes that the loop made since `pause`, and save the current state of the next batch, if any.

        `restore` still returns to the state before the first batch.
        """
        between = Between(self._moments, self._extra_state, self._backend, is_end=batch is None)
        if self._between:
            between.share(self._between[-1])
        seen = ChainMap(*(before.reached.seen for before, _ in self._moments))
        comes = [reached_from([("batch", batch)], Reached(seen=seen)), reached_from(between.news, Reached(seen=seen))]
        kinds = self._kinds_in_hand
        self._kinds_in_hand = kinds if batch is None else [*kinds, self._kind_with_modes([batch])]
        news = [self._remembered(reached, is_new=True) for reached in comes]
        news[0].is_batch = True
        self._moving |= between.places
        self._written |= between.written
        self._placed |= between.moved
        self._resumed = len(self._before), kinds, [(one.versions, one.addresses) for one, _ in self._moments]
        for before, moment in self._moments:
            before.skip(moment.versions, moment.addresses)
        self._before += news
        self._between.append(between)

    @contextmanager
    def taken_back_on_error(self) -> Iterator[None]:
        """Revert the last `resume` if the block fails, because the batch is then not accepted."""
        is_taken = False
        try:
            yield
            is_taken = True
        finally:
            if not is_taken and self._between:
                num_before, self._kinds_in_hand, counted = self._resumed
                del self._before[num_before:], self._between[-1]
                for (before, _), (versions, addresses) in zip(self._moments, counted, strict=True):
                    before.versions, before.addresses = versions, addresses

    def again(self, number: int) -> None:
        """Repeat the changes that the loop made after batch ``number``, counted from 1."""
        for between in self._between[number - 1 : number]:
            between.again()

    def forget(self) -> None:
        """Drop all saved state, so that the next step searches again. Call it before techniques change the modules."""
        self._let_go()
        self._reached, self._watched, self._extra, self._random_state = None, None, [], {}

    @property
    def is_due(self) -> bool:
        """True if passes with the current modes and batch kinds still have to be observed."""
        return self._observes and not self.kinds.issuperset(self._kinds_in_hand)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe which existing tensors the block writes, so that `restore` can undo these writes."""
        copies = (saved for before in self._before for _, saved in before.copies)
        copied = [saved.key for saved in copies if isinstance(saved, SavedTensor) and saved.key is not None]
        try:
            with Writes(copied) as self._writes:
                yield
        finally:
            self._take_writes()
            self._writes = None

    def passed(self) -> None:
        """Record the tensors and places that successful passes wrote. Call it before the update."""
        self._take_writes()
        if newly := self._newly_written():
            self._late |= {*newly} - self._copied_names()
            self._written.update(newly)
        is_looked_at = self._writes is not None or self._sampled_steps.is_due
        self._sampled_steps.passed(looked=is_looked_at)
        if self._writes is not None:
            copies = [one for before in self._before for one in before.copies if one[0]]
            self._written.update(name for name, saved in copies if name not in self._written and saved.is_changed())
            places = [one for before in self._before for one in before.places]
            self._placed.update(name for name, saved in places if name not in self._placed and saved.is_changed())
        if is_looked_at:
            self._moving.update(name for before in self._before for name, *_ in before.changed())
            news = [*self._news(self._before[0])]
            self._stays = [one for one in news if id(one[1]) in self._new_ids]
            self._new_ids = {id(value) for _, value in news}

    def observed(self, *, is_all: bool = True) -> None:
        """Mark the passes since `remember` as observed.

        Args:
            is_all: whether passes of this kind need no further observation.
        """
        if self.is_due and is_all:
            self.kinds.update(self._kinds_in_hand)
        self.is_updating = True

    def done(self) -> None:
        """Drop the saved state after a completed step."""
        self._let_go()
        self._extra, self._failed, self._left, self._random_state = [], [], [], {}
        self._moments, self._between, self._resumed = [], [], ()
        if self._stays and self._reached is not None:  # objects that disappeared again are not tracked
            more = reached_from(self._stays, self._reached)
            self._reached.add(more)
            self._walked.extend(contents_of(more))
            self._watched, self._stays = None, []

    def leave(self) -> bool:
        """Keep the changes that only failed tries made, and return whether there are any. It works once per step.

        Such a change may be the reason why a later try succeeds, such as a counter that makes a test fail only once.
        """
        if self._left or not self._failed:
            return False
        self._begin_with([(place, content) for _, place, _, content in self._failed])
        self._left, self._failed = [(name, place, before) for name, place, before, _ in self._failed], []
        return True

    @contextmanager
    def as_failed(self) -> Iterator[None]:
        """Apply the changes of the last failed try inside the block. Code in the block must undo its own changes."""
        counted = [(before.watched.versions(), before.watched.addresses()) for before in self._before]
        for _, place, _, content in self._failed:
            place.fill(content)
        try:
            yield
        finally:
            for _, place, content, _ in self._failed:
                place.fill(content)
            for before, (versions, addresses) in zip(self._before, counted, strict=True):
                before.skip(versions, addresses)

    @property
    def has_left_state(self) -> bool:
        """True if `leave` kept a change in a place that successful passes change as well."""
        return any(name in self._moving for name, _, _ in self._left)

    def written(self) -> list[Tensor]:
        """Return the tensors that existed before the passes and that passes were observed to write."""
        reached = (one for before in self._before for one in before.reached.tensors.values())
        return [tensor for name, tensor in reached if name in self._written and not tensor.is_meta]

    def iterators(self) -> set[str]:
        """Return the names of iterators from which training code may draw further items."""
        return {one.name for before in self._before for one in before.iterators}

    def moved_iterators(self) -> list[str]:
        """Return the names of the iterators that have advanced, which cannot be put back."""
        return [one.name for before in self._before for one in before.iterators if one.has_moved()]

    def settle(self, *, all_of_it: bool = False) -> None:
        """Restore those places kept by `leave` that successful passes change as well.

        Args:
            all_of_it: whether to restore all places kept by `leave`.
        """
        self._begin_with([(place, content) for name, place, content in self._left if all_of_it or name in self._moving])
        self._left = [] if all_of_it else [one for one in self._left if one[0] not in self._moving]

    def _begin_with(self, contents: Sequence[tuple[Place, Any]]) -> None:
        """Replace the contents of containers (`Place`), in the program and in the saved state."""
        for place, content in contents:
            place.fill(content)
        for before in self._before:
            numbers = {id(place): number for number, (_, place) in enumerate(before.reached.places)}
            for place, content in contents:
                if id(place) in numbers:
                    before.contents.replace(numbers[id(place)], content)

    def look(self) -> None:
        """Find the changes made by passes, and list in ``lost`` the changes that cannot be undone.

        Callers that undo changes themselves call this first. Otherwise `restore` calls it.
        """
        if not self._has_looked:
            self._take_writes()
            changed = [one for before in self._before for one in before.changed()]
            self._failed = [one for one in changed if one[0] not in self._moving] or self._failed
            written = {*self._newly_written()} - self._copied_names() | self._late
            unrepeated = (name for one in self._between for name in one.lost)
            moved = (f"the position of {name}" for name in self.moved_iterators())
            self.lost = self.lost or (*sorted(written), *unrepeated, *moved)
        self._has_looked = True

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved state. It may be called repeatedly."""
        self.look()
        changed = [one for before in self._before for one in before.changed()]
        for _, place, content, _ in changed:
            place.fill(content)
        for before in self._before:
            for _, saved in (*before.places, *reversed(before.copies)):  # the oldest copy must win
                saved.restore()
            for tensor, has_gradient in zip(before.watched.leaves, before.have_gradients, strict=True):
                if tensor.requires_grad != has_gradient:
                    tensor.requires_grad_(has_gradient)
            for tensor, gradient, content in before.gradients:
                tensor.grad = gradient if gradient is None or content is None else gradient.copy_(content)
            for generator in before.generators:
                generator.restore()
            if before.hooks is not None:
                before.hooks.restore()
        for one, state in zip(self._extra_state, self._extra, strict=bool(self._extra)):
            one.load_state_dict(copy.deepcopy(state))
        if self._random_state:
            self._backend.restore_random_state(self._random_state)
        for before in self._before:
            before.versions, before.addresses = before.watched.versions(), before.watched.addresses()
        self._has_looked = False

    # -- before a step -------------------------------------------------------------------------------------------------

    def _walk(self) -> Reached:
        """Search all roots. An object of both the model and the optimizer gets its name from the model."""
        theirs = Reached(seen={id(one): one for one in self._extra_state})
        found = reached_from(self._roots.items(), theirs)
        found.seen.update(theirs.seen)
        if self._observes:
            found.add(reached_from([(_OPTIMIZER, self._optimizer)], found))
            self._moving.update(name for name, _ in found.places if name.startswith(_OPTIMIZER))  # changed by updates
        else:  # FSDP replaces module parameters and tracks that itself
            found.places.clear()
        return found

    def _let_go(self) -> None:
        """Drop the saved state, but keep the memory of copies that the next step will refill."""
        for name, saved in (one for before in self._before for one in before.copies if one[0] in self._written):
            if isinstance(saved, SavedTensor):
                self._old_copies[name] = saved.content
        self._before = []

    def _kind_with_modes(self, batch: Any) -> Any:
        assert self._reached is not None
        return tuple(module.training for module in self._reached.modules), _kind_of(batch)

    @torch.no_grad()
    def _remembered(self, reached: Reached, *, is_new: bool) -> Before:
        is_due = self.is_due
        watched = self._watched_of(reached, is_new=is_new, is_due=is_due)
        before = Before(reached, watched, watched.places.contents())
        before.copies = [(name, self._copied(name, tensor)) for name, tensor in watched.copied]
        before.places = [(name, SavedPlace.of(tensor)) for name, tensor in watched.placed]
        before.versions, before.addresses = watched.versions(), watched.addresses()
        before.have_gradients = [tensor.requires_grad for tensor in watched.leaves]
        gradients = ((one, one.grad) for one in watched.leaves if one.requires_grad)
        before.gradients = [(one, grad, None if grad is None else grad.clone()) for one, grad in gradients]
        most_bytes = _MOST_ARRAY_BYTES if is_due else SMALL_BYTES
        for name, array in reached.arrays:
            if array.flags.writeable and (array.nbytes <= most_bytes or name in self._written):
                before.copies.append((name, SavedArray(array, array.copy())))
        before.generators = [SavedGenerator.of(generator) for _, generator in reached.generators]
        before.hooks = SavedHooks(watched.hooks, watched.leaves) if self._observes else None
        before.iterators = [SavedIterator.of(name, iterator) for name, iterator in reached.iterators]
        return before

    def _watched_of(self, reached: Reached, *, is_new: bool, is_due: bool) -> Watched:
        known = is_due, bool(self.kinds), len(self._written), len(self._placed)
        if reached is self._reached and self._watched is not None and self._watched_for == known:
            return self._watched
        watched = Watched(Places([place for _, place in reached.places]), hooks=containers_of(reached.modules))
        buffers = {id(one): module for module in reached.modules for one in module._buffers.values()}
        for name, tensor in reached.tensors.values():
            is_seen = bool(self.kinds) and not is_due and has_storage(tensor)
            owner = buffers.get(id(tensor))
            if self._is_copied(name, tensor, owner, is_seen and not is_new):
                watched.copied.append((name, tensor))
            if not self._observes and owner is None:
                continue  # FSDP writes and frees gathered parameters, so they cannot be copied
            if has_storage(tensor):
                watched.stored.append((name, tensor))
                if name in self._placed or (is_due and not is_marked(tensor) and not name.startswith(_OPTIMIZER)):
                    watched.placed.append((name, tensor))
            if tensor.is_leaf:
                watched.leaves.append(tensor)
            if not tensor.is_inference():  # inference tensors have no version counter
                watched.counted.append((name, tensor))
        if reached is self._reached:
            self._watched, self._watched_for = watched, known
        return watched

    def _is_copied(self, name: str, tensor: Tensor, owner: nn.Module | None, is_seen: bool) -> bool:
        """Return whether to copy a tensor before the step. ``owner`` is the module if the tensor is a buffer.

        A tensor that any step has written is always copied. Without observation, only BatchNorm's buffers are copied in
        addition.

        With observation, parameters, the batch and the optimizer's tensors are not copied unless a step has written
        them. Small tensors and floating-point buffers are copied as long as nothing was observed about them. This
        covers observed steps (numpy's writes are found by comparison), new tensors and tensors that cannot be observed.
        Floating-point buffers are included because BatchNorm's kernels do not change their version counters.
        """
        if name in self._written:
            return True
        if not self._observes:
            return isinstance(owner, _NormBase)
        # Other layouts are only watched by their version counters.
        is_plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested)
        if isinstance(tensor, nn.Parameter) or name.startswith(("batch", _OPTIMIZER)) or not is_plain:
            return False
        if tensor.requires_grad:  # user code may train it in a separate step
            return tensor.is_leaf and tensor.nbytes <= SMALL_BYTES
        is_small = tensor.nbytes <= SMALL_BYTES
        return not is_seen and (is_small or (owner is not None and tensor.is_floating_point()))

    def _copied(self, name: str, tensor: Tensor) -> SavedTensor:
        """Copy a tensor, into the memory of its last copy if possible."""
        return SavedTensor.of(tensor, self._old_copies.pop(name, None), as_bytes=self._observes)

    def _copied_strangers(self) -> Iterator[SavedTensor]:
        for key, reference in [*self._strangers.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._strangers[key]
            else:
                yield SavedTensor(storage, bytes_in(storage).clone())

    def _news(self, before: Before) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each object that was added to a place since the search.

        For a list that only the loop extends, only the end of the list is examined.
        """
        for number in self._walked.differing(before.contents):
            name, content = before.reached.places[number][0], before.contents[number]
            if isinstance(content, dict) or name in self._moving:
                pairs = content.items() if isinstance(content, dict) else enumerate(content)
                yield from ((name_of_item(name, key), value) for key, value in pairs if self._is_new(value))
            else:
                yield from ((name, value) for value in takewhile(self._is_new, reversed(content)))

    def _is_new(self, value: Any) -> bool:
        assert self._reached is not None
        return may_hold_state(value) and id(value) not in self._reached.seen

    # -- after a pass --------------------------------------------------------------------------------------------------

    def _take_writes(self) -> None:
        """Record the names of tensors that were observed to be written, and keep their earlier contents."""
        if self._writes is None or not self._before:
            return
        reached = [one for before in self._before for one in before.reached.tensors.values()]
        reached += [(name, saved.before) for before in self._before for name, saved in before.places]
        names = {key_of(tensor): name for name, tensor in reversed(reached) if has_storage(tensor)}
        for key, (storage, content) in self._writes.written.items():
            self._before[0].copies.append((names.get(key, ""), SavedTensor(storage, content)))
            if key in names:
                self._written.add(names[key])
            else:
                self._strangers[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._writes.written.clear()

    def _copied_names(self) -> set[str]:
        return {name for before in self._before for name, _ in before.copies}

    def _newly_written(self) -> list[str]:
        """Return the names of tensors that were written or moved to another storage, but were not saved."""
        found: list[str] = []
        for before in () if self.is_updating else self._before:
            versions, addresses = before.watched.versions(), before.watched.addresses()
            if versions != before.versions:
                pairs = zip(before.watched.counted, before.versions, versions, strict=True)
                found += [name for (name, _), old, new in pairs if old != new and name not in self._written]
            if addresses != before.addresses:
                pairs = zip(before.watched.stored, before.addresses, addresses, strict=True)
                found += [name for (name, _), old, new in pairs if old != new and name not in self._placed]
        return found


@contextmanager
def left_alone(
    roots: Mapping[str, Any],
    backend: Backend,
    batch: Any = None,
    *,
    extra_state: Sequence[Stateful] = (),
    optimizer: torch.optim.Optimizer | None = None,
    observes: bool = True,
) -> Iterator[Undo]:
    """Undo, after the block, all changes that it makes to state of the roots, a batch and the random state.

    Args:
        roots: objects whose reachable state is restored, by name.
        backend: the backend of the device.
        batch: the batch that the block uses, if any.
        extra_state: objects that are restored through their ``state_dict``.
        optimizer: the optimizer of the model, if any.
        observes: whether to observe passes and restore Python state.
    """
    undo = Undo(roots, backend, extra_state, optimizer, observes)
    undo.remember(batch)
    with undo.observing() if observes else nullcontext():
        try:
            yield undo
        finally:
            undo.restore()


def _kind_of(batch: Any) -> Any:
    """Return the fields, dtypes and dimensions of a batch, on which a model's code may depend; lengths are ignored."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.dim()
    if isinstance(batch, Mapping):
        return tuple((name, _kind_of(value)) for name, value in batch.items())
    return tuple(map(_kind_of, batch)) if isinstance(batch, list | tuple) else type(batch)
