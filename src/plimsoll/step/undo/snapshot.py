"""What code outside of this package keeps in Python, as it is now, so that its work can be undone and done again.

A `Snapshot` holds the contents of places, arrays and generators (`plimsoll.step.undo.user_state`), and in
`Snapshot.run` what the work writes of tensors (`plimsoll.step.undo.written`). `Snapshot.put_back` brings all of it
back, but for what is ``lost``.

Values that only failures change (a list of errors, what makes a test fail once) are told from state by failing twice:
`Snapshot.changes` are what the failed work changed and work that went through never did. A last try leaves them
changed. What moves in that try after all was state: it is put back, and the work is done once more (`Snapshot.run`).

Does NOT cover tensors that the work writes while it is not observed: who makes the snapshot copies those.
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
"""Of work that goes further from try to try, by what its failures leave changed."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_WHOLE = object()
_NOTHING = object()


@dataclass(slots=True)
class Change:
    """What failed work made of one plain value of a place, or of a list of them as a whole.

    It is ``alone`` if all that changed in the place is plain: a flag may say that something else there was made.
    """

    name: str
    place: Place
    key: Any
    value: Any
    alone: bool = True

    def leave(self) -> None:
        """Have the value that the failed work left."""
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
        """Whether the value is still that one."""
        content = self.place.content()
        return (
            are_equal(content, self.value)
            if self.key is _WHOLE
            else _is_equal(content.get(self.key, _NOTHING), self.value)
        )


class Snapshot:
    """What is kept, as it is now.

    Args:
        kept: what is put back, after its `Kept.begin`; `run` adds to what it knows.
        is_observed: whether what the work writes is to be seen and copied.
        is_state: whether a place, by its name, is state whatever moves in it.
        copied: keys of storages that need not be copied because others have done it (see `written.key_of`).
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
        """Names of what was changed and not copied; it may have been changed before the work."""
        places = [one.name for one in self._others if one.change() is not None]
        arrays = [name for name, array in self._other_arrays if self._kept.is_written(name, array)]
        return [*places, *arrays, *(f"the position of {one.name}" for one in self._iterators if one.has_moved())]

    def run(
        self,
        work: Callable[[], object],
        left: Sequence[Change] = (),
        put_back: Callable[[], None] | None = None,
    ) -> None:
        """Run the work, ``left`` being as an earlier failure left it; ``put_back``: who does more than `put_back`."""
        for change in left:
            change.leave()
        with self.writes or nullcontext():
            work()
        still = [change for change in left if change.is_left()]
        changed = self._changed()
        self._kept.moving.update((change.name, change.key) for change in _changes_in(changed))
        if len(still) < len(left):  # state: it must begin as it was
            (put_back or self.put_back)()
            self.run(work, still, put_back)
        else:
            self._kept.passed((known, now) for known, _, now in changed)

    @torch.no_grad()
    def put_back(self) -> None:
        """Bring back what is copied, and note in ``changes`` what may be left as it is. It may be called again."""
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
        """The places in which something else is now: what was in them, and what is."""
        pairs = ((known, before, known.place.content()) for known, before in self._places)
        return [one for one in pairs if (one[1] or one[2]) and not is_same(one[2], one[1])]


def _changes_in(changed: list[tuple[Known, Any, Any]]) -> Iterator[Change]:
    """Name the plain values that have changed."""
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
    """Whether two lists have the same things in them, or equal ones that are plain."""
    return len(some) == len(others) and all(map(_is_equal, some, others))


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (_is_plain(one) and type(one) is type(other) and bool(one == other))
