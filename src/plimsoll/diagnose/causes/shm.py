"""Shared memory (``/dev/shm``) that is too small for the batches that DataLoader workers hand over.

Reported if an error text tells that a worker died of a bus error, or mentions shared memory.
"""

from __future__ import annotations

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find shared memory that ran out."""
    event = evidence.event
    if event is None or event.likely_cause != "tiny_shm":
        return ()
    return (
        Finding(
            cause="shm",
            title="shared memory ran out, which the workers of a DataLoader use to hand over batches",
            place=event.place,
            evidence=(Fact(text=f"the error is about shared memory ({event.kind})", known="measured"),),
            remedy="give the container more shared memory (an emptyDir of medium Memory at /dev/shm in Kubernetes), or "
            "use fewer workers",
            code="docker run --shm-size=8g",
        ),
    )
