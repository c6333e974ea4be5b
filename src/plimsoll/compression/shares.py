"""The options that methods have which take parts away: which share of them, and how their importance is judged."""

from __future__ import annotations

from typing import Any

from plimsoll.records.plan import Choice
from plimsoll.records.shrink import SHARE, options_of


def share_of(choice: Choice) -> float:
    """Return the share that is taken away."""
    share: Any = options_of(choice)["share"]
    return float(SHARE if share is None else share)


def importance_of(choice: Choice) -> str:
    """Return how parts are judged."""
    return str(options_of(choice)["importance"])


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
