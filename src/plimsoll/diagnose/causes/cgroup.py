"""A limit of a control group (a container, Slurm, systemd) that is below the machine's memory and nearly reached.

Reported for a live process that trains on the CPU. At least nine tenths of the tightest limit must be in use, and the
machine must have more memory. Other findings name the objects that use the memory. Not handled: an OOM kill. The kernel
reports it in a log, which `plimsoll explain` reads.
"""

from __future__ import annotations

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.units import format_bytes

_LEAST_SHARE = 0.9
_REMEDY = (
    "give the container more memory (`docker run --memory=`, `resources.limits.memory`, `sbatch --mem=`), or keep the "
    "training under the limit: `plimsoll train --budget SIZE`"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find a limit that is nearly reached and lower than the machine's memory."""
    seen = evidence.seen
    if seen is None or evidence.kind != "cpu" or seen.machine_bytes is None:
        return ()
    line = min(seen.lines, key=lambda line: line.limit_bytes - line.used_bytes, default=None)
    asked_bytes = evidence.requested_bytes or 0
    if line is None or line.limit_bytes >= seen.machine_bytes:
        return ()
    if line.used_bytes + asked_bytes < _LEAST_SHARE * line.limit_bytes:
        return ()
    limit, machine = format_bytes(line.limit_bytes), format_bytes(seen.machine_bytes)
    text = f"{format_bytes(line.used_bytes)} of {limit} are in use ({line.name})"
    return (
        Finding(
            cause="cgroup",
            title=f"the limit of a control group, {limit}, is reached; the machine has {machine}",
            evidence=(Fact(text=text, known="measured"),),
            remedy=_REMEDY,
        ),
    )
