"""Sheets and sentences of a diagnosis, shared by the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.records.diagnosis import ASKED, Diagnosis, Finding, Remedy, Share
from plimsoll.records.oom_text import OomText
from plimsoll.records.units import format_bytes
from plimsoll.report.prediction_sheets import share_text
from plimsoll.report.sheets import Sheet, columns_of

_FACTS = columns_of("Fact", "Source")
_REMEDY = columns_of("Item", "Details")
_STATED = columns_of("Property", "Value")
_SHARES = columns_of("Used for", "#Size", "#Share", "Source", "Location")
_REMEDIES = columns_of("Remedy", "#Saves", "#Step time", "Fits", "Effect")

_CAUSES = {
    "true_capacity": "the memory is full",
    "fragmentation": "fragmentation",
    "other_process": "another process on the device",
    "absurd_request": "an implausible request size",
    "host_ram": "host memory ran out",
    "tiny_shm": "shared memory is too small",
    "unknown": "unknown",
}
_SIZES = {
    "tried_to_allocate": "Requested",
    "free": "Free",
    "capacity": "Capacity",
    "allowed_limit": "Limit of this process",
    "allocated_by_pytorch": "Allocated by PyTorch",
    "derived_reserved_unallocated": "Reserved by PyTorch, unallocated",
    "this_process": "This process",
    "other_process": "Other processes",
}


def headline(diagnosis: Diagnosis) -> str:
    """Return a sentence on the number of causes found, or on the error that the text reports."""
    if diagnosis.event is not None:
        if diagnosis.shares and diagnosis.findings:
            return f"Out of memory ({diagnosis.event.kind}): {diagnosis.findings[0].title}."
        return _event_sentence(diagnosis.event)
    if not diagnosis.num_steps and diagnosis.shares and diagnosis.shares[0].known == "predicted":
        return _needs_sentence(diagnosis)
    peak = f", peak {format_bytes(diagnosis.peak_bytes)}" if diagnosis.peak_bytes is not None else ""
    found = len(diagnosis.findings)
    what = "Nothing was found" if not found else "One cause was found" if found == 1 else f"{found} causes were found"
    steps = f" in {diagnosis.num_steps:,} step{'s' * (diagnosis.num_steps != 1)}" if diagnosis.num_steps else ""
    return f"{what}{steps}{peak}."


def _event_sentence(event: OomText) -> str:
    if not event.is_oom:
        return "This is not an out-of-memory error."
    cause = _CAUSES[event.likely_cause or "unknown"]
    other = "" if event.likely_cause_alt is None else f", or {_CAUSES[event.likely_cause_alt]}"
    return f"Out of memory ({event.kind}); likely cause: {cause}{other}."


def _needs_sentence(diagnosis: Diagnosis) -> str:
    limit_bytes = diagnosis.limit_bytes
    of = "" if limit_bytes is None else f", the limit is {format_bytes(limit_bytes)}"
    is_over = limit_bytes is not None and (diagnosis.peak_bytes or 0) > limit_bytes
    verdict = "It does not fit" if is_over else "It may not fit" if diagnosis.has_answer else "It fits"
    return f"{verdict}: the peak is {format_bytes(diagnosis.peak_bytes)}{of}."


def event_sheet(event: OomText) -> Sheet:
    """Return a sheet of the facts in the text of an out-of-memory error. For any other text, the sheet has no rows."""
    if not event.is_oom:
        return Sheet("Stated in the error text", _STATED, ())
    rows = [(title, format_bytes(size)) for name, title in _SIZES.items() if (size := getattr(event, name)) is not None]
    if event.device_index is not None:
        rows.append(("Device", str(event.device_index)))
    if event.line_number is not None:
        times = "" if event.num_times == 1 else f", {event.num_times:,} times"
        rows.append(("Line of the text", f"{event.line_number:,}{times}"))
    if event.place:
        rows.append(("Your code", f"{event.place}  {event.code}".rstrip()))
    return Sheet("Stated in the error text", _STATED, tuple(rows))


def growth_sentence(diagnosis: Diagnosis) -> str:
    """Return a sentence on the growth of memory from step to step, or "" if the growth is unknown."""
    growth = diagnosis.growth
    if growth is None:
        return ""
    rate = f"{format_bytes(growth.likely_bytes)} per step"
    over = f"from step {growth.first_step:,} to {growth.last_step:,}"
    if growth.is_steady:
        return f"Memory in use after a step grows by {rate} {over}."
    return f"Memory in use after a step does not grow steadily ({rate} {over})."


def sheets_of(diagnosis: Diagnosis) -> list[Sheet]:
    """Return the sheets of the error, the remedies, the parts of the peak, and each finding with its evidence."""
    sheets = [] if diagnosis.event is None else [event_sheet(diagnosis.event)]
    sheets += [remedies_sheet(diagnosis.remedies)] if diagnosis.remedies else []
    sheets += [shares_sheet(diagnosis.shares)] if diagnosis.shares else []
    return [*sheets, *(sheet for one in diagnosis.findings for sheet in finding_sheets(one))]


def remedies_sheet(remedies: Sequence[Remedy]) -> Sheet:
    """List the remedies, numbered as in ``--remedy``."""
    return Sheet("Remedies", _REMEDIES, tuple(_remedy_row(number, one) for number, one in enumerate(remedies, start=1)))


def _remedy_row(number: int, remedy: Remedy) -> tuple[str, ...]:
    name = " + ".join(map(str, remedy.choices)) or remedy.code or "by hand"
    saved = "unknown"
    if remedy.saving_bytes is not None:
        saved = format_bytes(remedy.saving_bytes)
    elif remedy.saving_high_bytes is not None:
        saved = f"at most {format_bytes(remedy.saving_high_bytes)}"
    factor = "unknown" if remedy.step_time_factor is None else f"x {remedy.step_time_factor:.2f}"
    fits = "unknown" if remedy.fits is None else "yes" if remedy.fits else "no"
    changes = " (changes the training or its precision)" if remedy.changes_training else ""
    return f"{number}. {name}", saved, factor, fits, f"{remedy.text}{changes}"


def shares_sheet(shares: Sequence[Share]) -> Sheet:
    """List the categories of memory at the peak, each with its bytes, its share and a line of user code."""
    total_bytes = sum(share.num_bytes for share in shares)
    rows = [
        (one.category, format_bytes(one.num_bytes), share_text(one.num_bytes, total_bytes), one.known, one.place)
        for one in shares
        if total_bytes
    ]
    was_refused = any(one.category == ASKED for one in shares)
    title = "Memory in use, and the failed request" if was_refused else "Parts of the peak"
    return Sheet(title, _SHARES, tuple(rows))


def finding_sheets(finding: Finding) -> tuple[Sheet, Sheet]:
    """Return two sheets of a finding: its remedy, and its evidence."""
    rows = [("Remedy", str(finding.remedy))]
    if finding.code:
        rows.append(("Code", finding.code))
    if finding.place:
        rows.append(("Location", finding.place))
    if finding.peak_share is not None:
        rows.append(("Share", f"{finding.peak_share:.1%} of the peak"))
    rows.append(("Saves", _effect(finding)))
    rows.append(("Page", finding.page or f"docs/causes/{finding.cause}.md"))
    evidence = tuple((fact.text, fact.known) for fact in finding.evidence)
    return Sheet(finding.title, _REMEDY, tuple(rows)), Sheet("Evidence", _FACTS, evidence)


def _effect(finding: Finding) -> str:
    if finding.effect_bytes is None:
        return "unknown"
    most = (
        "" if finding.effect_high_bytes is None else f"; at most {format_bytes(finding.effect_high_bytes)} (measured)"
    )
    return f"{format_bytes(finding.effect_bytes)} ({finding.effect_known}){most}"
