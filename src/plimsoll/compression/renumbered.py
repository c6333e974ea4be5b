"""What is noted of layers (`_structure`) after some of them were taken away: names have the numbers of their layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from plimsoll.weights.structure import FIELD, LISTS, refresh_ties


def renumber(model: Any, layers: str, kept: list[int]) -> None:
    """Rename what is noted of layers after some of them were taken away.

    Args:
        model: whose configuration is changed.
        layers: the name of the list of layers.
        kept: the numbers, before, of those that are left.
    """
    before = getattr(model.config, FIELD, None)
    if before:
        model.config.shrunk = renumbered(before, layers, kept)
        refresh_ties(model)


def renumbered(shrunk: Mapping[str, Any], layers: str, kept: list[int]) -> dict[str, Any]:
    """Return what is noted of layers after some of them were taken away; see `renumber`."""
    renamed = functools.partial(_renamed, layers=layers, kept=kept)
    return {kind: _renamed_changes(kind, changes, renamed) for kind, changes in shrunk.items()}


def _renamed(name: str, layers: str, kept: list[int]) -> str | None:
    if not name.startswith(f"{layers}."):
        return name
    number, dot, rest = name[len(layers) + 1 :].partition(".")
    return f"{layers}.{kept.index(int(number))}{dot}{rest}" if int(number) in kept else None


def _renamed_changes(kind: str, changes: Any, renamed: Callable[[str], str | None]) -> Any:
    if kind in LISTS:
        return [name for name in map(renamed, changes) if name is not None]
    if kind != "shared":
        return {name: value for old, value in changes.items() if (name := renamed(old)) is not None}
    after: dict[str, str] = {}
    heirs: dict[str, str] = {}  # where the layer that had the parameters is gone, the first that is left has them
    for old, source in changes.items():
        name = renamed(old)
        if name is not None:
            first = renamed(source) or heirs.setdefault(source, name)
            after |= {} if first == name else {name: first}
    return after
