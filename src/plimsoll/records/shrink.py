"""The options of each compression method, and the results for each compressed model: size, memory, time, quality.

The options are not defined with the methods (`plimsoll.compression.methods`), so that mistyped options are reported
before torch is imported. Checks that depend on the model, such as its number of layers, are in the methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, NamedTuple

from plimsoll.errors import WeightsError
from plimsoll.records.base import Frozen, Record
from plimsoll.records.job_yaml import near
from plimsoll.records.plan import Choice, Pin, Value
from plimsoll.records.prediction import Estimate

Stage = Literal["structure", "values"]
"""The kind of change that a compression method makes.

``structure`` changes shapes; the model can be trained and compressed further. ``values`` keeps the shapes and stores
values in fewer bits, or as zeros. Methods of this kind come last in a chain.
"""

Importance = Literal["magnitude", "taylor", "activation"]

IMPORTANCES: tuple[Importance, ...] = ("magnitude", "taylor", "activation")

SHARE = 0.25
"""The share of attention heads, layers, channels or hidden units that a method removes by default."""


class Option(NamedTuple):
    """An option of a compression method: its default, and a function that checks a value.

    If ``default`` is ``None``, the option has no value until it is set. ``fault`` returns the error message for a wrong
    value, and ``None`` for a good value.
    """

    default: Value | None
    fault: Callable[[str, object], str | None]


@dataclass(frozen=True)
class Asked:
    """The stage and the options of a compression method.

    Attributes:
        stage: the kind of change that the method makes, which determines its place in a chain.
        options: options by name. ``method=value`` on a command line sets the first option.
        one_of: names of options that exclude each other: at most one of them may be set.
    """

    stage: Stage
    options: Mapping[str, Option] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Value | None]:
        """The default of each option."""
        return {name: option.default for name, option in self.options.items()}


def share_fault(name: str, value: object) -> str | None:
    """Return an error message if the value is not a share between 0 and 1, both excluded; otherwise ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return f"`{name}` {value} is not a share to remove: give a number between 0 and 1, such as 0.25"
    return None


def value_fault(known: Sequence[Value], name: str, value: object) -> str | None:
    """Return an error message if the value is not in ``known``; otherwise ``None``."""
    if any(type(value) is type(one) and value == one for one in known):
        return None
    listed = ", ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in known)
    return f"`{name}` cannot be {value}: give one of {listed}"


