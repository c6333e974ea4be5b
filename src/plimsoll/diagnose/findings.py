"""The diagnosis of evidence: the findings of all causes, and notes, for example about growth that no cause explains.

Findings are sorted by effect, largest first. One kind of finding comes before all others: memory that the training does
not use, if freeing it is enough for the allocation that failed.
"""

from __future__ import annotations

from plimsoll.diagnose.causes import every_cause
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Diagnosis, Finding
from plimsoll.records.units import format_bytes


def diagnosed(evidence: Evidence, notes: tuple[str, ...] = ()) -> Diagnosis:
    """Look for every cause in the evidence and return the diagnosis, largest effect first."""
    findings = [finding for find in every_cause().values() for finding in find(evidence)]
    return Diagnosis(
        subject=evidence.subject,
        num_steps=evidence.num_steps,
        peak_bytes=evidence.peak_bytes,
        limit_bytes=evidence.limit_bytes,
        growth=evidence.growth,
        event=evidence.event,
        shares=evidence.shares,
        findings=tuple(sorted(findings, key=lambda finding: _place(finding, evidence))),
        remedies=evidence.remedies,
        notes=(*notes, *_of_which_steps(evidence), *_of_growth(evidence, bool(findings))),
    )


def _place(finding: Finding, evidence: Evidence) -> tuple[bool, int, bool]:
    """Return a key that sorts findings.

    Findings of memory that the training does not use come first, if it is enough for the allocation that failed. All
    other findings follow by effect, largest first. Of equal effects, the less likely cause comes last.
    """
    effect_bytes = finding.effect_bytes or 0
    is_enough = finding.is_unused and effect_bytes >= (evidence.requested_bytes or 0)
    is_less_likely = evidence.event is not None and finding.cause == evidence.event.likely_cause_alt
    return not is_enough, -effect_bytes, is_less_likely


def _of_which_steps(evidence: Evidence) -> tuple[str, ...]:
    first, last, all_steps = evidence.first_step + 1, evidence.last_step, evidence.last_step_of_run
    if not 0 < evidence.num_steps < all_steps:
        return ()
    return (
        f"More than one process did the {all_steps} steps of this run. Steps {first} to {last} were analyzed, the most "
        "that one process did: its memory is freed when it ends.",
    )


def _of_growth(evidence: Evidence, is_explained: bool) -> tuple[str, ...]:
    growth = evidence.growth
    if evidence.num_steps and growth is None:
        num_measured = len(evidence.used_bytes)
        return (
            f"Whether memory grows cannot be judged from {num_measured} measurement{'s' * (num_measured != 1)}: 11 are "
            "needed, 3 of them for the warm-up.",
        )
    if growth is not None and growth.is_steady and not is_explained:
        return (
            f"No retained graph explains the growth of {format_bytes(growth.likely_bytes)} per step: look for objects "
            "that your own code keeps from step to step (lists, caches, arrays). If the growth ends after some hundred "
            "steps, it is the heap, which batches of changing lengths fill slowly.",
        )
    return ()
