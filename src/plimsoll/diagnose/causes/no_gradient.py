"""Trainable parameters that no gradient reaches: they stay as they are, and memory seems to be saved.

Found in a `plimsoll.TrainStep` that has warned of them (`plimsoll.step.missing_gradients`), by name and with the cause
where it shows. It says nothing of memory: less is used, as nothing is kept for their backward pass.

Does NOT find parameters that are no part of the model, nor gradients that are zero, and nothing in the record of a run.
"""

from __future__ import annotations

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find parameters that are to be trained and are not."""
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
