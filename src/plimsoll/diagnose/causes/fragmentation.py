"""Fragmentation: the allocator has memory that it cannot hand out, because it is not contiguous.

Reported if an error text, or the last error of a run, states at least as many reserved and unused bytes as were
requested. Also reported if memory ran out and at least 15 % of the predicted peak is reserved but not allocated.
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
"""The setting for a user's own program that uses the CUDA allocator."""

# Differs from the technique's text: a user's own program must set the variable itself.
_INSTEAD = "let CUDA's allocator grow its segments; before torch 2.9 the variable is PYTORCH_CUDA_ALLOC_CONF"


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find reserved memory that an allocator cannot use for the failed request."""
    event = evidence.event
    if event is not None:
        return (_of_text(event),) if is_possible(event, _CAUSE) else ()
    if evidence.is_fragmented:
        asked = "size" if evidence.requested_bytes is None else f"{format_bytes(evidence.requested_bytes)}"
        fact = Fact(text=f"when memory ran out, the allocator held the requested {asked}, in pieces", known="measured")
        title = "the allocator held as much as was requested, in pieces"
        return (Finding(cause=_CAUSE, title=title, evidence=(fact,), remedy=_INSTEAD, code=CODE),)
    part = part_of_category(evidence, _CAUSE)
    what = "memory that the allocator holds and does not use"
    instead = "" if evidence.kind == "cpu" else _INSTEAD
    return findings_of_part(evidence, _CAUSE, part, _LEAST_SHARE, what=what, instead=instead)


def _of_text(event: OomText) -> Finding:
    unused, asked = event.derived_reserved_unallocated, event.tried_to_allocate
    held = "memory" if unused is None else format_bytes(unused)
    piece = "the requested size" if asked is None else f"the requested {format_bytes(asked)}"
    return Finding(
        cause=_CAUSE,
        title=f"{perhaps(event, _CAUSE)}PyTorch holds {held} that it does not use, and no block of it has {piece}",
        place=event.place,
        evidence=(Fact(text=f"reserved and unused: {held}", known="measured"),),
        remedy=_INSTEAD,
        code=CODE,
        effect_high_bytes=unused,
    )
