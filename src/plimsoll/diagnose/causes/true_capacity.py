"""A training run that needs more memory than its limit.

Reported if memory ran out in a training run whose peak is known; the finding names the largest category. Also reported
if the numbers in an error text leave no other cause, on the device or the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from plimsoll.diagnose.causes.helpers.peak import BEFORE_THE_MODEL
from plimsoll.diagnose.causes.helpers.text import is_possible, perhaps
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import ASKED, Fact, Finding, Share
from plimsoll.records.oom_text import OomText
from plimsoll.records.units import format_bytes

_CAUSE: Final = "true_capacity"
_IN_A_LOOP = "cut the batch into smaller micro-batches: `plimsoll.TrainStep` does so by itself when memory runs out"
_PLAN = "`plimsoll plan job.yaml --budget SIZE` finds the fastest plan that fits"


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find a training run that needs more memory than its limit."""
    event = evidence.event
    if event is not None and not evidence.shares:
        return (_of_text(event),) if is_possible(event, _CAUSE) or is_possible(event, "host_ram") else ()
    if not evidence.has_run_out or not evidence.shares:
        return ()
    asked = next((share for share in evidence.shares if share.category == ASKED), None)
    if asked is None:
        return (_of_training(evidence),)
    rest = [share for share in evidence.shares if share is not asked]
    if evidence.limit_bytes is not None and asked.num_bytes > evidence.limit_bytes - _before_bytes(rest):
        return ()  # the request alone exceeds the limit: see `absurd_request`
    if asked.num_bytes > sum(share.num_bytes for share in rest) - _before_bytes(rest):
        return (_of_request(asked, rest),)
    return (_of_training(replace(evidence, shares=tuple(rest))),)


def _before_bytes(shares: Sequence[Share]) -> int:
    return sum(share.num_bytes for share in shares if share.category in BEFORE_THE_MODEL)


def _of_request(asked: Share, rest: Sequence[Share]) -> Finding:
    """Return the finding for one failed request that is larger than all memory that the training had in use.

    Args:
        asked: the failed request, as a share of the peak.
        rest: the other shares of the peak.
    """
    in_use = format_bytes(sum(share.num_bytes for share in rest))
    return Finding(
        cause=_CAUSE,
        title=f"{in_use} were in use when one request needed {format_bytes(asked.num_bytes)} more",
        place=asked.place,
        evidence=_of_shares((asked, *rest)),
        remedy=f"look at the line that requested it; if its size depends on the batch, {_IN_A_LOOP}",
    )


def _of_shares(shares: Iterable[Share]) -> tuple[Fact, ...]:
    return tuple(Fact(text=f"{share.category}: {format_bytes(share.num_bytes)}", known=share.known) for share in shares)


def _of_training(evidence: Evidence) -> Finding:
    most = next((one for one in evidence.shares if one.category not in BEFORE_THE_MODEL), evidence.shares[0])
    total_bytes = sum(share.num_bytes for share in evidence.shares)
    limit_bytes = evidence.limit_bytes
    is_within = limit_bytes is not None and total_bytes <= limit_bytes
    title = f"the training needs {format_bytes(total_bytes)}, most of it {most.category}"
    if limit_bytes is not None:
        title += f", and {format_bytes(limit_bytes)} are available"
    if is_within:
        asked = None if evidence.event is None else evidence.event.tried_to_allocate
        more = "more" if asked is None else f"{format_bytes(asked)} more"
        title = f"{format_bytes(total_bytes)} were in use, most of it {most.category}, when {more} were needed"
    return Finding(
        cause=_CAUSE,
        title=title,
        place=most.place or (evidence.event.place if evidence.event is not None else ""),
        evidence=_of_shares(evidence.shares),
        peak_share=min(most.num_bytes / total_bytes, 1.0) if total_bytes else None,
        remedy=_IN_A_LOOP if is_within else f"apply one of the remedies that fit; {_PLAN}",
    )


def _of_text(event: OomText) -> Finding:
    if is_possible(event, "host_ram"):
        asked = (
            "" if event.tried_to_allocate is None else f" when {format_bytes(event.tried_to_allocate)} were requested"
        )
        title = f"host memory, or the limit of its control group, ran out{asked}"
        remedy = (
            "keep the training under a limit with `plimsoll train --budget SIZE`; read data larger than memory from "
            "files (`plimsoll data index`)"
        )
        return Finding(cause=_CAUSE, title=title, place=event.place, evidence=_stated(event), remedy=remedy)
    missing = ""
    if event.tried_to_allocate is not None and event.free is not None:
        missing = f"; the request exceeds free memory by {format_bytes(max(0, event.tried_to_allocate - event.free))}"
    return Finding(
        cause=_CAUSE,
        title=f"{perhaps(event, _CAUSE)}the device is full{missing}",
        place=event.place,
        evidence=_stated(event),
        remedy=f"use smaller micro-batches or one of Plimsoll's techniques: {_PLAN}",
    )


def _stated(event: OomText) -> tuple[Fact, ...]:
    named = {"requested": event.tried_to_allocate, "free": event.free, "capacity": event.capacity}
    facts = [Fact(text=f"{name}: {format_bytes(size)}", known="measured") for name, size in named.items() if size]
    return tuple(facts) or (Fact(text=f"the error itself ({event.kind}); it states no sizes", known="measured"),)
