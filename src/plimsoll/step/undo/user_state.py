"""The Python state of code outside this package (`plimsoll.step.undo.find_state`), tracked from one call to the next.

The tracked work is an optimizer's update, or a function that runs after an update. State is held in containers such as
lists, dicts and attributes, each of which is called a place (`Place`). The state of the work's owner is searched once,
and again when a new object appears in a place. Every place and up to 64 MiB of arrays are copied in three cases: in the
first calls, in ever fewer later calls (`plimsoll.step.sampled_steps`), and when work is retried. Other calls copy only
the places that were observed to change, the 256 places nearest to the owner, and up to 1 MiB of arrays. The other
places and arrays are compared with their last known content. If failed work changed one of them, it can be named.

Some objects are replaced again and again, such as the current batch or a list of learning rates. They are searched
anew before each call and not kept alive in between, because they may be large. Tensors are found but not copied.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy

from plimsoll.step.sampled_steps import SampledSteps
from plimsoll.step.undo.find_state import (
    SMALL_BYTES,
    Place,
    Reached,
    is_same,
    may_hold_state,
    name_of_item,
    reached_from,
)
from plimsoll.step.undo.saved import SavedArray

Named = tuple[str, Any]
Array = numpy.ndarray[Any, Any]

Moving = set[tuple[str, Any]]
"""Items that successful work has changed: the name of a place (`Place`), and a key in its content."""
Slot = tuple[str, Any]
"""The name of a place (`Place`), and a key or an index in its content."""

_NUM_NEAR = 256
_MOST_BYTES_AT_A_LOOK = 64 << 20


@dataclass(slots=True)
class Known:
    """A container that may hold state (`Place`), and its content when it was last copied."""

    name: str
    place: Place
    content: Any

    def change(self) -> Any:
        """Return the current content if it differs from the last copy, otherwise ``None``."""
        now = self.place.content()
        return now if (now or self.content) and not is_same(now, self.content) else None

    def values(self) -> Iterator[tuple[Slot, Any]]:
        """Yield slot and value of each item of ``content`` that may hold state, if ``content`` is a dict or list."""
        pairs: Any = self.content.items() if isinstance(self.content, dict) else ()
        if isinstance(self.content, list):
            pairs = enumerate(self.content)
        return (
            ((self.name, key), value)
            for key, value in pairs
            if may_hold_state(value) or isinstance(value, FunctionType)  # its closure may hold state
        )


class Kept:
    """The Python state that can be reached from some objects (the roots), to be tracked over repeated work.

    Args:
        roots: returns the roots in groups; an object that several groups reach belongs to the first of them.
        apart: returns objects that the search skips, with everything that only they reach.

    Attributes:
        moving: the items of places that successful work has changed.
        parts: the objects that each group of roots reaches.
        is_due: whether all places are copied before the current work, not only those likely to change.
        copied: the places that are copied, with their content before the work.
        others: the places that are not copied.
    """

    def __init__(
        self, roots: Callable[[], Sequence[Sequence[Named]]], apart: Callable[[], Sequence[Any]] = tuple
    ) -> None:
        self.moving: Moving = set()
        self.parts: list[Reached] = []
        self.copied: list[Known] = []
        self.others: list[Known] = []
        self.is_due = True
        self._roots, self._apart, self._sampled_steps = roots, apart, SampledSteps()
        self._lasting: list[Reached] = []  # for each group of roots, the objects that are not replaced
        self._places: list[list[Known]] = []  # the places of each group
        self._exchanging: list[list[Known]] = []  # the places in which objects are replaced
        self._often: list[Known] = []  # places that are copied before each work
        self._rarely: list[Known] = []  # the other places
        self._chosen_for = -1  # number of changing places for which these lists were chosen
        self._kept: dict[int, Any] = {}  # objects that were searched or are left out, by id
        self._ids: dict[Slot, int] | None = None  # id of the value in each slot at the last full search
        self._is_first = True
        self._exchanged: set[Slot] = set()
        self._changing: set[str] = set()  # names of places that have changed
        self._written: set[str] = set()  # names of arrays that have been written
        self._prints: dict[str, tuple[weakref.ref[Array], int]] = {}

    def begin(self, *, is_again: bool = False) -> None:
        """Find the objects that the roots reach now, before work, and copy the places that are due for a copy.

        Args:
            is_again: whether the work has failed before.
        """
        self.is_due = is_again or self._sampled_steps.is_due
        roots = self._roots()
        has_all = all(id(value) in self._kept for group in roots for _, value in group)
        if not self._lasting or not has_all or self._is_news():
            self._look_for_all(roots)
        self.parts = []
        for lasting, places in zip(self._lasting, self._exchanging, strict=True):
            slots = (one for known in places for one in known.values() if one[0] in self._exchanged)
            passing = reached_from([(name_of_item(*slot), value) for slot, value in slots], Reached(seen=self._kept))
            self.copied += [Known(name, place, place.content()) for name, place in passing.places]
            self.parts.append(_joined(lasting, passing))

    def arrays(self) -> Iterator[tuple[str, Array, SavedArray | None]]:
        """Yield the name of each writable array, the array, and its copy; ``None`` if it is not copied this time."""
        num_bytes = 0
        for name, array in (one for part in self.parts for one in part.arrays if one[1].flags.writeable):
            num_bytes += array.nbytes
            is_small = num_bytes <= SMALL_BYTES or name in self._written
            if not is_small:
                self._note(name, array)
            is_copied = is_small or (self.is_due and num_bytes <= _MOST_BYTES_AT_A_LOOK)
            yield name, array, SavedArray(array, array.copy()) if is_copied else None

    def is_written(self, name: str, array: Array) -> bool:
        """Return whether an array's checksum was recorded and has changed since."""
        noted = self._prints.get(name)
        return noted is not None and noted[0]() is array and noted[1] != _print_of(array)

    @property
    def lasts(self) -> bool:
        """True if the reached objects will be the same before the next work, unless the loop changes them."""
        return bool(self._lasting) and not self._exchanged

    def passed(self, changed: Iterable[tuple[Known, Any]]) -> None:
        """Record which places successful work has changed, and drop objects that are replaced each time."""
        if self.is_due:
            arrays = (one for part in self.parts for one in part.arrays)
            self._written.update(name for name, array in arrays if self.is_written(name, array))
        self._sampled_steps.passed(looked=self.is_due)
        if self._has_come(changed) or self._is_first:
            self.forget()
        for places in self._exchanging:
            for known in places:  # these are copied before each work
                known.content = type(known.content)()
        self.parts, self.copied, self.others, self._is_first = [], [], [], False

    def forget(self) -> None:
        """Drop all references to objects. The names of changed places and arrays are kept."""
        self.parts, self.copied, self.others = [], [], []
        self._lasting, self._places, self._exchanging, self._kept = [], [], [], {}
        self._often, self._rarely, self._chosen_for = [], [], -1

    def _look_for_all(self, roots: Sequence[Sequence[Named]]) -> None:
        apart = {id(one): one for one in self._apart()}
        given = {id(value) for group in roots for _, value in group} | apart.keys()
        known_before = [known for places in self._exchanging for known in places]
        passing = self._passing_of([one for known in known_before for one in known.values()], given)
        self.forget()
        while True:
            self._walk(roots, apart, passing)
            values = [one for places in self._places for known in places for one in known.values()]
            ids = {slot: id(value) for slot, value in values}
            if self._ids is not None:
                self._exchanged.update(slot for slot, number in ids.items() if self._ids.get(slot, number) != number)
            found = self._passing_of(values, given)
            if found.keys() <= passing.keys():
                break
            passing |= found  # objects that must not be kept alive
        self._ids = ids
        # Objects that a walk skips do not count as new the next time.
        self._kept.update((id(value), value) for _, value in values if id(value) not in passing)
        exchanging = {name for name, _ in self._exchanged}
        self._exchanging = [[known for known in places if known.name in exchanging] for places in self._places]
        self._changing |= exchanging
        self._chosen_for = -1
        self._choose()

    def _passing_of(self, values: Iterable[tuple[Slot, Any]], given: Set[int]) -> dict[int, Any]:
        """Return the values in slots whose value is replaced again and again, except values with an id in ``given``."""
        return {id(value): value for slot, value in values if slot in self._exchanged and id(value) not in given}

    def _walk(self, roots: Sequence[Sequence[Named]], apart: dict[int, Any], passing: dict[int, Any]) -> None:
        lasting, kept = [], {**apart}
        for group in roots:
            lasting.append(reached_from(group, Reached(seen=kept | passing)))
            kept.update(lasting[-1].seen)
            kept.update((id(value), value) for _, value in group)
        self._places = [[Known(name, place, place.content()) for name, place in part.places] for part in lasting]
        self._lasting, self._kept = lasting, kept

    def _choose(self) -> None:
        """Set ``copied`` to the places to copy before this work, and ``others`` to the rest."""
        if self._chosen_for != len(self._changing):
            self._often, self._rarely, self._chosen_for = [], [], len(self._changing)
            for places in self._places:
                for number, known in enumerate(places):
                    is_often = number < _NUM_NEAR or known.name in self._changing
                    (self._often if is_often else self._rarely).append(known)
        self.copied = [*self._often, *self._rarely] if self.is_due else [*self._often]
        self.others = [] if self.is_due else self._rarely

    def _is_news(self) -> bool:
        """Copy the places that are due, and return whether a new object has appeared."""
        self._choose()
        changes = ((known, known.change()) for known in self.copied)
        return self._has_come((known, now) for known, now in changes if now is not None)

    def _has_come(self, changed: Iterable[tuple[Known, Any]]) -> bool:
        """Record changes of places, and return whether a new object has appeared."""
        has_come = False
        for known, now in changed:
            self._changing.add(known.name)
            known.content = now
            others = (id(value) for slot, value in known.values() if slot not in self._exchanged)
            has_come = has_come or any(number not in self._kept for number in others)
        return has_come

    def _note(self, name: str, array: Array) -> None:
        noted = self._prints.get(name)
        if self.is_due or noted is None or noted[0]() is not array:
            self._prints[name] = weakref.ref(array), _print_of(array)


def _joined(one: Reached, other: Reached) -> Reached:
    return Reached(
        tensors=one.tensors | other.tensors,
        arrays=one.arrays + other.arrays,
        generators=one.generators + other.generators,
        iterators=one.iterators + other.iterators,
    )


def _print_of(array: Array) -> int:
    """Return a checksum of all bytes, to detect writes."""
    is_plain = array.flags.c_contiguous and not array.dtype.hasobject
    return zlib.crc32(array.reshape(-1).view(numpy.uint8).data if is_plain else array.tobytes())
