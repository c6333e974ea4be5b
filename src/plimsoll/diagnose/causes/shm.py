"""Shared memory (``/dev/shm``) is too small for the batches that the workers of a DataLoader hand over.

Found where an error's text is that of a worker that died of a bus error, or says so itself.
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
            title="shared memory ran out, through which the workers of a DataLoader hand over batches",
            place=event.place,
            evidence=(Fact(text=f"the error is one of shared memory ({event.kind})", known="measured"),),
            remedy="give the container more (an emptyDir of medium Memory at /dev/shm in Kubernetes), or use fewer "
            "workers",
            code="docker run --shm-size=8g",
        ),
    )
