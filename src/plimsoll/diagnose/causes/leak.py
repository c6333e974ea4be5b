"""A variable that grows with every step: a list, dict or set of tensors, arrays or other objects, without a graph.

Reported for a live process if a container has gained items and holds at least a twentieth of the training's memory.
Items are counted from the end of the first step on. Values kept with a graph are reported as `graph_kept` or
`evaluation_keeps_graphs`. A container that only grows before the first step is data that is loaded (`dataset_in_ram`).

Not handled: objects kept by C++ objects, generators or variables of functions that have returned, and containers that
release as much as they take.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.kept import finding_of_kept, much
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding

_LEAST_SHARE = 0.05
_REMEDY = (
    "keep a bounded number of items (`collections.deque(maxlen=...)`), reduce each to a number (`.item()`), or write "
    "them to a file"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find containers that grow with every step."""
    if evidence.seen is None or not evidence.num_steps or evidence.seen.is_evaluating:
        return ()
    return tuple(
        finding_of_kept(evidence, kept, "leak", title=f"`{kept.name}` grows with every step", remedy=_REMEDY)
        for kept in much(evidence, _LEAST_SHARE)
        if kept.has_grown and not kept.num_graphs
    )
