"""The options that methods have which take parts away: which share of them, and how their importance is judged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from plimsoll.records.plan import Choice
from plimsoll.weights.shrink._base import Need
from plimsoll.weights.shrink._options import share_fault, unknown_option, value_fault

Importance = Literal["magnitude", "taylor", "activation"]

IMPORTANCES: tuple[Importance, ...] = ("magnitude", "taylor", "activation")

NEEDS: dict[str, frozenset[Need]] = {
    "taylor": frozenset({"gradients"}),
    "activation": frozenset({"batches"}),
}
"""What a way to judge importance must be given; others look at the weights alone."""

SHARE = 0.25
"""What is taken away where nobody says how much."""


def share_of(choice: Choice) -> float:
    """Return the share that is taken away; call it only where `options_fault` found none."""
    return float(choice.options.get("share", SHARE))


def importance_of(choice: Choice, default: str = "magnitude") -> str:
    """Return how parts are judged."""
    return str(choice.options.get("importance", default))


def options_fault(
    choice: Choice, names: Collection[str] = ("share", "importance"), importances: Collection[str] = IMPORTANCES
) -> str | None:
    """Return a sentence that says which option or value is wrong, or ``None``."""
    fault = unknown_option(choice, dict.fromkeys(names)) or share_fault("share", choice.options.get("share", SHARE))
    known = tuple(importances)
    return fault or value_fault("importance", choice.options.get("importance", known[0]), known)


def num_removed(num_parts: int, share: float) -> int:
    """Return how many of so many parts a share is, to the nearest."""
    return round(num_parts * share)


def removal_fault(what: str, num_parts: int, share: float) -> str | None:
    """Return a sentence where a share of so many parts is none of them, or all."""
    removed = num_removed(num_parts, share)
    if 0 < removed < num_parts:
        return None
    if num_parts < 2:
        return f"there is {num_parts} of {what}, and none can be spared: leave this out"
    one = 1 / num_parts
    which = "none" if removed == 0 else "all"
    return (
        f"a share of {share:g} of {num_parts} {what} is {which} of them: give a share from {one:.3g} to {1 - one:.3g}"
    )
