"""Values of the options ``share`` and ``importance``, which several compression methods have."""

from __future__ import annotations

from typing import Any

from plimsoll.records.plan import Choice
from plimsoll.records.shrink import SHARE, options_of


def share_of(choice: Choice) -> float:
    """Return the share (0 to 1) of parts, such as heads or channels, that a choice removes.

    If the choice does not set it, return the default.
    """
    share: Any = options_of(choice)["share"]
    return float(SHARE if share is None else share)


def importance_of(choice: Choice) -> str:
    """Return the name of a choice's importance measure, such as ``magnitude``."""
    return str(options_of(choice)["importance"])


def num_removed(num_parts: int, share: float) -> int:
    """Return the number of parts (heads, channels, ...) to remove, rounded to the nearest integer."""
    return round(num_parts * share)


def removal_fault(what: str, num_parts: int, share: float) -> str | None:
    """Return an error message if a share would remove no part or all parts; else ``None``.

    ``what`` names the parts in the message, such as ``heads``.
    """
    removed = num_removed(num_parts, share)
    if 0 < removed < num_parts:
        return None
    if num_parts < 2:
        return f"the model has {num_parts} {what}, so none can be removed: leave this out"
    one = 1 / num_parts
    which = "none" if removed == 0 else "all"
    return (
        f"a share of {share:g} of {num_parts} {what} is {which} of them: give a share from {one:.3g} to {1 - one:.3g}"
    )
