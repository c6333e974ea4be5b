"""What causes that are a variable of the user's have in common: how much is much, the evidence, and its share.

What a variable that grows will save is what it holds, counted, where nothing else is known. Where memory in use was
measured after each step and rises evenly, and this variable is the only one that grows, it is what memory rose by: what
is kept lies between what is freed, and the heap can give back neither; and what an operation of a graph takes is then
measured, not assumed. A rise of over three times what was counted is more than it explains, and not taken for its.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plimsoll.diagnose.evidence import Evidence, Kept
from plimsoll.records.diagnosis import Fact, Finding, KnownHow
from plimsoll.records.units import format_bytes

_BASELINE = "baseline"
_MOST_TIMES_COUNTED = 3


def much(evidence: Evidence, least_share: float) -> Iterator[Kept]:
    """Go through what is kept and has at least this share of what the training uses, largest first."""
    for kept in evidence.seen.kept if evidence.seen is not None else ():
        if kept.num_bytes >= least_share * training_bytes(evidence):
            yield kept


def training_bytes(evidence: Evidence) -> int:
    """Return what is in use beside the interpreter and the libraries, with what was asked for; 1 at least."""
    return max(1, sum(share.num_bytes for share in evidence.shares if share.category != _BASELINE))


def finding_of_kept(
    evidence: Evidence, kept: Kept, cause: str, *, title: str, remedy: str, code: str = "", facts: Sequence[Fact] = ()
) -> Finding:
    """Make the finding of one variable."""
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
    """What memory in use rose by over the steps, where that is the doing of this variable."""
    growth, seen = evidence.growth, evidence.seen
    if growth is None or not growth.is_steady or seen is None or seen.is_evaluating:  # an evaluation has no steps
        return None
    if [one for one in seen.kept if _grows(one)] != [kept]:
        return None
    risen_bytes = growth.likely_bytes * evidence.num_steps
    return risen_bytes if risen_bytes <= _MOST_TIMES_COUNTED * kept.num_bytes else None


def _grows(kept: Kept) -> bool:
    """Whether a variable gets more with the steps: items, or a graph that reaches further back."""
    return kept.has_grown or kept.num_steps_back > 1


def growth_facts(evidence: Evidence) -> list[Fact]:
    """Say how memory grows, where it does."""
    growth = evidence.growth
    if growth is None or not growth.is_steady:
        return []
    return [Fact(text=f"memory in use grows by {format_bytes(growth.likely_bytes)} per step", known="measured")]


def _facts(kept: Kept) -> list[Fact]:
    before = "" if kept.num_items_before is None else f", {kept.num_items_before:,} when it was first looked at"
    item = "tensor" if kept.copy_of else "item"
    more = " that the training does not use" if kept.copy_of else before
    items = f"`{kept.name}` ({kept.kind}) has {kept.num_items:,} {item}{'s' * (kept.num_items != 1)}{more}"
    parts = {"tensors": kept.tensor_bytes, "what their graphs save": kept.graph_bytes, "other objects": kept.host_bytes}
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    known = "from a sample of its items: " if kept.is_estimated else ""
    facts = [Fact(text=items, known="counted"), Fact(text=f"{known}{sizes}", known="counted")]
    if kept.code:
        facts.append(Fact(text=f"stored by `{kept.code}`", known="counted"))
    return facts
