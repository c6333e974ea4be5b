"""What was reached from a training, and how it was before a step; for `plimsoll.step.undo.step_state`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plimsoll.step.undo.contents import Contents, Places
from plimsoll.step.undo.find_state import Place, Reached
from plimsoll.step.undo.hooks import SavedHooks
from plimsoll.step.undo.saved import SavedArray, SavedGenerator, SavedIterator, SavedPlace, SavedTensor


@dataclass(slots=True)
class Watched:
    """What is looked after in each step of what was reached: found once, for a step must cost microseconds.

    Attributes:
        places: what has a content.
        copied: tensors that are copied, by name.
        placed: tensors of which it is noted where they are.
        leaves: tensors that may be frozen and unfrozen.
        counted: tensors whose versions say whether they were written.
        stored: tensors that have an address.
        hooks: what modules keep their hooks in.
    """

    places: Places
    copied: list[tuple[str, Tensor]] = field(default_factory=list)
    placed: list[tuple[str, Tensor]] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    counted: list[tuple[str, Tensor]] = field(default_factory=list)
    stored: list[tuple[str, Tensor]] = field(default_factory=list)
    hooks: list[dict[int, Any]] = field(default_factory=list)

    def versions(self) -> list[int]:
        """How often each tensor that counts it was written."""
        return [tensor._version for _, tensor in self.counted]

    def addresses(self) -> list[int]:
        """Where the values of each tensor are that has a storage."""
        return [tensor.data_ptr() for _, tensor in self.stored]


@dataclass(slots=True)
class Before:
    """What was reached, and how it was before the step."""

    reached: Reached
    watched: Watched
    contents: Contents
    places: list[tuple[str, SavedPlace]] = field(default_factory=list)
    copies: list[tuple[str, SavedTensor | SavedArray]] = field(default_factory=list)
    generators: list[SavedGenerator] = field(default_factory=list)
    iterators: list[SavedIterator] = field(default_factory=list)
    hooks: SavedHooks | None = None
    is_batch: bool = False  # one of several, with which a loop has finished
    versions: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    have_gradients: list[bool] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)

    def changed(self) -> Iterator[tuple[str, Place, Any, Any]]:
        """The places that have other things in them now: name, place, what was in it, and what is."""
        now = self.watched.places.contents()
        for number in self.contents.differing(now):
            yield *self.reached.places[number], self.contents[number], now[number]

    def skip(self, versions: list[int], addresses: list[int]) -> None:
        """Do not count what others have written, or moved, since tensors had these versions and addresses."""
        counts = zip(self.versions, versions, self.watched.versions(), strict=True)
        places = zip(self.addresses, addresses, self.watched.addresses(), strict=True)
        self.versions = [first + now - then for first, then, now in counts]
        self.addresses = [now if first == then else first for first, then, now in places]
