"""The plan of a run: its configuration under the budget, the reasons for it, and fallbacks if memory runs out."""

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
"""The effect of a technique on the numerical results of training.

``bitwise``: identical results. ``reordered``: the same mathematics, rounded in another order. ``reduced precision``:
parts of the computation in fewer bits, as with autocast. ``lossy``: a different model or a different training
procedure.
"""


Verdict = Literal["additive", "known", "not additive", "not shown", "allowed", "never cut", "not computed"]
"""The result of comparing the loss of a batch with the loss of its parts: whether the batch may be split."""

Value = int | float | str | bool
"""The type of an option's value."""

MICRO_BATCH = "micro_batch"
"""The technique that every plan has. Its option ``samples`` is the size of one forward and backward pass."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BEFORE_OPTION = re.compile(r",(?=\s*[a-z][a-z0-9_]*\s*=)")  # a value may contain commas: blocks=0,3-5


class Choice(Frozen):
    """A technique with its options, such as ``micro_batch`` with ``{"samples": 16}``."""

    technique: str
    options: dict[str, Value] = {}

    def __str__(self) -> str:
        """Return the choice in command-line syntax: ``micro_batch=16``, ``autocast=bf16``, ``adafactor``."""
        if len(self.options) == 1:
            return _written(self.technique, next(iter(self.options.values())), {})
        return self.in_full

    @property
    def in_full(self) -> str:
        """The choice with the names of all options, for use in sentences: ``float8(dynamic=true)``."""
        return _written(self.technique, None, self.options)

    def __hash__(self) -> int:
        """Hash the content, because the options are a dict, which has no hash."""
        return hash((self.technique, frozenset(self.options.items())))


class Pin(Frozen):
    """A technique that the user requires in the plan, as parsed by `parse_pin`.

    ``value`` is for the technique's first option, whose name the technique defines. Without ``value`` and ``options``,
    the plan chooses the options.
    """

    technique: str
    value: Value | None = None
    options: dict[str, Value] = {}

    def __str__(self) -> str:
        """Return the pin in command-line syntax."""
        return _written(self.technique, self.value, self.options)


def _written(technique: str, value: Value | None, options: dict[str, Value]) -> str:
    if value is not None:
        return f"{technique}={_word(value)}"
    inner = ",".join(f"{name}={_word(value)}" for name, value in options.items())
    return f"{technique}({inner})" if inner else technique


def _word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Duration(Frozen):
    """A predicted duration: its likely value and its range, in seconds."""

    likely_seconds: float
    low_seconds: float
    high_seconds: float


class Configuration(Frozen):
    """A way to run a step: techniques in the order of installation, with the predicted peak and step time.

    ``peak`` and ``step_time`` are ``None`` if they were not predicted, for example in a run without a plan.
    """

    choices: tuple[Choice, ...]
    peak: Estimate | None = None
    step_time: Duration | None = None

    @property
    def micro_batch(self) -> int:
        """The number of samples of one forward and backward pass."""
        return next(int(choice.options["samples"]) for choice in self.choices if choice.technique == MICRO_BATCH)

    @property
    def others(self) -> tuple[Choice, ...]:
        """The choices except the micro-batch."""
        return without_micro_batch(self.choices)


class Rejected(Frozen):
    """A combination of techniques that was considered and rejected. ``reason`` is a sentence with numbers.

    ``is_compared`` is true if the reason compares its step time with the best combination that the search had found.
    """

    choices: tuple[Choice, ...]
    reason: str
    peak: Estimate | None = None
    step_time: Duration | None = None
    is_compared: bool = False


class OffDevice(Frozen):
    """Bytes that a plan keeps outside the memory that its budget counts, and bytes that a step reads or writes there.

    ``disk_bytes_per_second`` is the measured speed of the disk; ``None`` if host memory can cache all these bytes.
    Otherwise a step waits for the disk, and the predicted step time includes the wait.
    """

    kept_bytes: int
    moved_bytes: int
    disk_bytes_per_second: float | None = None


class LossCheck(Frozen):
    """The result of the check whether the loss of a batch is the weighted sum of the losses of its parts.

    The weight of a part is its share of the units that the loss averages over. Values of ``verdict``:

    - ``additive``: a test with samples has confirmed that the two losses are equal.
    - ``known``: the code that computes the loss shows that the two losses are equal.
    - ``not additive``: a test with samples has shown that the two losses differ.
    - ``not shown``: a test with samples could not decide.
    - ``allowed``: no test confirmed that the two losses are equal, but the user allows splitting (``recut_loss``).
    - ``never cut``: the user forbids splitting batches.
    - ``not computed``: no loss could be computed, for example because the weights of the planned model are not in
      memory. The training process then makes the check.

    ``whole`` is the loss of ``num_samples`` samples as one batch. ``parts`` is the weighted sum of the losses of the
    samples, computed one by one. ``difference`` and ``gradient_difference`` are the relative differences of the losses
    and of the gradients (``None``: not compared).
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
        """Return the result for a loss that could not be computed. ``why`` is the reason."""
        return cls(verdict="not computed", why=f"{why}: training checks this before it splits a batch")

    @property
    def may_cut(self) -> bool:
        """True if the batch may be split, as far as is known."""
        return self.verdict in {"additive", "known", "allowed", "not computed"}

    @property
    def sentence(self) -> str:
        """A sentence that states the result, for the user."""
        if self.verdict == "additive":
            found = f"{self.num_samples} samples have the same loss as one batch and one by one"
            return f"{found}, and the same gradients" if self.gradient_difference is not None else found
        return self.why


