"""A variable that gets more with every step: a list, dict or set of tensors, arrays or other objects, without a graph.

Found in a live process where a container has got items since the first step (or, before a first step, since the block
was entered) and holds at least a twentieth of what the training uses. What is kept with a graph is `graph_kept` or
`evaluation_keeps_graphs`; what only grows before the first step is data that is loaded (`dataset_in_ram`).

Does NOT find what C++ objects, generators or variables of functions that have returned keep, and no container that
takes in as much as it gives away.
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
    """Find containers that grow."""
    if evidence.seen is None or not evidence.num_steps or evidence.seen.is_evaluating:
        return ()
    return tuple(
        finding_of_kept(evidence, kept, "leak", title=f"`{kept.name}` keeps more with every step", remedy=_REMEDY)
        for kept in much(evidence, _LEAST_SHARE)
        if kept.has_grown and not kept.num_graphs
    )
