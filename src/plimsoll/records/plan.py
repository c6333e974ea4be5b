"""What a run will do to stay under its budget, why, and what it will do next if memory still runs out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from plimsoll.errors import InputError
from plimsoll.records.base import FormerNames, Frozen, Record
from plimsoll.records.device import Budget
from plimsoll.records.prediction import Estimate, Prediction

Numerics = Literal["bitwise", "reordered", "reduced precision", "lossy"]
"""What a technique does to the numbers: the same bits; the same mathematics rounded in another order; what autocast
does; or another model, or another training."""


Verdict = Literal["additive", "known", "not additive", "not shown", "allowed", "never cut", "not computed"]
"""What was found when a loss was computed whole and in parts, before a batch is cut: whether it may be."""

Value = int | float | str | bool
"""Of an option."""

MICRO_BATCH = "micro_batch"
"""The technique that every plan has: its option ``samples`` is the size of one forward and backward pass."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BEFORE_OPTION = re.compile(r",(?=\s*[a-z][a-z0-9_]*\s*=)")  # a value may have commas: blocks=0,3-5


class Choice(Frozen):
    """One technique with its options, e.g. ``micro_batch`` with ``{"samples": 16}``."""

    technique: str
    options: dict[str, Value] = {}

    def __str__(self) -> str:
        """As it is written on a command line: ``micro_batch=16``, ``autocast=bf16``, ``adafactor``."""
        if len(self.options) == 1:
            return _written(self.technique, next(iter(self.options.values())), {})
        return self.in_full

    @property
    def in_full(self) -> str:
        """With the names of all options, for sentences about them: ``float8(dynamic=true)``."""
        return _written(self.technique, None, self.options)

    def __hash__(self) -> int:
        """By what it says: a dict has no hash."""
        return hash((self.technique, frozenset(self.options.items())))


class Pin(Frozen):
    """A technique that the user wants in the plan, see `parse_pin`.

    ``value`` is of the technique's first option, whose name only the technique knows; without one, and without
    ``options``, the plan is free in how it uses the technique.
    """

    technique: str
    value: Value | None = None
    options: dict[str, Value] = {}

    def __str__(self) -> str:
        """As it is written on a command line."""
        return _written(self.technique, self.value, self.options)


def _written(technique: str, value: Value | None, options: dict[str, Value]) -> str:
    if value is not None:
        return f"{technique}={_word(value)}"
    inner = ",".join(f"{name}={_word(value)}" for name, value in options.items())
    return f"{technique}({inner})" if inner else technique


def _word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Duration(Frozen):
    """Seconds with their range."""

    likely_seconds: float
    low_seconds: float
    high_seconds: float


class Configuration(Frozen):
    """How to run a step: techniques in the order they are installed, and what is predicted of it.

    ``peak`` and ``step_time`` are ``None`` where nothing was predicted: without a plan, and below the smallest
    configuration that was.
    """

    choices: tuple[Choice, ...]
    peak: Estimate | None = None
    step_time: Duration | None = None

    @property
    def micro_batch(self) -> int:
        """Samples of one forward and backward pass."""
        return next(int(choice.options["samples"]) for choice in self.choices if choice.technique == MICRO_BATCH)

    @property
    def others(self) -> tuple[Choice, ...]:
        """The choices but for the micro-batch."""
        return without_micro_batch(self.choices)


class Rejected(Frozen):
    """Something that was considered and not taken; ``reason`` is a sentence with numbers.

    With ``is_compared`` the reason compares the seconds of a step with those of the plan that was in force.
    """

    choices: tuple[Choice, ...]
    reason: str
    peak: Estimate | None = None
    step_time: Duration | None = None
    is_compared: bool = False


class OffDevice(Frozen):
    """What a plan keeps where its budget does not count it, and what a step reads and writes of that.

    ``disk_bytes_per_second`` was measured where the machine's memory cannot keep all of it; then a step waits for the
    disk, and its time says so. ``None`` where it can.
    """

    kept_bytes: int
    moved_bytes: int
    disk_bytes_per_second: float | None = None


