"""Records of the state before a step, used by `plimsoll.step.undo.step_state`."""

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
    """The objects that are checked in each step; selected once, because the check must cost microseconds.

    Attributes:
        places: the containers whose contents are compared.
        copied: tensors that are copied, by name.
        placed: tensors whose storage is recorded.
        leaves: leaf tensors, whose ``requires_grad`` may change.
        counted: tensors whose version counter shows writes.
        stored: tensors that have an address.
        hooks: the containers in which modules store their hooks.
    """

    places: Places
    copied: list[tuple[str, Tensor]] = field(default_factory=list)
    placed: list[tuple[str, Tensor]] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    counted: list[tuple[str, Tensor]] = field(default_factory=list)
    stored: list[tuple[str, Tensor]] = field(default_factory=list)
    hooks: list[dict[int, Any]] = field(default_factory=list)

    def versions(self) -> list[int]:
        """Return the version counter of each tensor that has one."""
        return [tensor._version for _, tensor in self.counted]

    def addresses(self) -> list[int]:
        """Return the data pointer of each tensor that has a storage."""
        return [tensor.data_ptr() for _, tensor in self.stored]


@dataclass(slots=True)
class Before:
    """The objects that a search for state reached, and their state before the step."""

    reached: Reached
    watched: Watched
    contents: Contents
    places: list[tuple[str, SavedPlace]] = field(default_factory=list)
    copies: list[tuple[str, SavedTensor | SavedArray]] = field(default_factory=list)
    generators: list[SavedGenerator] = field(default_factory=list)
    iterators: list[SavedIterator] = field(default_factory=list)
    hooks: SavedHooks | None = None
    is_batch: bool = False  # whether it belongs to one of several batches
    versions: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    have_gradients: list[bool] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)

    def changed(self) -> Iterator[tuple[str, Place, Any, Any]]:
        """Yield each container whose content has changed: its name, the `Place`, the old and the new content."""
        now = self.watched.places.contents()
        for number in self.contents.differing(now):
            yield *self.reached.places[number], self.contents[number], now[number]

    def skip(self, versions: list[int], addresses: list[int]) -> None:
        """Ignore writes and moves that other code made since tensors had these versions and addresses."""
        counts = zip(self.versions, versions, self.watched.versions(), strict=True)
        places = zip(self.addresses, addresses, self.watched.addresses(), strict=True)
        self.versions = [first + now - then for first, then, now in counts]
        self.addresses = [now if first == then else first for first, then, now in places]
