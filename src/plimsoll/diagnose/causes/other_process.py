"""Memory of the same device that another process holds.

Reported if the numbers in an error text show such memory. Not handled: the memory of other processes during a run of
Plimsoll.
"""

from __future__ import annotations

from typing import Final

from plimsoll.diagnose.causes.helpers.text import is_possible, perhaps
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.units import format_bytes

_CAUSE: Final = "other_process"


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find memory that other processes hold."""
    event = evidence.event
    if event is None or not is_possible(event, _CAUSE):
        return ()
    held = event.other_process
    size = "" if held is None else f" {format_bytes(held)} of"
    stated = "the text does not state their size" if held is None else f"other processes: {format_bytes(held)}"
    return (
        Finding(
            cause=_CAUSE,
            title=f"{perhaps(event, _CAUSE)}other processes hold{size} the device's memory",
            place=event.place,
            evidence=(Fact(text=stated, known="assumed" if held is None else "measured"),),
            remedy="find these processes and stop them, or give a smaller budget",
            code="nvidia-smi",
            effect_high_bytes=held,
        ),
    )
