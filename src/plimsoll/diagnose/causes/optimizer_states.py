"""The states of the optimizer, such as Adam's two moments of every parameter.

Reported if memory ran out and the states are at least a fifth of the peak. Also reported if the error text shows that
memory ran out in the optimizer's update. The first update allocates the states, after the forward and backward pass
have already fitted.
"""

from __future__ import annotations

import re

from plimsoll.diagnose.causes.helpers.peak import findings_of_part, part_of_category, techniques_for
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding

_CAUSE, _LEAST_SHARE = "optimizer_states", 0.2
_UPDATE = re.compile(r"\b(?:\w*optim\w*|opt|scaler|sgd|adamw?)\.step\(", re.IGNORECASE)
_TORCHS = re.compile(r"torch/optim/\w+\.py\", line \d+, in (?:step|_init_group|_\w+_tensor_\w+|_fused_\w+)")


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find large optimizer states."""
    part = part_of_category(evidence, "optimizer states")
    what = "the states of the optimizer"
    found = findings_of_part(evidence, _CAUSE, part, _LEAST_SHARE, what=what)
    if found:
        return found
    event = evidence.event if evidence.phase in ("", "optimizer") else None
    if event is None or not event.is_oom or not (_UPDATE.search(event.code) or _TORCHS.search(event.above)):
        return ()
    line = event.code or "of torch.optim"
    return (
        Finding(
            cause=_CAUSE,
            title="memory ran out in the update of the optimizer; the first update allocates its states",
            place=event.place,
            evidence=(Fact(text=f"the line that failed: {line}", known="measured"),),
            remedy=techniques_for(_CAUSE),
        ),
    )
