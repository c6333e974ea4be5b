"""Memory in use before the first tensor: the CUDA context and library workspaces, or the process and its libraries.

Reported if memory ran out and this memory is at least two fifths of the limit. Techniques cannot reduce it, so the
limit must be raised. Not reported for a live process, which may have created a model before the first observation.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import part_of_category
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.units import format_bytes

_LEAST_SHARE = 0.4


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find memory that was in use before a model existed, if it is a large share of the limit."""
    limit_bytes = evidence.limit_bytes
    name = "baseline" if evidence.kind == "cpu" else "context"
    part = part_of_category(evidence, name)
    if (
        evidence.seen is not None
        or part is None
        or not evidence.has_run_out
        or not limit_bytes
        or part.num_bytes < _LEAST_SHARE * limit_bytes
    ):
        return ()
    what = "Python and its libraries" if name == "baseline" else "the CUDA context and libraries"
    return (
        Finding(
            cause="context",
            title=f"{what} take {format_bytes(part.num_bytes)} of {format_bytes(limit_bytes)} before a model exists",
            evidence=(Fact(text=f"{name}: {format_bytes(part.num_bytes)}", known=part.known),),
            peak_share=min(part.num_bytes / evidence.peak_bytes, 1.0) if evidence.peak_bytes else None,
            remedy="give a larger budget (`--budget`): no technique makes this smaller",
        ),
    )
