"""The options of a choice, with the defaults of a method, and what is wrong with them in words.

Methods that take parts away have two in common: which share of the parts, and how their importance is judged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from plimsoll.records.plan import Choice, Value
from plimsoll.weights.shrink._base import Need

Importance = Literal["magnitude", "taylor", "activation"]

IMPORTANCES: tuple[Importance, ...] = ("magnitude", "taylor", "activation")

NEEDS: dict[str, frozenset[Need]] = {
    "taylor": frozenset({"gradients"}),
    "activation": frozenset({"batches"}),
}
"""What a way to judge importance must be given; others look at the weights alone."""

SHARE = 0.25
"""What is taken away where nobody says how much."""


def options_of(choice: Choice, defaults: Mapping[str, Value | None]) -> dict[str, Value | None]:
    """Return the options, those that are not given as they are by default."""
    return {**defaults, **choice.options}


def unknown_option(choice: Choice, known: Mapping[str, Value | None]) -> str | None:
    """Return a sentence where an option is none of a method's."""
    for name, value in choice.options.items():
        if name not in known:
            takes = ", ".join(f"`{one}`" for one in known) or "no options"
            return f"`{choice.technique}` has no option `{name}` ({value}): it takes {takes}; leave it out"
    return None


def share_fault(name: str, value: object) -> str | None:
    """Return a sentence where a value is no share, of more than nothing and less than all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return f"`{name}` {value} is not the share that is taken away: give a number between 0 and 1, such as 0.25"
    return None


def count_fault(name: str, value: object, least: int = 1) -> str | None:
    """Return a sentence where a value is no whole number of at least so many."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return f"`{name}` {value} is not a number of them: give a whole number from {least} on"
    return None


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
    unknown = sorted(choice.options.keys() - set(names))
    if unknown:
        return f"{choice.technique} has no option {unknown[0]}: use {', '.join(names)}"
    share = choice.options.get("share", SHARE)
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        return f"{choice.technique} cannot take away a share of {share}: give one between 0 and 1, such as {SHARE}"
    importance = importance_of(choice, next(iter(importances)))
    if importance not in importances:
        return f"{choice.technique} knows no importance {importance}: use {', '.join(importances)}"
    return None


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
