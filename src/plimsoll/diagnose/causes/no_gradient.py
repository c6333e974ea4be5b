"""Trainable parameters that no gradient reaches. They are not trained, so less memory is used than expected.

Reported for a `plimsoll.TrainStep` that has warned of such parameters (`plimsoll.step.missing_gradients`). The finding
lists their names, and the reason if it is known. It has no saving. The remedy takes memory, because tensors must be
saved for the backward pass of these parameters.

Not handled: parameters outside the model, gradients that are zero, and recorded runs.
"""

from __future__ import annotations

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find trainable parameters that get no gradient."""
    return tuple(
        Finding(
            cause="no_gradient",
            title=f"{len(one.names)} of {one.num_all} trainable parameters are not trained",
            evidence=(
                Fact(text=str(one), known="measured"),
                Fact(text=one.cause.why, known="measured"),
            ),
            remedy=one.cause.remedy,
        )
        for one in evidence.unreached
    )
