"""What causes that an error's text names have in common: whether it is likely or only possible."""

from __future__ import annotations

from plimsoll.records.oom_text import LikelyCause, OomText


def is_possible(event: OomText, cause: LikelyCause) -> bool:
    """Whether the numbers of a text are those of a cause, be it the likely one or the other."""
    return event.is_oom and cause in (event.likely_cause, event.likely_cause_alt)


def perhaps(event: OomText, cause: LikelyCause) -> str:
    """Begin a title; "" for the likely cause."""
    return "" if event.likely_cause == cause else "perhaps: "
