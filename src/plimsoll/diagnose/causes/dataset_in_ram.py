"""A data set that is held in host memory as a whole: texts, lists of numbers, arrays, or a tensor of all tokens.

Reported for a live process that trains on the CPU, if one variable holds at least a fifth of the training's memory. The
variable must belong to a data set or a loader, or most of its bytes must not be in tensors. It must not grow with the
steps. Also reported if memory ran out before the first step, in a line that reads a whole file.
"""

from __future__ import annotations

import re

from plimsoll.diagnose.causes.helpers.kept import finding_of_kept, much
from plimsoll.diagnose.evidence import Evidence, Kept
from plimsoll.records.diagnosis import Fact, Finding

_CAUSE = "dataset_in_ram"
_LEAST_SHARE = 0.2
_READS = re.compile(
    r"\.(?:read|readlines|read_text|read_bytes|read_csv|read_json|splitlines|tolist|to_list|to_pylist|loadtxt)\("
    r"|json\.loads?\(|pickle\.loads?\(|np\.(?:load|fromfile|genfromtxt)\("
)
_REMEDY = (
    "read it from files as it is needed: `plimsoll data index`, `plimsoll data tokenize`, or `numpy.memmap` for data "
    "that is already numbers (docs/data.md)"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find variables that hold a whole data set in memory."""
    if evidence.seen is None or evidence.kind != "cpu":
        return ()
    held = [kept for kept in much(evidence, _LEAST_SHARE) if _is_data(evidence, kept)]
    if held:
        return tuple(
            finding_of_kept(
                evidence, kept, _CAUSE, title=f"all data in `{kept.name}` is held in memory", remedy=_REMEDY
            )
            for kept in held
        )
    event = evidence.event
    if event is None or evidence.num_steps or not _READS.search(event.code):
        return ()
    fact = Fact(text=f"the line that failed: {event.code}", known="measured")
    title = "memory ran out while a whole file was read"
    return (Finding(cause=_CAUSE, title=title, place=event.place, evidence=(fact,), remedy=_REMEDY),)


def _is_data(evidence: Evidence, kept: Kept) -> bool:
    if kept.num_graphs or (kept.has_grown and evidence.num_steps):
        return False
    return kept.is_of_data or kept.host_bytes > kept.tensor_bytes
