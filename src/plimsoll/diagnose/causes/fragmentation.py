"""Fragmentation: the allocator has memory that it cannot hand out, because it is not contiguous.

Found where the numbers of an error say so (as much is reserved and unused as was asked for), where a run's last error
does, and where memory ran out and at least 15 % of the predicted peak is what the allocator holds beside live tensors.
"""

from __future__ import annotations

from typing import Final

from plimsoll.diagnose.causes.helpers.peak import findings_of_part, part_of_category
from plimsoll.diagnose.causes.helpers.text import is_possible, perhaps
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.oom_text import OomText
from plimsoll.records.units import format_bytes

_CAUSE: Final = "fragmentation"
_LEAST_SHARE = 0.15
CODE = "export PYTORCH_ALLOC_CONF=expandable_segments:True"
"""What to type where CUDA's allocator is used by a program of one's own."""

# Not in a technique's words: this is for a program of one's own, which sets the variable itself.
_INSTEAD = "let CUDA's allocator grow its segments, before torch 2.9 by the name PYTORCH_CUDA_ALLOC_CONF"


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find what an allocator holds and cannot use."""
    event = evidence.event
    if event is not None:
        return (_of_text(event),) if is_possible(event, _CAUSE) else ()
    if evidence.is_fragmented:
        asked = "" if evidence.requested_bytes is None else f" the {format_bytes(evidence.requested_bytes)}"
        fact = Fact(
            text=f"when memory ran out the allocator held{asked} that were asked for, in pieces", known="measured"
        )
        title = "the allocator held as much as was asked for, in pieces"
        return (Finding(cause=_CAUSE, title=title, evidence=(fact,), remedy=_INSTEAD, code=CODE),)
    part = part_of_category(evidence, _CAUSE)
    what = "memory that the allocator holds and does not use"
    instead = "" if evidence.kind == "cpu" else _INSTEAD
    return findings_of_part(evidence, _CAUSE, part, _LEAST_SHARE, what=what, instead=instead)


def _of_text(event: OomText) -> Finding:
    unused, asked = event.derived_reserved_unallocated, event.tried_to_allocate
    held = "memory" if unused is None else format_bytes(unused)
    piece = "what was asked for" if asked is None else f"the {format_bytes(asked)} that were asked for"
    return Finding(
        cause=_CAUSE,
        title=f"{perhaps(event, _CAUSE)}PyTorch holds {held} that it does not use, and no piece of it has {piece}",
        place=event.place,
        evidence=(Fact(text=f"reserved and unused: {held}", known="measured"),),
        remedy=_INSTEAD,
        code=CODE,
        effect_high_bytes=unused,
    )