class LossCheck(Frozen):
    """Whether the loss of a batch is the sum of those of its parts, each by its share of what the loss averages over.

    ``verdict`` is ``additive`` where samples have shown it, ``known`` where it follows from what computes the loss,
    ``not additive`` where they have shown that it is not, ``not shown`` where they could not, ``allowed`` where it was
    not shown and the user allows it (``recut_loss``), ``never cut`` where the user does not, and ``not computed`` where
    there was nothing to compute with, such as a model without memory: then the training finds out.

    ``whole`` and ``parts`` are the loss of ``num_samples`` samples, at once and one by one; ``difference`` is that of
    the two, and ``gradient_difference`` that of their gradients (``None``: not compared), as shares of their size.
    """

    verdict: Verdict
    why: str = ""
    remedy: str = ""
    num_samples: int = 0
    whole: float | None = None
    parts: float | None = None
    difference: float | None = None
    gradient_difference: float | None = None

    @classmethod
    def not_computed(cls, why: str) -> LossCheck:
        """What is found where nothing could be computed."""
        return cls(verdict="not computed", why=f"{why}: training checks this before it splits a batch")

    @property
    def may_cut(self) -> bool:
        """Whether a batch may be cut, as far as is known."""
        return self.verdict in {"additive", "known", "allowed", "not computed"}

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        if self.verdict == "additive":
            found = f"{self.num_samples} samples have the same loss as one batch and one by one"
            return f"{found}, and the same gradients" if self.gradient_difference is not None else found
        return self.why


class Candidate(FormerNames):
    """A plan that the model of time cannot tell from the one in force, with what a plan says of its first
    configuration.
    """

    former_names: ClassVar[Mapping[str, str]] = {"rung": "configuration"}

    configuration: Configuration
    prediction: Prediction | None = None
    time_factor: float = 1.0
    off_device: OffDevice | None = None


class Tried(Frozen):
    """What a trial made of one candidate.

    ``predicted_seconds`` are of a step, without what earlier runs say; ``measured_seconds`` are estimated from the
    passes that were run; ``peak_bytes`` is the most that was in use in them. A candidate that was struck needs more
    than there was when another one ran out; one that was too near the limit may need more in a long run.
    """

    choices: tuple[Choice, ...]
    outcome: Literal["fastest", "slower", "ran out", "struck", "too near", "failed", "not tried"]
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    peak_bytes: int | None = None
    why: str = ""


class Trial(Frozen):
    """Candidates that were run for a few passes before the training, with everything put back; the fastest is first.

    ``seconds`` is all the time it took: warm-up passes, timed passes, and putting everything back. ``left_out`` says
    why nothing was tried.
    """

    seconds: float = 0.0
    tried: tuple[Tried, ...] = ()
    left_out: str = ""


class Plan(FormerNames, Record):
    """The way to run that was chosen, and the smaller ones to take, in order, when memory runs out.

    ``fallbacks`` begins with what is in force; their predicted peaks fall. ``plain`` is the whole batch without any
    technique. ``made_for`` says of what the plan is: a plan is refused where one of these facts differs. Where nothing
    fits, ``fallbacks`` has what needs least, ``smallest_budget_bytes`` is the budget it would take, and
    ``lossy_alternatives`` has, for each technique that changes the training and is not allowed, what needs least
    with it.

    ``pinned`` choices and ``required`` techniques, whose options the plan chooses, are the user's; ``left_out`` has the
    pins that the number of ranks forbids, each with the reason. ``time_factor`` corrects the time by earlier runs, and
    is in ``step_time``. ``off_device`` is set where parameters are in files (CPU) or on the host (CUDA), which the
    budget does not count. ``loss_check`` says whether a batch may be cut, and ``tokenizer_bytes`` what training the
    tokenizer takes at most, before there is a model.
    ``candidates`` are plans of about the same time, which a trial on the device runs beside the first configuration;
    what it measured is in ``trial``, ``None`` where none was made.

    For a reader, by the technique's name: ``about`` says what it does, ``numerics`` what it does to the numbers, and
    ``why`` what it saves in this plan, or why it is in it.
    """

    record_kind: ClassVar[str] = "plan"
    schema_version: ClassVar[int] = 3
    also_reads: ClassVar[frozenset[int]] = frozenset({2})
    former_names: ClassVar[Mapping[str, str]] = {
        "rungs": "fallbacks", "openings": "lossy_alternatives", "choices_by_rung": "choices_by_fallback",
    }  # fmt: skip

    budget: Budget
    fallbacks: tuple[Configuration, ...]
    limit_bytes: int | None = None
    plain: Configuration | None = None
    rejected: tuple[Rejected, ...] = ()
    lossy_alternatives: tuple[Rejected, ...] = ()
    smallest_budget_bytes: int | None = None
    prediction: Prediction | None = None
    pinned: tuple[Choice, ...] = ()
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    about: dict[str, str] = {}
    numerics: dict[str, Numerics] = {}
    why: dict[str, str] = {}
    made_for: dict[str, str] = {}
    time_factor: float = 1.0
    off_device: OffDevice | None = None
    loss_check: LossCheck | None = None
    tokenizer_bytes: int | None = None
    candidates: tuple[Candidate, ...] = ()
    trial: Trial | None = None
    num_traces: int = 0
    plan_seconds: float = 0.0

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What is in force at first."""
        return self.fallbacks[0].choices

    @property
    def choices_by_fallback(self) -> tuple[tuple[Choice, ...], ...]:
        """What the training step takes."""
        return tuple(configuration.choices for configuration in self.fallbacks)

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a step of what is in force at first, if a trial has measured it."""
        tried = self.trial.tried if self.trial is not None else ()
        return next((one.measured_seconds for one in tried if one.choices == self.choices), None)

    @property
    def fits(self) -> bool:
        """Whether the plan stays under its budget, as far as is known."""
        return self.smallest_budget_bytes is None


