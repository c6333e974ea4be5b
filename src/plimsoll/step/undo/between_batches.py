"""Recording the changes that a loop makes between two batches of one update, so that they can be repeated.

An update of several batches is undone as a whole, to the state before the first batch. The loop that fetched the
batches does not run again when they are repeated. But its changes between two batches (a counter, a buffer, a dropout
rate, random numbers drawn for the next batch) influence the next batch. A `Moment` therefore saves the state after the
passes of a batch. `Between` compares with it when the loop returns, and repeats the changes later.

Values are set to the recorded ones; nothing is recomputed. Does not cover state that `plimsoll.step.undo.find_state`
does not reach.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from plimsoll.device.base import Backend
from plimsoll.step.undo.find_state import SMALL_BYTES, Place, is_same, name_of_item
from plimsoll.step.undo.hooks import SavedHooks
from plimsoll.step.undo.saved import SavedArray, SavedGenerator, SavedPlace, SavedTensor, is_same_state
from plimsoll.step.undo.state_before_step import Before


class Moment:
    """The state, after the passes of a batch, of all objects that the search for state reached."""

    def __init__(self, before: Before) -> None:
        self.contents = before.watched.places.contents()
        self.versions, self.addresses = before.watched.versions(), before.watched.addresses()
        self.arrays = [saved.array.copy() for saved in _arrays(before)]
        self.are_trained = _are_trained(before)
        self.hooks = SavedHooks(before.watched.hooks, before.watched.leaves)
        self.values = {id(saved): saved.value.clone() for saved in _tensors(before)}
        self.gradients = _gradients(before)


class Between:
    """The changes that the loop has made since the passes of a batch.

    Args:
        moments: for each group of reached objects, the state before the update and the state after the passes.
        extra_state: objects that provide a ``state_dict``.
        backend: the backend of the device; the loop may have drawn from its random numbers.
        is_end: whether no batch follows. If so, the loop may change gradients, for example clip them, because they are
            recomputed.

    Attributes:
        places: names of the containers that have changed.
        news: names and objects that were added to these containers.
        written: names of tensors that were written.
        moved: names of tensors that now refer to another storage.
        lost: names of changed objects that were not copied before the update, and of gradients.
    """

    def __init__(
        self, moments: Sequence[tuple[Before, Moment]], extra_state: Sequence[Any], backend: Backend, *, is_end: bool
    ) -> None:
        self.places: set[str] = set()
        self.news: list[tuple[str, Any]] = []
        self.written: set[str] = set()
        self.moved: set[str] = set()
        self.lost: list[str] = []
        self._changes: list[Callable[[], object]] = [partial(backend.restore_random_state, backend.random_state())]
        for one, moment in moments:
            self._note_places(one, moment)
            self._note_tensors(one, moment)
            self._note_others(one, moment)
            if not is_end and _gradients(one) != moment.gradients:
                self.lost.append("gradients")
        self._extra = [(one, copy.deepcopy(one.state_dict())) for one in extra_state]

    def share(self, before: Between) -> None:
        """Reuse the extra states saved after the previous batch if they are equal, so that only one copy is kept."""
        self._extra = [
            other if is_same_state(one[1], other[1]) else one
            for one, other in zip(self._extra, before._extra, strict=True)
        ]

    @torch.no_grad()
    def again(self) -> None:
        """Make the recorded changes of the loop again."""
        for change in self._changes:
            change()
        for one, state in self._extra:
            one.load_state_dict(copy.deepcopy(state))

    def _note_places(self, before: Before, moment: Moment) -> None:
        contents = before.watched.places.contents()
        for number in moment.contents.differing(contents):
            name, place = before.reached.places[number]
            left, now = moment.contents[number], contents[number]
            self.places.add(name)
            if isinstance(now, dict):
                new = {key: value for key, value in now.items() if key not in left or left[key] is not value}
                self._changes.append(partial(_set, place, new, [*now], left.keys() - now.keys()))
                self.news += [(name_of_item(name, key), value) for key, value in new.items()]
            elif is_same(now[: len(left)], left):
                self._changes.append(partial(_extend, place, now[len(left) :]))
                self.news += [(name, value) for value in now[len(left) :]]
            else:
                self._changes.append(partial(place.fill, now))
                self.news += [(name, value) for value in now]

    def _note_tensors(self, before: Before, moment: Moment) -> None:
        placed, copied = {name for name, _ in before.places}, {name for name, _ in before.copies}
        for (name, tensor), left in zip(before.watched.stored, moment.addresses, strict=True):
            if tensor.data_ptr() != left:
                self.moved.add(name)
                if name in placed:
                    self._changes.append(SavedPlace.of(tensor).restore)
                else:
                    self.lost.append(name)
        noted: set[int | None] = set()
        for (name, tensor), left in zip(before.watched.counted, moment.versions, strict=True):
            if tensor._version != left:
                self.written.add(name)
                if name in copied:
                    now = SavedTensor.of(tensor)
                    noted.add(now.key)
                    self._changes.append(now.restore)
                else:
                    self.lost.append(name)
        others = [saved for saved in _tensors(before) if saved.key not in noted and id(saved) in moment.values]
        for saved in others:  # compared, because writes through ``.data`` do not change the version
            if not torch.equal(saved.value, moment.values[id(saved)]):
                self._changes.append(SavedTensor(saved.owner, saved.value.clone()).restore)

    def _note_others(self, before: Before, moment: Moment) -> None:
        hooks = SavedHooks(before.watched.hooks, before.watched.leaves)
        if hooks.content != moment.hooks.content:
            self._changes.append(hooks.restore)
        for saved, left in zip(_arrays(before), moment.arrays, strict=True):
            if SavedArray(saved.array, left).is_changed():
                self._changes.append(SavedArray(saved.array, saved.array.copy()).restore)
        self._changes += [SavedGenerator.of(generator).restore for _, generator in before.reached.generators]
        for tensor, was_trained in zip(before.watched.leaves, moment.are_trained, strict=True):
            if tensor.requires_grad != was_trained:
                self._changes.append(partial(tensor.requires_grad_, tensor.requires_grad))


def _arrays(before: Before) -> list[SavedArray]:
    return [saved for _, saved in before.copies if isinstance(saved, SavedArray)]


def _tensors(before: Before) -> list[SavedTensor]:
    """Return the saved storages of at most `SMALL_BYTES`."""
    copies = (saved for _, saved in before.copies if isinstance(saved, SavedTensor) and saved.key is not None)
    return [saved for saved in copies if saved.content.nbytes <= SMALL_BYTES]


def _are_trained(before: Before) -> list[bool]:
    return [tensor.requires_grad for tensor in before.watched.leaves]


def _gradients(before: Before) -> list[tuple[int, int]]:
    """Return the identity and version of each gradient; an identity is valid while the gradient is alive."""
    gradients = (tensor.grad for tensor in before.watched.leaves)
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]


def _set(place: Place, new: dict[Any, Any], order: Sequence[Any], gone: set[Any]) -> None:
    content = {key: value for key, value in (place.content() | new).items() if key not in gone}
    place.fill({key: content[key] for key in order if key in content} | content)


def _extend(place: Place, news: Any) -> None:
    place.fill(place.content() + news)
