"""The words and numbers of a diagnosis, once: the terminal and the HTML page show the same sheets and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.records.diagnosis import ASKED, Diagnosis, Finding, Remedy, Share
from plimsoll.records.oom_text import OomText
from plimsoll.records.units import format_bytes
from plimsoll.report.prediction_sheets import share_text
from plimsoll.report.sheets import Sheet, columns_of

_FACTS = columns_of("What", "How it is known")
_REMEDY = columns_of("To do", "What")
_STATED = columns_of("What", "Value")
_SHARES = columns_of("Used for", "#Size", "#Share", "How it is known", "Where")
_REMEDIES = columns_of("Remedy", "#Saves", "#A step", "Fits", "What it does")

_CAUSES = {
    "true_capacity": "the memory is really used up",
    "fragmentation": "fragmentation",
    "other_process": "another process on the device",
    "absurd_request": "a request that cannot be right",
    "host_ram": "the host's memory ran out",
    "tiny_shm": "shared memory is too small",
    "unknown": "unknown",
}
_SIZES = {
    "tried_to_allocate": "Asked for",
    "free": "Free",
    "capacity": "Capacity",
    "allowed_limit": "Allowed to this process",
    "allocated_by_pytorch": "Allocated by PyTorch",
    "derived_reserved_unallocated": "Reserved by PyTorch and not used",
    "this_process": "This process",
    "other_process": "Other processes",
}


def headline(diagnosis: Diagnosis) -> str:
    """Say how much was found in how many steps, or which error a text tells of."""
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
    of = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    is_over = limit_bytes is not None and (diagnosis.peak_bytes or 0) > limit_bytes
    verdict = "It does not fit" if is_over else "It may not fit" if diagnosis.has_answer else "It fits"
    return f"{verdict}: the peak is {format_bytes(diagnosis.peak_bytes)}{of}."


def event_sheet(event: OomText) -> Sheet:
    """Return what an error's text states; empty where it is no out-of-memory error."""
    if not event.is_oom:
        return Sheet("What the text states", _STATED, ())
    rows = [(title, format_bytes(size)) for name, title in _SIZES.items() if (size := getattr(event, name)) is not None]
    if event.device_index is not None:
        rows.append(("Device", str(event.device_index)))
    if event.line_number is not None:
        times = "" if event.num_times == 1 else f", {event.num_times:,} times"
        rows.append(("In line", f"{event.line_number:,}{times}"))
    if event.place:
        rows.append(("Your line", f"{event.place}  {event.code}".rstrip()))
    return Sheet("What the text states", _STATED, tuple(rows))


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


def sheets_of(diagnosis: Diagnosis) -> list[Sheet]:
    """Return what the error states, the remedies, what the peak is made of, and each finding with its evidence."""
    sheets = [] if diagnosis.event is None else [event_sheet(diagnosis.event)]
    sheets += [remedies_sheet(diagnosis.remedies)] if diagnosis.remedies else []
    sheets += [shares_sheet(diagnosis.shares)] if diagnosis.shares else []
    return [*sheets, *(sheet for one in diagnosis.findings for sheet in finding_sheets(one))]


def remedies_sheet(remedies: Sequence[Remedy]) -> Sheet:
    """List what would free memory, numbered as ``--remedy`` has it."""
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
    """List what a peak is made of."""
    total_bytes = sum(share.num_bytes for share in shares)
    rows = [
        (one.category, format_bytes(one.num_bytes), share_text(one.num_bytes, total_bytes), one.known, one.place)
        for one in shares
        if total_bytes
    ]
    was_refused = any(one.category == ASKED for one in shares)
    title = "What was in use, and what was asked for" if was_refused else "What the peak is made of"
    return Sheet(title, _SHARES, tuple(rows))


def finding_sheets(finding: Finding) -> tuple[Sheet, Sheet]:
    """Return what to do about a finding, and its evidence."""
    rows = [("Do", str(finding.remedy))]
    if finding.code:
        rows.append(("Write", finding.code))
    if finding.place:
        rows.append(("Where", finding.place))
    if finding.peak_share is not None:
        rows.append(("Is", f"{finding.peak_share:.1%} of the peak"))
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
