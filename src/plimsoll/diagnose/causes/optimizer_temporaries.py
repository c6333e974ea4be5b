"""Temporary memory of the optimizer update, such as copies of all parameters at once in torch's ``foreach`` kernels.

Reported if memory ran out, the peak is in the update, and temporaries are at least a tenth of the peak.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import findings_of_part, part_of_category
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding

_LEAST_SHARE = 0.1


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find large temporaries of the update."""
    part = part_of_category(evidence, "temporaries")
    return findings_of_part(
        evidence,
        "optimizer_temporaries",
        part if evidence.phase == "optimizer" else None,
        _LEAST_SHARE,
        what="temporaries of the optimizer's update",
    )
