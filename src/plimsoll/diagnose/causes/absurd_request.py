"""One request that no memory could hold. Usually a shape is wrong: dimensions are swapped, or one is far too long.

Reported if one request exceeds the device's memory or the limit. Also reported if one tensor of a predicted training
run exceeds them. The finding shows the shape in two cases: the error text or the line that failed contains it, or a
known tensor has the requested size.
"""

from __future__ import annotations

import re
from itertools import combinations, product
from math import prod
from typing import Final

from plimsoll.diagnose.causes.helpers.peak import BEFORE_THE_MODEL
from plimsoll.diagnose.causes.helpers.text import is_possible, perhaps
from plimsoll.diagnose.evidence import Evidence, place_of
from plimsoll.records.diagnosis import Fact, Finding, KnownHow
from plimsoll.records.oom_text import OomText
from plimsoll.records.prediction import Holding
from plimsoll.records.units import format_bytes

_CAUSE: Final = "absurd_request"
_STATED = re.compile(r"array with shape (\([\d, ]+\)) and data type (\w+)")
_LITERALS = re.compile(r"(?<![\w.])\d[\d_]*(?![\w.])")
_MOST_NUMBERS = 8
_ITEM_BYTES = (4, 8, 2, 1)
_ROUNDING = 0.005  # relative error of a printed size such as 1.49 GiB
_REMEDY = "check the shapes in the line that failed first: dimensions may be swapped, or one may be too long"


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find a single request that is too large for the device."""
    event = evidence.event
    if event is not None and evidence.limit_bytes is None:
        return (_of_text(event),) if is_possible(event, _CAUSE) else ()
    limit_bytes, asked_bytes = evidence.limit_bytes, evidence.requested_bytes
    if not limit_bytes:
        return ()
    before_bytes = sum(share.num_bytes for share in evidence.shares if share.category in BEFORE_THE_MODEL)
    if asked_bytes is not None and asked_bytes > limit_bytes - before_bytes:
        alike = next((one for one in evidence.holdings if _each_bytes(one) == asked_bytes), None)
        return (_finding(asked_bytes, limit_bytes, alike, "measured", event),)
    largest = max(evidence.holdings, key=_each_bytes, default=None)
    if not evidence.has_run_out or largest is None or _each_bytes(largest) <= limit_bytes:
        return ()
    return (_finding(_each_bytes(largest), limit_bytes, largest, "predicted", event),)


def _each_bytes(holding: Holding) -> int:
    return holding.num_bytes // holding.count


def _finding(
    num_bytes: int, limit_bytes: int, holding: Holding | None, known: KnownHow, event: OomText | None
) -> Finding:
    shape = "" if holding is None else f" ({holding.shape})"
    fact = f"{format_bytes(num_bytes)} in one tensor{shape}, of {format_bytes(limit_bytes)} in all"
    return Finding(
        cause=_CAUSE,
        title=f"one tensor of {format_bytes(num_bytes)}{shape} is larger than all usable memory",
        place=place_of(holding) if holding is not None else event.place if event is not None else "",
        evidence=(Fact(text=fact, known=known),),
        remedy=_REMEDY,
        effect_bytes=num_bytes,
        effect_known=known,
    )


def _of_text(event: OomText) -> Finding:
    asked = "an unknown size" if event.tried_to_allocate is None else format_bytes(event.tried_to_allocate)
    facts = [Fact(text=f"requested: {asked}", known="measured")]
    if event.capacity is not None:
        facts.append(Fact(text=f"the device has {format_bytes(event.capacity)}", known="measured"))
    if (shape := _shape(event)) is not None:
        facts.append(shape)
    return Finding(
        cause=_CAUSE,
        title=f"{perhaps(event, _CAUSE)}{asked} were requested at once, more than there is",
        place=event.place,
        evidence=tuple(facts),
        remedy=_REMEDY,
    )


def _shape(event: OomText) -> Fact | None:
    """Return a fact that states a shape with the requested size; ``None`` if no such shape is found.

    The shape is stated in the error text, or consists of integers in the line that failed.
    """
    stated = _STATED.search(event.text)
    if stated is not None:
        return Fact(text=f"an array of shape {stated[1]} of {stated[2]}", known="measured")
    sizes = [int(word.replace("_", "")) for word in _LITERALS.findall(event.code)][:_MOST_NUMBERS]
    tried_bytes = event.tried_to_allocate or 0
    for item_bytes, (begin, end) in product(_ITEM_BYTES, combinations(range(len(sizes) + 1), 2)):
        num_bytes = prod(sizes[begin:end]) * item_bytes
        if num_bytes and abs(num_bytes - tried_bytes) <= _ROUNDING * tried_bytes:
            shape = " x ".join(f"{size:,}" for size in sizes[begin:end])
            return Fact(text=f"{shape} numbers of {item_bytes} bytes in `{event.code}`", known="counted")
    return None