def micro_batch_choice(samples: int) -> Choice:
    """Make the choice of a micro-batch."""
    return Choice(technique=MICRO_BATCH, options={"samples": samples})


def without_micro_batch(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Leave the micro-batch out of choices."""
    return tuple(choice for choice in choices if choice.technique != MICRO_BATCH)


def micro_batch_plan(budget: Budget, sizes: tuple[int, ...]) -> Plan:
    """Make the plan whose fallbacks are the micro-batches ``sizes`` (samples), largest first, and nothing else."""
    return Plan(budget=budget, fallbacks=tuple(Configuration(choices=(micro_batch_choice(size),)) for size in sizes))


def parse_pin(text: str) -> Pin:
    """Read ``name``, ``name=value`` or ``name(option=value,...)``, as a choice is written.

    A value is a number, ``true``, ``false`` or a text, which may be in double quotes.

    Raises:
        InputError: if the text is none of these.
    """
    name, inner, value = _parts(text)
    if not _NAME.fullmatch(name):
        raise InputError(_unreadable(text))
    if value is not None:
        return Pin(technique=name, value=_value(value, text))
    return Pin(technique=name, options=dict(_option(part, text) for part in inner))


def _unreadable(text: str) -> str:
    return (
        f"cannot read {text!r} as a choice: write a technique, as in activation_offload, micro_batch=4 or "
        "checkpointing(blocks=0-3)"
    )


def _parts(text: str) -> tuple[str, list[str], str | None]:
    """The name, the options in brackets and the value after ``=``, of which there is one kind at most."""
    stripped = text.strip()
    match = re.fullmatch(r"(\w+)\((.+)\)", stripped)
    if match:
        return match[1], _BEFORE_OPTION.split(match[2]), None
    name, equals, value = stripped.partition("=")
    return name.strip(), [], value if equals else None


def _option(part: str, text: str) -> tuple[str, Value]:
    name, equals, value = part.partition("=")
    if not equals or not _NAME.fullmatch(name.strip()):
        raise InputError(_unreadable(text))
    return name.strip(), _value(value, text)


def _value(word: str, text: str) -> Value:
    """JSON's scalars, which are YAML's too; what is none of them is a text."""
    word = word.strip()
    if not word:
        raise InputError(_unreadable(text))
    try:
        value = json.loads(word)
    except ValueError:
        return word
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_number or isinstance(value, str) else word


def _readable(text: str) -> str:
    try:
        parse_pin(text)
    except InputError as error:
        raise ValueError(str(error)) from None
    return text


PinText = Annotated[str, AfterValidator(_readable)]
"""A pin as a job file has it."""


def check_pins(pins: Sequence[Pin], forbids: Iterable[str]) -> None:
    """Refuse pins that contradict each other, or what is forbidden.

    Raises:
        InputError: if a technique is pinned twice in different ways, or is pinned and forbidden.
    """
    first: dict[str, Pin] = {}
    for pin in pins:
        before = first.setdefault(pin.technique, pin)
        if before != pin:
            raise InputError(f"`{before}` and `{pin}` cannot both be pinned: leave one of them out")
    for name in forbids:
        if name in first:
            raise InputError(f"`{first[name]}` is pinned and `{name}` is forbidden: leave one of the two out")
