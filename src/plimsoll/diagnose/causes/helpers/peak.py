"""Code for causes that are a part of the peak: the size of the part, its tensors, and the remedy that was tried.

A part is a cause if memory ran out, or is predicted to, and the part is large enough to matter. The remedy is a
technique that the predictor has tried on this training run. If it has tried none, the remedy is a list of techniques
for the cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.diagnose.evidence import Evidence, place_of
from plimsoll.models.names import remedies_for
from plimsoll.records.diagnosis import ASKED, Fact, Finding, KnownHow, Remedy
from plimsoll.records.prediction import Holding
from plimsoll.records.units import format_bytes

BEFORE_THE_MODEL = ("baseline", "context")
"""Categories of the memory that a process uses before a model exists."""

_ENOUGH_SHARE = 0.5  # of the part: the first technique that saves this share is the remedy
_SHAPE = re.compile(r"\[([\d, ]*)\]")


@dataclass(frozen=True)
class Part:
    """A part of the memory at the peak.

    Attributes:
        num_bytes: its size.
        known: how the size is known.
        places: the modules and lines that allocated it, largest first.
    """

    num_bytes: int
    known: KnownHow = "predicted"
    places: tuple[str, ...] = ()


def part_of_category(evidence: Evidence, category: str) -> Part | None:
    """Return the part of the peak that is in one category; ``None`` if the category has no known share.

    If the failed allocation belongs to this category, it is included.
    """
    own = [share for share in evidence.shares if share.category == category]
    if category == evidence.asked_category:
        own += [share for share in evidence.shares if share.category == ASKED]
    if not own:
        return None
    places = tuple(share.place for share in own if share.place)
    return Part(sum(share.num_bytes for share in own), own[0].known, places)


def part_of_holdings(holdings: Sequence[Holding], known: KnownHow = "predicted") -> Part | None:
    """Return groups of tensors that are alive at the peak as one part; ``None`` if there are no groups."""
    places = tuple(dict.fromkeys(filter(None, map(place_of, holdings))))
    return Part(sum(holding.num_bytes for holding in holdings), known, places) if holdings else None


def shape_of(holding: Holding) -> tuple[int, ...]:
    """Return the shape in the text of a group of tensors, such as ``float32[8, 128, 768]``; () if it has no shape."""
    found = _SHAPE.search(holding.shape)
    return tuple(int(word) for word in found[1].split(",") if word.strip()) if found else ()


def is_large(evidence: Evidence, part: Part, least_share: float) -> bool:
    """Return whether memory ran out and a part is large.

    A part is large if it is at least ``least_share`` of the peak without the memory from before the model.
    """
    if not evidence.has_run_out or not evidence.peak_bytes:
        return False
    before_bytes = sum(share.num_bytes for share in evidence.shares if share.category in BEFORE_THE_MODEL)
    return part.num_bytes >= least_share * (evidence.peak_bytes - before_bytes)


def facts_of_holdings(evidence: Evidence, holdings: Sequence[Holding]) -> list[Fact]:
    """Return one fact for each group of tensors that is alive at the peak."""
    return [Fact(text=f"{one.count} x {one.shape}, {one.category}", known=evidence.holdings_known) for one in holdings]


def findings_of_part(
    evidence: Evidence,
    cause: str,
    part: Part | None,
    least_share: float,
    *,
    what: str,
    instead: str = "",
    facts: Sequence[Fact] = (),
) -> tuple[Finding, ...]:
    """Return the finding for a part of the peak if the part is large, otherwise no findings.

    The effect of the finding is the saving of the remedy that was tried, but at most the size of the part. If no remedy
    was tried, the effect is the size of the part.

    Args:
        evidence: the evidence.
        cause: name of the cause.
        part: the part of the peak, or ``None`` if the peak has no such part. Without a part, no finding is returned.
        least_share: see `is_large`.
        what: the name of the part, with which the title begins, such as ``the logits``.
        instead: the remedy if no technique was tried; by default the result of `techniques_for`.
        facts: evidence to show in addition to the size.
    """
    if part is None or not is_large(evidence, part, least_share):
        return ()
    assert evidence.peak_bytes
    share = min(part.num_bytes / evidence.peak_bytes, 1.0)
    tried = tried_remedy(evidence, cause, part.num_bytes)
    found = Finding(
        cause=cause,
        title=f"{what}: {format_bytes(part.num_bytes)}, {share:.0%} of the peak",
        place=part.places[0] if part.places else evidence.event.place if evidence.event is not None else "",
        evidence=(
            Fact(text=f"{format_bytes(part.num_bytes)} of {format_bytes(evidence.peak_bytes)}", known=part.known),
            *facts,
        ),
        peak_share=share,
        remedy=tried.choices[0] if tried else instead or techniques_for(cause),
        effect_bytes=min(tried.saving_bytes or 0, part.num_bytes) if tried else part.num_bytes,
        effect_known="predicted" if tried else part.known,
    )
    return (found,)


def techniques_for(cause: str) -> str:
    """Return a sentence that lists the techniques that are remedies for a cause, best first, each with its page."""
    said = remedies_for(cause).items()
    return "; or ".join(f"{summary} (docs/techniques/{name}.md)" for name, summary in said)


def tried_remedy(evidence: Evidence, cause: str, num_bytes: int = 0) -> Remedy | None:
    """Return the best remedy that was tried and consists of a single technique; ``None`` if there is no such remedy.

    Args:
        evidence: the evidence, with the remedies that the predictor has tried.
        cause: name of the cause. Techniques declare the causes for which they are remedies.
        num_bytes: size of the part that the cause describes. The first remedy that saves at least half of it is
            returned, or else the remedy that saves most.
    """
    alone = {remedy.choices[0].technique: remedy for remedy in evidence.remedies if len(remedy.choices) == 1}
    if not alone:
        return None
    from plimsoll.techniques import TECHNIQUES  # imported here because it imports torch, which most callers do not need

    places = {name: one.remedies[cause] for name, one in TECHNIQUES.items() if name in alone and cause in one.remedies}
    tried = [alone[name] for name in sorted(places, key=places.__getitem__)]
    enough = [remedy for remedy in tried if (remedy.saving_bytes or 0) >= _ENOUGH_SHARE * num_bytes]
    return next(iter(enough), None) or max(tried, key=lambda remedy: remedy.saving_bytes or 0, default=None)
