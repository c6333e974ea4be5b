"""What code outside of this package keeps in Python, as it is now, so that its work can be undone and done again.

A `Snapshot` holds the contents of reached places, arrays and generators (`plimsoll.run.reachable`), and in
`Snapshot.run` what the work writes of tensors (`plimsoll.run.written`). `Snapshot.put_back` brings all of it back.

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

from plimsoll.run.reachable import Place, Reached, is_same
from plimsoll.run.saved import SavedArray, SavedGenerator
from plimsoll.run.written import Writes, bytes_in

Moving = set[tuple[str, Any]]
"""Items of places that work has changed which went through, by the name of the place and their own."""

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
            _are_equal(content, self.value)
            if self.key is _WHOLE
            else _is_equal(content.get(self.key, _NOTHING), self.value)
        )


class Snapshot:
    """What was reached, as it is now.

    Args:
        reached: what is put back.
        moving: what work that went through has changed; `run` adds to it.
        is_observed: whether what the work writes is to be seen and copied.
        also: put back together with the rest.
        is_state: whether a place, by its name, is state whatever moves in it.
        copied: keys of storages that need not be copied because others have done it (see `written.key_of`).
    """

    def __init__(
        self,
        reached: Reached,
        moving: Moving,
        *,
        is_observed: bool = True,
        also: Sequence[Callable[[], None]] = (),
        is_state: Callable[[str], bool] = lambda name: False,
        copied: Iterable[int] = (),
    ) -> None:
        self.changes: list[Change] = []
        self._moving, self._also, self._is_state = moving, also, is_state
        self.writes = Writes(copied) if is_observed else None
        self._contents = [(name, place, place.content()) for name, place in reached.places]
        self._saved: list[SavedArray | SavedGenerator] = [
            *(SavedArray(array, array.copy()) for _, array in reached.arrays if array.flags.writeable),
            *(SavedGenerator.of(generator) for _, generator in reached.generators),
        ]

    def run(self, work: Callable[[], object], left: Sequence[Change] = ()) -> None:
        """Run the work, ``left`` being as an earlier failure left it."""
        for change in left:
            change.leave()
        with self.writes or nullcontext():
            work()
        still = [change for change in left if change.is_left()]
        self._moving.update((change.name, change.key) for change in self._changed())
        if len(still) < len(left):  # state: it must begin as it was
            self.put_back()
            self.run(work, still)

    @torch.no_grad()
    def put_back(self) -> None:
        """Bring everything back, and note in ``changes`` what may be left as it is. It may be called again."""
        changes = [change for change in self._changed() if change.alone and not self._is_state(change.name)]
        self.changes = self.changes or [one for one in changes if (one.name, one.key) not in self._moving]
        for write in self.writes.written.values() if self.writes else ():
            bytes_in(write.storage).copy_(write.content)
        for _, place, content in self._contents:
            if not is_same(place.content(), content):
                place.fill(content)
        for saved in self._saved:
            saved.restore()
        for put_back in self._also:
            put_back()

    def _changed(self) -> Iterator[Change]:
        """The plain values that are others now."""
        for name, place, before in self._contents:
            now = place.content()
            if is_same(now, before):
                continue
            if isinstance(now, dict):
                pairs = ((key, before.get(key, _NOTHING), now.get(key, _NOTHING)) for key in before.keys() | now.keys())
                others = [(key, old, new) for key, old, new in pairs if not _is_equal(old, new)]
                plain = [(key, new) for key, old, new in others if _is_plain(old) and _is_plain(new)]
                yield from (Change(name, place, key, new, len(plain) == len(others)) for key, new in plain)
            elif all(map(_is_plain, [*before, *now])):
                yield Change(name, place, _WHOLE, now)


def _is_plain(value: Any) -> bool:
    return value is _NOTHING or type(value) in _PLAIN


def _are_equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(_is_equal, some, others))


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (_is_plain(one) and type(one) is type(other) and bool(one == other))