class Candidate(FormerNames):
    """A configuration that is predicted to be about as fast as the first configuration of the plan.

    The fields besides the configuration have the same meaning as in `Plan`.
    """

    former_names: ClassVar[Mapping[str, str]] = {"rung": "configuration"}

    configuration: Configuration
    prediction: Prediction | None = None
    time_factor: float = 1.0
    off_device: OffDevice | None = None


class Tried(Frozen):
    """The result of a trial for one candidate.

    ``predicted_seconds`` is the step time without corrections from earlier runs. ``measured_seconds`` is the step time
    estimated from the passes of the trial. ``peak_bytes`` is the peak of these passes. Numbers that are not known are
    ``None``. ``why`` explains the outcome. Three outcomes need a definition:

    - ``struck``: not run, because memory ran out in another candidate that needs less.
    - ``too near``: the peak is so near the limit that a long run may exceed it.
    - ``not tried``: the time limit of the trial was reached before.
    """

    choices: tuple[Choice, ...]
    outcome: Literal["fastest", "slower", "ran out", "struck", "too near", "failed", "not tried"]
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    peak_bytes: int | None = None
    why: str = ""


class Trial(Frozen):
    """The results of running a few passes of each candidate before the training, fastest first. The passes are undone.

    ``seconds`` is the total time: warm-up passes, timed passes and restoring the state. ``left_out`` is the reason if
    no candidate was run.
    """

    seconds: float = 0.0
    tried: tuple[Tried, ...] = ()
    left_out: str = ""


class Plan(FormerNames, Record):
    """The chosen configuration, and smaller configurations for when memory runs out.

    Attributes:
        budget: the budget that the plan is for.
        fallbacks: the chosen configuration, then its fallbacks in order of falling predicted peak. If nothing fits: the
            configuration that needs the least memory.
        limit_bytes: the budget minus the headroom; ``None`` if the plan has no limit.
        plain: the configuration that runs the whole batch at once, without any technique.
        rejected: combinations that were considered and rejected.
        lossy_alternatives: if nothing fits: for each technique that changes the training and is not allowed, the
            combination with it that needs the least memory.
        smallest_budget_bytes: if nothing fits, the budget that would be needed; otherwise ``None``.
        prediction: the prediction for the chosen configuration.
        pinned: choices that the user requires, with their options.
        required: techniques that the user requires, with options chosen by the plan.
        forbidden: techniques that the user forbids.
        left_out: the reason for each pin that cannot be used with this number of ranks, by pin.
        about: a description of each technique, by name.
        numerics: the effect of each technique on the numerical results, by name.
        why: for each technique, by name, the bytes or time that it saves in this plan, or the reason for using it.
        made_for: facts about the training run, by name. The plan is refused for a run in which one of them differs.
        time_factor: the factor, known from earlier runs, that corrects the step time. ``step_time`` includes it.
        off_device: the bytes outside the budget, if parameters are in files (CPU) or in host memory (CUDA).
        loss_check: the result of the check whether a batch may be split.
        tokenizer_bytes: peak memory of training the tokenizer, before the model exists.
        candidates: configurations with about the same step time, which a trial runs besides the first configuration.
        trial: the results of the trial; ``None`` without one.
        num_traces: the number of dry runs that were traced.
        plan_seconds: the time that planning took.
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
        """The choices of the first configuration, with which a run starts."""
        return self.fallbacks[0].choices

    @property
    def choices_by_fallback(self) -> tuple[tuple[Choice, ...], ...]:
        """The choices of each fallback, in the order of the fallbacks."""
        return tuple(configuration.choices for configuration in self.fallbacks)

    @property
    def measured_seconds(self) -> float | None:
        """The measured step time in seconds of the first configuration; ``None`` if no trial has measured it."""
        tried = self.trial.tried if self.trial is not None else ()
        return next((one.measured_seconds for one in tried if one.choices == self.choices), None)

    @property
    def fits(self) -> bool:
        """True if the plan stays under its budget, as far as is known."""
        return self.smallest_budget_bytes is None


def micro_batch_choice(samples: int) -> Choice:
    """Return the choice of a micro-batch of ``samples`` samples."""
    return Choice(technique=MICRO_BATCH, options={"samples": samples})


def without_micro_batch(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices except the micro-batch."""
    return tuple(choice for choice in choices if choice.technique != MICRO_BATCH)


def micro_batch_plan(budget: Budget, sizes: tuple[int, ...]) -> Plan:
    """Return a plan whose fallbacks are the micro-batches ``sizes`` (samples), largest first, without techniques."""
    return Plan(budget=budget, fallbacks=tuple(Configuration(choices=(micro_batch_choice(size),)) for size in sizes))


def parse_pin(text: str) -> Pin:
    """Parse ``name``, ``name=value`` or ``name(option=value,...)``, the syntax of choices.

    A value is a number, ``true``, ``false`` or a string, which may be in double quotes.

    Raises:
        InputError: if the text does not have this syntax.
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
    """Split the text of a pin into the name, the options in brackets, and the value after ``=``.

    Without brackets, the list of options is empty. Without ``=``, the value is ``None``. A pin cannot have both.
    """
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
    """Parse a number, ``true``, ``false`` or a quoted string, as in JSON. Return any other word as a string."""
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
"""A pin as written in a job file."""


def check_pins(pins: Sequence[Pin], forbids: Iterable[str]) -> None:
    """Check that pins do not contradict each other or the forbidden techniques.

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
