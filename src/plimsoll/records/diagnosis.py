"""The explanation of a run's memory: causes with evidence, their share of the peak, and remedies.

Every number has a source: measured, counted (from sizes of objects), predicted or assumed. A number that is not known
is ``None``, never a guess.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.oom_text import OomText
from plimsoll.records.plan import Choice

GRAPH_IS_GONE = "the backward pass reached the graph of an earlier forward pass"
"""A part of the error message of a step in which backward reaches the freed graph of an earlier forward pass.

The cause is recurrent state that is not detached. The record of a run that failed in this way contains this text in its
message.
"""

KnownHow = Literal["measured", "counted", "predicted", "assumed"]


class MemoryGrowth(Frozen):
    """The growth of the memory in use after each step, in bytes per step, from ``first_step`` to ``last_step``.

    ``low_bytes`` and ``high_bytes`` are the minimum and maximum over three parts of the steps. ``is_steady`` is true if
    all parts grow at about the same rate, by more than an allocator's noise; see `plimsoll.diagnose.growth`.
    """

    likely_bytes: int
    low_bytes: int
    high_bytes: int
    first_step: int
    last_step: int
    is_steady: bool


class Fact(Frozen):
    """A sentence of evidence, and how it is known (measured, counted, predicted or assumed)."""

    text: str
    known: KnownHow


class Finding(Frozen):
    """One cause of memory use.

    Attributes:
        cause: the name of the cause, also the name of its page in the documentation.
        title: a sentence that describes the cause.
        place: the line of user code, ``file.py:12``; "" if not found.
        evidence: the evidence for the cause.
        peak_share: the share of the peak that the cause explains, from 0 to 1; ``None`` if unknown.
        remedy: a technique, or a sentence that describes the change to make.
        code: the code or command to type, if known.
        effect_bytes: the bytes by which the peak falls without the cause; ``None`` if unknown.
        effect_known: the source of ``effect_bytes``.
        effect_high_bytes: an upper bound of ``effect_bytes``, if other memory may have the same cause; otherwise
            ``None``.
        page: the page of the documentation; "" for the page named after the cause.
        is_unused: true if the training is the same without this memory.
    """

    cause: str
    title: str
    place: str = ""
    evidence: tuple[Fact, ...] = ()
    peak_share: float | None = None
    remedy: Choice | str
    code: str = ""
    effect_bytes: int | None = None
    effect_known: KnownHow | None = None
    effect_high_bytes: int | None = None
    page: str = ""
    is_unused: bool = False


ASKED = "asked for"
"""The category of the allocation request that failed; its bytes are not part of the memory in use."""


class Share(Frozen):
    """The bytes of one category at the peak, and the line of user code that allocated most of them ("": unknown)."""

    category: str
    num_bytes: int
    known: KnownHow
    place: str = ""


class Remedy(Frozen):
    """A change that frees memory, and its cost.

    Attributes:
        choices: the techniques to use, in the order of installation; empty if the remedy is not a technique.
        text: a sentence that describes the remedy.
        code: the code or command to type.
        settings: the fields of a job file that ``--apply`` sets, by dotted name.
        saving_bytes: the bytes by which the peak falls; ``None`` if unknown.
        saving_low_bytes: the lower bound of the saving.
        saving_high_bytes: the upper bound of the saving.
        step_time_factor: the step time with the remedy, divided by the step time without it; ``None`` if unknown.
        known: the source of ``saving_bytes``.
        fits: whether the peak with the remedy is under the limit; ``None`` if unknown.
    """

    choices: tuple[Choice, ...] = ()
    text: str
    code: str = ""
    settings: dict[str, Any] = {}
    saving_bytes: int | None = None
    saving_low_bytes: int | None = None
    saving_high_bytes: int | None = None
    step_time_factor: float | None = None
    known: Literal["measured", "predicted", "bound", "assumed"]
    fits: bool | None = None

    @property
    def changes_training(self) -> bool:
        """True if the remedy changes the training or its precision, so that the job must allow it."""
        return bool({"allow", "precision"} & self.settings.keys())


class Diagnosis(Record):
    """The explanation of a run, an error message or a memory snapshot.

    Findings and remedies are sorted by effect, largest first. ``event`` is the out-of-memory error that is explained,
    if any. ``shares`` are the categories of the peak, largest first. ``limit_bytes`` is the memory limit. ``notes`` are
    observations that are not findings. ``num_steps`` is 0 if no step ran. Other values that are not known are ``None``.
    """

    record_kind: ClassVar[str] = "diagnosis"

    subject: str
    num_steps: int = 0
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    growth: MemoryGrowth | None = None
    event: OomText | None = None
    shares: tuple[Share, ...] = ()
    findings: tuple[Finding, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_answer(self) -> bool:
        """True if there is something to explain: a finding, a remedy, or an out-of-memory error."""
        return bool(self.findings or self.remedies) or (self.event is not None and self.event.is_oom)
