"""The words and numbers of a diagnosis, once: the terminal and the HTML page show the same sheets and sentences."""

from __future__ import annotations

from plimsoll.records.diagnosis import Diagnosis, Finding
from plimsoll.records.units import format_bytes
from plimsoll.report.sheets import Column, Sheet

_FACTS = (Column("What"), Column("How it is known"))
_REMEDY = (Column("To do"), Column("What"))


def headline(diagnosis: Diagnosis) -> str:
    """Say how much was found in how many steps."""
    peak = f", peak {format_bytes(diagnosis.peak_bytes)}" if diagnosis.peak_bytes is not None else ""
    found = len(diagnosis.findings)
    what = "Nothing was found" if not found else "One cause was found" if found == 1 else f"{found} causes were found"
    return f"{what} in {diagnosis.num_steps:,} step{'s' * (diagnosis.num_steps != 1)}{peak}."


def growth_sentence(diagnosis: Diagnosis) -> str:
    """Say how memory changed from step to step; "" where that is not known."""
    growth = diagnosis.growth
    if growth is None:
        return ""
    rate = f"{format_bytes(growth.likely_bytes)} per step"
    over = f"from step {growth.first_step:,} to {growth.last_step:,}"
    if growth.is_steady:
        return f"Memory in use after a step grows by {rate} {over}."
    return f"Memory in use after a step does not grow steadily ({rate} {over})."


def finding_sheets(finding: Finding) -> tuple[Sheet, Sheet]:
    """Return what to do about a finding, and its evidence."""
    rows = [("Do", str(finding.remedy))]
    if finding.code:
        rows.append(("Write", finding.code))
    if finding.place:
        rows.append(("Where", finding.place))
    rows.append(("Saves", _effect(finding)))
    rows.append(("Page", f"docs/causes/{finding.cause}.md"))
    evidence = tuple((fact.text, fact.known) for fact in finding.evidence)
    return Sheet(finding.title, _REMEDY, tuple(rows)), Sheet("Evidence", _FACTS, evidence)


def _effect(finding: Finding) -> str:
    if finding.effect_bytes is None:
        return "unknown"
    share = "" if finding.peak_share is None else f", {finding.peak_share:.1%} of the peak"
    most = (
        "" if finding.effect_high_bytes is None else f"; at most {format_bytes(finding.effect_high_bytes)} (measured)"
    )
    return f"{format_bytes(finding.effect_bytes)}{share} ({finding.effect_known}){most}"
