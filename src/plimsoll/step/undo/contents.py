"""The contents of many Python containers (`Place`), saved in each step within microseconds.

A copy of each container would cost more than the step of a small model. Thousands of new lists and dicts per step
trigger Python's garbage collector, which then searches the whole program. So the items of all places are stored in one
flat list. `Contents` knows the offset of each place and builds a container on request. It finds differences by
bisection.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, chain
from typing import Any

from plimsoll.step.undo.find_state import Place, Reached, is_of_pass, is_same


class Places:
    """Python containers (`Place`) whose contents are saved repeatedly.

    Args:
        places: the containers. `contents` uses the same indices.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._containers = [place.container() for place in places]
        self._others = [(number, places[number]) for number, one in enumerate(self._containers) if one is None]
        first = [place.content() if one is None else one for place, one in zip(places, self._containers, strict=True)]
        self._are_dicts = [isinstance(one, dict) for one in first]
        self._values = [one.values() if isinstance(one, dict) else () for one in self._containers]

    def contents(self) -> Contents:
        """Return the current contents of all places."""
        containers, values = self._containers.copy(), self._values.copy()
        for number, place in self._others:
            containers[number] = content = place.content()
            values[number] = content.values() if self._are_dicts[number] else ()
        return Contents(self._are_dicts, containers, values)


class Contents:
    """The contents of Python containers (`Place`) at one time: the items of lists, or the keys and values of dicts.

    Args:
        are_dicts: for each container, whether its content is a dict.
        containers: the content of each container.
        values: for each container, the values of its dict; empty if the content is not a dict.
    """

    def __init__(self, are_dicts: list[bool], containers: Sequence[Any], values: Sequence[Collection[Any]]) -> None:
        self._are_dicts = are_dicts
        self._num_items: list[int] = []
        self._num_values: list[int] = []
        self._items: list[Any] = []
        self._values: list[Any] = []
        while self._num_items != (lengths := [*map(len, containers)]):  # repeated if another thread changed a container
            self._num_items, self._num_values = lengths, [*map(len, values)]
            self._items, self._values = [*chain.from_iterable(containers)], [*chain.from_iterable(values)]
        self._begins: tuple[list[int], list[int]] | None = None
        self._replaced: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._are_dicts)

    def __getitem__(self, number: int) -> Any:
        """Return the content of a place as a new dict or list."""
        if number in self._replaced:
            return self._replaced[number]
        items, values = self._parts(number, number + 1)
        return dict(zip(items, values, strict=True)) if self._are_dicts[number] else items

    def replace(self, number: int, content: Any) -> None:
        """Replace the saved content of a place."""
        self._replaced[number] = content

    def extend(self, other: Contents) -> None:
        """Append the contents of other containers (`Place`). Their indices continue after the existing ones."""
        self._are_dicts = self._are_dicts + other._are_dicts
        self._num_items, self._num_values = self._num_items + other._num_items, self._num_values + other._num_values
        self._items, self._values, self._begins = self._items + other._items, self._values + other._values, None

    def let_go(self) -> None:
        """Drop references to results of passes. A container that held one always counts as different afterwards."""
        nothing = object()
        self._items, self._values = (
            [nothing if is_of_pass(one) else one for one in part] for part in (self._items, self._values)
        )

    def differing(self, other: Contents) -> list[int]:
        """Return the indices of the containers that hold other objects than in ``other``, or in another order."""
        found = [number for number, content in self._replaced.items() if not is_same(content, other[number])]
        waiting = [(0, len(self))] if len(self) else []
        while waiting:
            begin, end = waiting.pop()
            if self._num_items[begin:end] == other._num_items[begin:end] and all(
                map(is_same, self._parts(begin, end), other._parts(begin, end))
            ):
                continue
            if end - begin == 1:
                found += [begin] if begin not in self._replaced else []
            else:
                waiting += [((begin + end) // 2, end), (begin, (begin + end) // 2)]
        return found

    def _parts(self, begin: int, end: int) -> tuple[list[Any], list[Any]]:
        """Return the saved items (keys of dicts) and dict values of several containers (`Place`).

        The containers are those with indices from ``begin`` up to, but not including, ``end``.
        """
        if (begin, end) == (0, len(self)):
            return self._items, self._values
        if self._begins is None:
            lengths = self._num_items, self._num_values
            self._begins = [*accumulate(lengths[0], initial=0)], [*accumulate(lengths[1], initial=0)]
        items, values = self._begins
        return self._items[items[begin] : items[end]], self._values[values[begin] : values[end]]


def contents_of(reached: Reached) -> Contents:
    """Return the contents of all containers that the search reached, without results of passes."""
    contents = Places([place for _, place in reached.places]).contents()
    contents.let_go()
    return contents