def count_fault(name: str, value: object) -> str | None:
    """Return an error message if the value is not a positive integer; otherwise ``None``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"`{name}` {value} is not a count: give a whole number of at least 1"
    return None


def _one_of(*known: Value) -> Option:
    """Return an option that accepts these values. The first value is the default."""
    return Option(known[0], partial(value_fault, known))


_PARTS = Asked("structure", {"share": Option(SHARE, share_fault), "importance": _one_of(*IMPORTANCES)})
_RANK = {"share": Option(None, share_fault), "rank": Option(None, count_fault)}

METHODS: Mapping[str, Asked] = {
    "vocabulary": Asked("structure", {"min_count": Option(1, count_fault)}),
    "layers": Asked(
        "structure",
        {
            "keep": Option(None, count_fault),
            "share": Option(None, share_fault),
            "importance": _one_of("even", *IMPORTANCES),
        },
        one_of=("keep", "share"),
    ),
    "hidden": _PARTS,
    "heads": _PARTS,
    "channels": _PARTS,
    "units": _PARTS,
    "shared_layers": Asked("structure", {"groups": Option(1, count_fault), "start": _one_of("first", "mean")}),
    "low_rank": Asked("structure", {**_RANK, "aware": _one_of(True, False)}, one_of=("share", "rank")),
    "low_rank_embeddings": Asked("structure", _RANK, one_of=("share", "rank")),
    "tied": Asked("structure"),
    "unstructured": Asked("values", {"share": Option(0.5, share_fault)}),
    "two_four": Asked("values"),
    "bf16": Asked("values"),
    "int8_embeddings": Asked("values"),
    "int8": Asked("values"),
    "int4": Asked("values", {"group": _one_of(32, 64, 128), "compute": _one_of("bf16", "fp32")}),
    "dynamic_int8": Asked("values"),
    "float8": Asked("values", {"dynamic": _one_of(False, True)}),
}
"""The options of each method, in the order in which a chain applies the methods."""


def options_of(choice: Choice) -> dict[str, Value | None]:
    """Return all options of a chosen method with their values; an option that is not set has its default."""
    return {**METHODS[choice.technique].defaults, **choice.options}


def options_fault(choice: Choice) -> str | None:
    """Return an error message about the first option whose value is wrong for every model; otherwise ``None``."""
    asked = METHODS[choice.technique]
    for name, value in choice.options.items():
        if name not in asked.options:
            takes = ", ".join(f"`{one}`" for one in asked.options) or "no options"
            return f"`{choice.technique}` has no option `{name}` ({value}): it takes {takes}; leave it out"
        fault = asked.options[name].fault(name, value)
        if fault is not None:
            return fault
    given = [f"{name} {choice.options[name]}" for name in asked.one_of if name in choice.options]
    return f"`{choice.technique}` has {' and '.join(given)}: give one of them" if len(given) > 1 else None


def check_method(name: str) -> None:
    """Check that a method exists.

    Raises:
        WeightsError: if there is no such method. The message suggests the nearest name.
    """
    if name not in METHODS:
        raise WeightsError(f"there is no method `{name}`; {near(name, METHODS)}")


def chain_of(pins: Sequence[Pin]) -> tuple[Choice, ...]:
    """Return the compression methods that ``--method`` asks for, checked, as choices in the given order.

    A value without an option name, as in ``vocabulary=5``, sets the first option of the method.

    Raises:
        WeightsError: if a method or option does not exist, a value is not allowed, or a method that changes shapes
            follows a method that changes values.
    """
    found: list[Choice] = []
    for pin in pins:
        check_method(pin.technique)
        asked, given = METHODS[pin.technique], dict(pin.options)
        if pin.value is not None:
            given[next(iter(asked.options), "value")] = pin.value
        choice = Choice(technique=pin.technique, options=given)
        fault = options_fault(choice)
        if fault is not None:
            raise WeightsError(f"--method '{choice.in_full}': {fault}")
        if found and METHODS[found[-1].technique].stage == "values" and asked.stage != "values":
            raise WeightsError(
                f"{pin.technique} changes shapes, and {found[-1]} changes values, which must come last: give "
                f"--method {pin.technique} before --method {found[-1].technique}"
            )
        found.append(choice)
    return tuple(found)


SHRINK_RECORD = "shrink.json"
"""The name of the record's file in the folder of the compressed model."""

Form = Literal["plain", "code", "torchao", "recurrent"]
"""The way to load a model if Plimsoll is not installed; see `HOW_TO_LOAD`."""

HOW_TO_LOAD: dict[Form, str] = {
    "plain": "from_pretrained(folder)",
    "code": "from_pretrained(folder, trust_remote_code=True), which runs modeling_shrunk.py of the folder",
    "torchao": (
        "from_pretrained(folder), with torchao installed, and with trust_remote_code=True if modeling_shrunk.py is in "
        "the folder; int4 runs on a GPU only"
    ),
    "recurrent": "a state_dict in model.safetensors, and its sizes in config.json, for torch.nn's layers",
}
"""The call that loads a folder of each form."""


