"""What explains the memory of a run: findings, each with its evidence, its share of the peak and what to do about it.

Every number says how it is known: measured, counted (sizes of objects that were seen), predicted or assumed. A number
that is not known is ``None``, never a guess.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.oom_text import OomText
from plimsoll.records.plan import Choice

GRAPH_IS_GONE = "the backward pass came to the graph of an earlier forward pass"
"""How the message of a step begins that failed for a state that is not detached; a run that ended so has it, too."""

KnownHow = Literal["measured", "counted", "predicted", "assumed"]


class MemoryGrowth(Frozen):
    """How memory in use after a step changes from step to step, in bytes per step, from ``first_step`` on.

    ``low_bytes`` and ``high_bytes`` are the least and the most of three parts of the steps. It ``is_steady`` where all
    of them grow alike and by more than the noise of an allocator; see `plimsoll.diagnose.growth`.
    """

    likely_bytes: int
    low_bytes: int
    high_bytes: int
    first_step: int
    last_step: int
    is_steady: bool


class Fact(Frozen):
    """One piece of evidence, and how it is known."""

    text: str
    known: KnownHow


class Finding(Frozen):
    """One cause that used memory.

    Attributes:
        cause: the name of the cause, which is that of its page.
        title: what it is, in a sentence.
        place: the line of the user's, ``file.py:12``; "" where it was not found.
        evidence: what it is known by.
        peak_share: what part of the peak it was.
        remedy: a technique, or a sentence.
        code: what to type, if that is known.
        effect_bytes: what the peak would have been less without it.
        effect_known: how that is known.
        effect_high_bytes: the most it can be, where more than ``effect_bytes`` grew and may be of this cause, too.
        page: of the documentation, where it is not that of the cause.
        is_unused: whether the training goes on as before without it.
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
"""The category of what was refused: it is no part of what was in use."""


class Share(Frozen):
    """What of the peak one category has, and the line of the user's that made the most of it ("": not known)."""

    category: str
    num_bytes: int
    known: KnownHow
    place: str = ""


class Remedy(Frozen):
    """One change that would free memory, and what it costs.

    Attributes:
        choices: the techniques of it, in the order they are installed; none where it is not a technique.
        text: what to do, in a sentence.
        code: what to type.
        settings: what of a job file it changes, by dotted name, for ``--apply``.
        saving_bytes: what the peak falls by; ``None``: not known.
        saving_low_bytes: the least it can be.
        saving_high_bytes: the most it can be.
        step_time_factor: the time of a step with it, against without; ``None``: not known.
        known: how the saving is known.
        fits: whether the peak with it is under the limit; ``None``: not known.
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
        """Whether the job would have to allow it first, as it changes the training or its precision."""
        return bool({"allow", "precision"} & self.settings.keys())


class Diagnosis(Record):
    """What was found in a run, a text or a snapshot.

    The largest effect comes first, of findings and of remedies. ``event`` is the out-of-memory error that is explained,
    if there was one; ``shares`` are what the peak is made of, largest first, of ``limit_bytes`` that there are;
    ``notes`` say what was seen and is no finding. ``num_steps`` is 0 for what did not run.
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
        """Whether there is something to explain: a finding, or memory that ran out."""
        return bool(self.findings or self.remedies) or (self.event is not None and self.event.is_oom)
