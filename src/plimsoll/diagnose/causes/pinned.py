"""Pinned memory: pages of the host that are locked for copies to a GPU and cannot be swapped out.

Reported if an error text comes from the pinning thread of a DataLoader, or from the call that locks pages. Such an
error only means that the driver could not lock the pages, so its reason may not be a lack of memory.
"""

from __future__ import annotations

import re

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding

_PINNING = re.compile(
    r"pin memory thread|\.pin_memory\(|utils/pin_memory\.py|cudaHostAlloc|cudaHostRegister|CachingHostAllocator"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find pages that could not be locked."""
    event = evidence.event
    if event is None or not event.is_oom:
        return ()
    found = _PINNING.search(event.text) or _PINNING.search(event.above) or _PINNING.search(event.code)
    if found is None:
        return ()
    return (
        Finding(
            cause="pinned",
            title="the host's pages could not be locked for copies to the GPU",
            place=event.place,
            evidence=(Fact(text=f"the error names `{found[0]}`", known="measured"),),
            remedy="pin less: fewer workers, a smaller `prefetch_factor`, or batches that are not pinned",
            code="DataLoader(..., pin_memory=False)",
        ),
    )
