"""From evidence to a diagnosis: every cause is looked for, and growth that none of them explains is noted.

The largest effect comes first; before all others what the training does not use at all, where it frees enough.
"""

from __future__ import annotations

from plimsoll.diagnose.causes import every_cause
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Diagnosis, Finding
from plimsoll.records.units import format_bytes


def diagnosed(evidence: Evidence, notes: tuple[str, ...] = ()) -> Diagnosis:
    """Look for every cause and say what was found, the largest effect first."""
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
    """What a finding is sorted by, ascending."""
    effect_bytes = finding.effect_bytes or 0
    is_enough = finding.is_unused and effect_bytes >= (evidence.requested_bytes or 0)
    is_less_likely = evidence.event is not None and finding.cause == evidence.event.likely_cause_alt
    return not is_enough, -effect_bytes, is_less_likely


def _of_which_steps(evidence: Evidence) -> tuple[str, ...]:
    first, last, all_steps = evidence.first_step + 1, evidence.last_step, evidence.last_step_of_run
    if not 0 < evidence.num_steps < all_steps:
        return ()
    return (
        f"Of the {all_steps} steps of this run, which more than one process did, steps {first} to {last} were looked "
        "at, the most that are of one process: what a process keeps is gone with it.",
    )


def _of_growth(evidence: Evidence, is_explained: bool) -> tuple[str, ...]:
    growth = evidence.growth
    if evidence.num_steps and growth is None:
        num_measured = len(evidence.used_bytes)
        return (
            f"Whether memory grows cannot be told from {num_measured} measurement{'s' * (num_measured != 1)}: 11 are "
            "needed, 3 of them for the warm-up.",
        )
    if growth is not None and growth.is_steady and not is_explained:
        return (
            f"The growth of {format_bytes(growth.likely_bytes)} per step is not that of a graph that is kept: look for "
            "what your own code keeps from step to step (lists, caches, arrays); where it comes to an end after some "
            "hundred steps it is the heap, which batches of changing lengths fill slowly.",
        )
    return ()
