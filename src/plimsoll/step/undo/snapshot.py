"""Snapshots of the Python state of code outside this package, so that work of this code can be undone and repeated.

A `Snapshot` holds the contents of containers (`Place`), arrays and generators (`plimsoll.step.undo.user_state`).
`Snapshot.run` also copies the tensors that the work writes (`plimsoll.step.undo.written`). `Snapshot.put_back` restores
everything except the objects named in ``lost``.

Only failures change some values, such as a list of errors, or a counter that makes a test fail once. `Snapshot.changes`
lists the values that failed work changed and successful work never did. After a second failure, a last try starts with
these changes. If this try changes such a value again, the value was state after all: it is restored, and the work is
repeated (`Snapshot.run`).

Does not cover tensors that the work writes while it is not observed; the creator of the snapshot copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from plimsoll.step.undo.find_state import Place, is_same
from plimsoll.step.undo.saved import SavedArray, SavedGenerator, SavedIterator
from plimsoll.step.undo.user_state import Kept, Known
from plimsoll.step.undo.written import Writes, bytes_in

MOST_TRIES = 8
"""The maximum number of tries of work whose failures change values, so that a later try may succeed."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_WHOLE = object()
_NOTHING = object()


@dataclass(slots=True)
class Change:
    """A change that failed work made to one plain value of a place, or to a whole list of plain values.

    ``alone`` is true if only plain values changed in the place. If other objects changed, too, the plain value may be a
    flag that records their creation.
    """

    name: str
    place: Place
    key: Any
    value: Any
    alone: bool = True

    def leave(self) -> None:
        """Set the value again that the failed work left in the place."""
        if self.key is _WHOLE:
            self.place.fill(self.value)
            return
        content = self.place.content()
        if self.value is _NOTHING:
            content.pop(self.key, None)
        else:
            content[self.key] = self.value
        self.place.fill(content)

    def is_left(self) -> bool:
        """Return whether the place still has that value."""
        content = self.place.content()
        return (
            are_equal(content, self.value)
            if self.key is _WHOLE
            else _is_equal(content.get(self.key, _NOTHING), self.value)
        )


class Snapshot:
    """A saved state that can be restored.

    Args:
        kept: the state to restore, found by `Kept.begin`. `run` records in it which objects the work changes.
        is_observed: whether to observe and copy the tensors that the work writes.
        is_state: returns whether the place with this name must always be restored, even if only failed work changed it.
        copied: keys of storages that are already copied elsewhere (see `written.key_of`).
    """

    def __init__(
        self,
        kept: Kept,
        *,
        is_observed: bool = True,
        is_state: Callable[[str], bool] = lambda name: False,
        copied: Iterable[int] = (),
    ) -> None:
        self.changes: list[Change] = []
        self._kept, self._is_state = kept, is_state
        self.writes = Writes(copied) if is_observed else None
        self._places = [(one, one.content) for one in kept.copied]
        self._others = kept.others
        arrays = [*kept.arrays()]
        self._other_arrays = [(name, array) for name, array, copied in arrays if copied is None]
        self._saved: list[SavedArray | SavedGenerator] = [copied for _, _, copied in arrays if copied is not None]
        self._saved += [SavedGenerator.of(generator) for part in kept.parts for _, generator in part.generators]
        self._iterators = [SavedIterator.of(*one) for part in kept.parts for one in part.iterators]

    @property
    def lost(self) -> list[str]:
        """Names of objects that changed but were not copied. The change may have happened before the work."""
        places = [one.name for one in self._others if one.change() is not None]
        arrays = [name for name, array in self._other_arrays if self._kept.is_written(name, array)]
        return [*places, *arrays, *(f"the position of {one.name}" for one in self._iterators if one.has_moved())]

    def run(
        self,
        work: Callable[[], object],
        left: Sequence[Change] = (),
        put_back: Callable[[], None] | None = None,
    ) -> None:
        """Run the work and learn from its changes.

        Args:
            work: the work.
            left: changes that an earlier failed try made; they are made again before the work runs.
            put_back: called instead of the method `put_back`, if the caller has more to restore.
        """
        for change in left:
            change.leave()
        with self.writes or nullcontext():
            work()
        still = [change for change in left if change.is_left()]
        changed = self._changed()
        self._kept.moving.update((change.name, change.key) for change in _changes_in(changed))
        if len(still) < len(left):  # such a value was state: restore it and repeat
            (put_back or self.put_back)()
            self.run(work, still, put_back)
        else:
            self._kept.passed((known, now) for known, _, now in changed)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the copies, and list in ``changes`` the changes that may stay. It may be called repeatedly."""
        changed = self._changed()
        changes = [change for change in _changes_in(changed) if change.alone and not self._is_state(change.name)]
        self.changes = self.changes or [one for one in changes if (one.name, one.key) not in self._kept.moving]
        for write in self.writes.written.values() if self.writes else ():
            bytes_in(write.storage).copy_(write.content)
        for known, before, _ in changed:
            known.place.fill(before)
        for saved in self._saved:
            saved.restore()

    def _changed(self) -> list[tuple[Known, Any, Any]]:
        """Return each container whose content has changed, with its old and its new content."""
        pairs = ((known, before, known.place.content()) for known, before in self._places)
        return [one for one in pairs if (one[1] or one[2]) and not is_same(one[2], one[1])]


def _changes_in(changed: list[tuple[Known, Any, Any]]) -> Iterator[Change]:
    """Yield the changes of plain values."""
    for known, before, now in changed:
        name, place = known.name, known.place
        if isinstance(now, dict):
            pairs = ((key, before.get(key, _NOTHING), now.get(key, _NOTHING)) for key in before.keys() | now.keys())
            others = [(key, old, new) for key, old, new in pairs if not _is_equal(old, new)]
            plain = [(key, new) for key, old, new in others if _is_plain(old) and _is_plain(new)]
            yield from (Change(name, place, key, new, len(plain) == len(others)) for key, new in plain)
        elif all(map(_is_plain, [*before, *now])):
            yield Change(name, place, _WHOLE, now)


def _is_plain(value: Any) -> bool:
    return value is _NOTHING or type(value) in _PLAIN


def are_equal(some: list[Any], others: list[Any]) -> bool:
    """Return whether two lists hold identical objects or equal plain values."""
    return len(some) == len(others) and all(map(_is_equal, some, others))


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (_is_plain(one) and type(one) is type(other) and bool(one == other))
