"""Code for causes in which one user variable retains memory: the threshold, the evidence, and the saving.

By default, the saving is the counted size of the variable. If memory in use grows steadily and only this variable
grows, the saving is the measured growth instead. The growth includes the true cost of graph operations, and freed
blocks between retained blocks, which the heap cannot return. A growth of over three times the counted size has other
causes, and is not attributed to the variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plimsoll.diagnose.evidence import Evidence, Kept
from plimsoll.records.diagnosis import Fact, Finding, KnownHow
from plimsoll.records.units import format_bytes

_BASELINE = "baseline"
_MOST_TIMES_COUNTED = 3


def much(evidence: Evidence, least_share: float) -> Iterator[Kept]:
    """Yield the variables that hold at least ``least_share`` of the training's memory, largest first."""
    for kept in evidence.seen.kept if evidence.seen is not None else ():
        if kept.num_bytes >= least_share * training_bytes(evidence):
            yield kept


def training_bytes(evidence: Evidence) -> int:
    """Return the memory of the training in bytes, at least 1.

    This is the memory in use plus the failed allocation, without the interpreter and libraries.
    """
    return max(1, sum(share.num_bytes for share in evidence.shares if share.category != _BASELINE))


def finding_of_kept(
    evidence: Evidence, kept: Kept, cause: str, *, title: str, remedy: str, code: str = "", facts: Sequence[Fact] = ()
) -> Finding:
    """Return the finding for one variable, with its sizes and its saving."""
    peak_bytes = evidence.peak_bytes or kept.num_bytes
    risen_bytes = _risen_bytes(evidence, kept)
    counted: KnownHow = "assumed" if kept.is_estimated else "counted"
    return Finding(
        cause=cause,
        title=title,
        place=kept.place or (evidence.event.place if evidence.event else ""),
        evidence=(*_facts(kept), *facts, *growth_facts(evidence)),
        peak_share=min(kept.num_bytes / peak_bytes, 1.0),
        remedy=remedy,
        code=code,
        effect_bytes=kept.num_bytes if risen_bytes is None else risen_bytes,
        effect_known=counted if risen_bytes is None else "measured",
    )


def _risen_bytes(evidence: Evidence, kept: Kept) -> int | None:
    """Return the bytes by which memory grew over all steps if only this variable can be the cause, else ``None``."""
    growth, seen = evidence.growth, evidence.seen
    if growth is None or not growth.is_steady or seen is None or seen.is_evaluating:  # an evaluation has no steps
        return None
    if [one for one in seen.kept if _grows(one)] != [kept]:
        return None
    risen_bytes = growth.likely_bytes * evidence.num_steps
    return risen_bytes if risen_bytes <= _MOST_TIMES_COUNTED * kept.num_bytes else None


def _grows(kept: Kept) -> bool:
    """Return whether a variable grows with the steps: it gains items, or its graph reaches further back."""
    return kept.has_grown or kept.num_steps_back > 1


def growth_facts(evidence: Evidence) -> list[Fact]:
    """Return the growth of memory per step as a fact, if it is steady; otherwise no facts."""
    growth = evidence.growth
    if growth is None or not growth.is_steady:
        return []
    return [Fact(text=f"memory in use grows by {format_bytes(growth.likely_bytes)} per step", known="measured")]


def _facts(kept: Kept) -> list[Fact]:
    before = "" if kept.num_items_before is None else f", {kept.num_items_before:,} when it was first seen"
    item = "tensor" if kept.copy_of else "item"
    more = " that the training does not use" if kept.copy_of else before
    items = f"`{kept.name}` ({kept.kind}) has {kept.num_items:,} {item}{'s' * (kept.num_items != 1)}{more}"
    parts = {"tensors": kept.tensor_bytes, "saved by their graphs": kept.graph_bytes, "other objects": kept.host_bytes}
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    known = "from a sample of its items: " if kept.is_estimated else ""
    facts = [Fact(text=items, known="counted"), Fact(text=f"{known}{sizes}", known="counted")]
    if kept.code:
        facts.append(Fact(text=f"stored by `{kept.code}`", known="counted"))
    return facts