class Quality(Frozen):
    """The quality of a model on the evaluation data.

    ``num_samples`` is the number of texts, or of windows for a language model. ``loss`` is the mean loss of the task.
    For embedding models, ``similarity`` is the mean cosine to the embeddings of the original model, and ``loss`` is 1 -
    ``similarity``.
    """

    loss: float
    num_samples: int
    accuracy: float | None = None
    entity_f1: float | None = None
    similarity: float | None = None

    @property
    def is_language_model(self) -> bool:
        """True if the loss is the only measure of quality, as for a language model."""
        return self.accuracy is None and self.entity_f1 is None and self.similarity is None

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss of a language model; ``None`` for other models."""
        return math.exp(min(self.loss, 700.0)) if self.is_language_model else None

    @property
    def score(self) -> float:
        """The score that compares models: entity F1, accuracy, similarity, or the negative loss. Higher is better."""
        known = (self.entity_f1, self.accuracy, self.similarity)
        return next((one for one in known if one is not None), -self.loss)

    @property
    def rank(self) -> tuple[float, float]:
        """A key to sort models by quality: the score, then the negative loss. Higher is better."""
        loss = self.loss if math.isfinite(self.loss) else math.inf
        return (self.score if math.isfinite(self.score) else -math.inf, -loss)


class InferenceCost(Frozen):
    """The cost of inference in a separate process: the measured memory and time, and the predicted peak.

    ``peak_bytes`` includes ``baseline_bytes``, the memory of the process before it loaded the model. ``speed`` is the
    throughput divided by the throughput of the original model. Both models were timed alternately.
    """

    rows: int
    longest_tokens: int
    peak_bytes: int
    baseline_bytes: int
    row_seconds: float
    speed: float = 1.0
    predicted: Estimate | None = None


class TrainingCost(Frozen):
    """The cost of a training step of a compressed model.

    If the model was trained, ``peak_bytes`` and ``step_seconds`` were measured. Otherwise, they are ``None``, and
    ``predicted`` is the predicted peak. If ``has_teacher`` is true, the cost includes the passes of the teacher model.
    """

    predicted: Estimate | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None
    has_teacher: bool = False


class Small(Frozen):
    """The original model or a compressed model, with its results.

    ``chain`` lists the methods in the order in which they were applied; it is empty for the original. ``quality`` is
    measured before recovery training, and ``recovered`` after ``recovery_steps`` steps of recovery training. The
    original may also have been trained for as many steps, for comparison. ``rejected`` is the reason why the model does
    not satisfy the request.
    """

    chain: tuple[Choice, ...] = ()
    form: Form
    file_bytes: int
    weight_bytes: int
    quality: Quality
    recovered: Quality | None = None
    recovery_steps: int = 0
    inference: InferenceCost | None = None
    training: TrainingCost | None = None
    rejected: str = ""

    @property
    def best_quality(self) -> Quality:
        """The better of the qualities before and after recovery training. The better model is written."""
        if self.recovered is None:
            return self.quality
        return max(self.quality, self.recovered, key=lambda one: one.rank)

    @property
    def name(self) -> str:
        """The chain in command-line syntax."""
        return " > ".join(map(str, self.chain)) or "original"


class Unused(Frozen):
    """A compression method that was not tried, and the reason."""

    method: str
    reason: str


class ShrinkRecord(Record):
    """The original model, which comes first, and models derived from it.

    The model at index ``best`` was written to ``output``; ``None`` if no model was chosen.

    ``target_bytes`` limits the size of the weight files, ``budget_bytes`` the predicted peak of training a model.
    ``saves`` describes the saving of each method that was tried, by method. ``is_complete`` is false if the search was
    stopped.
    """

    record_kind: ClassVar[str] = "shrink"

    model: str
    task: str
    evaluated_on: str
    output: str
    target_bytes: int | None = None
    budget_bytes: int | None = None
    models: tuple[Small, ...]
    best: int | None = None
    unused: tuple[Unused, ...] = ()
    saves: dict[str, str] = {}
    seconds: float = 0.0
    is_complete: bool = True
    versions: dict[str, str] = {}

    @property
    def original(self) -> Small:
        """The original model."""
        return self.models[0]

    @property
    def front(self) -> tuple[int, ...]:
        """The indices in ``models`` of the Pareto-optimal models by size and quality, smallest first."""
        order = sorted(
            range(len(self.models)), key=lambda number: (self.models[number].file_bytes, self._worse(number))
        )
        kept: list[int] = []
        for number in order:
            if not kept or self.models[number].best_quality.rank > self.models[kept[-1]].best_quality.rank:
                kept.append(number)
        return tuple(kept)

    def _worse(self, number: int) -> tuple[float, float]:
        score, less_loss = self.models[number].best_quality.rank
        return -score, -less_loss
