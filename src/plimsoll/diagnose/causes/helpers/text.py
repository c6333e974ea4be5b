"""Code for causes that are found in an error text: tests whether the text makes a cause likely or only possible."""

from __future__ import annotations

from plimsoll.records.oom_text import LikelyCause, OomText


def is_possible(event: OomText, cause: LikelyCause) -> bool:
    """Return whether the numbers in an error text make a cause the likely or the alternative cause."""
    return event.is_oom and cause in (event.likely_cause, event.likely_cause_alt)


def perhaps(event: OomText, cause: LikelyCause) -> str:
    """Return the start of a finding's title: "" for the likely cause, ``perhaps:`` for the alternative cause."""
    return "" if event.likely_cause == cause else "perhaps: "
