"""Smaller models: the options of each method, and what became of each that was tried: size, memory, time, quality.

The options are here, and not beside the methods (`plimsoll.compression.methods`), so that what is mistyped is refused
before torch is imported. What depends on the model (how many layers there are to keep) is refused by the method itself.
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
"""``structure``: other shapes, which can be trained on and made smaller again. ``values``: the same shapes in fewer
bits, which comes last."""

Importance = Literal["magnitude", "taylor", "activation"]

IMPORTANCES: tuple[Importance, ...] = ("magnitude", "taylor", "activation")

SHARE = 0.25
"""What is taken away where nobody says how much."""


class Option(NamedTuple):
    """What is taken where an option is left out (``None``: nothing), and what is wrong with a value, in words."""

    default: Value | None
    fault: Callable[[str, object], str | None]


@dataclass(frozen=True)
class Asked:
    """What may be asked of a method.

    Attributes:
        stage: where it stands in a chain.
        options: by name; the first is what ``method=value`` on a command line means.
        one_of: options of which a choice has one at most.
    """

    stage: Stage
    options: Mapping[str, Option] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Value | None]:
        """What is taken where an option is left out."""
        return {name: option.default for name, option in self.options.items()}


def share_fault(name: str, value: object) -> str | None:
    """Return a sentence where a value is no share, of more than nothing and less than all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return f"`{name}` {value} is not the share that is taken away: give a number between 0 and 1, such as 0.25"
    return None


def value_fault(known: Sequence[Value], name: str, value: object) -> str | None:
    """Return a sentence where a value is none of some."""
    if any(type(value) is type(one) and value == one for one in known):
        return None
    listed = ", ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in known)
    return f"`{name}` cannot be {value}: give one of {listed}"


def count_fault(name: str, value: object) -> str | None:
    """Return a sentence where a value is no whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"`{name}` {value} is not a number of them: give a whole number from 1 on"
    return None


def _one_of(*known: Value) -> Option:
    """An option with these values, the first of which is taken where it is left out."""
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
"""What may be asked of each method, in the order in which a chain applies them."""


def options_of(choice: Choice) -> dict[str, Value | None]:
    """Return the options of a choice, those that are not given as they are by default."""
    return {**METHODS[choice.technique].defaults, **choice.options}


def options_fault(choice: Choice) -> str | None:
    """Return a sentence that says which option of a choice is wrong whatever the model is, or ``None``."""
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
    """Refuse a name that no method has.

    Raises:
        WeightsError: it names the nearest.
    """
    if name not in METHODS:
        raise WeightsError(f"there is no method `{name}`; {near(name, METHODS)}")


def chain_of(pins: Sequence[Pin]) -> tuple[Choice, ...]:
    """Return the choices that a user wrote, with the names of options that were left out.

    Raises:
        WeightsError: if there is no such method, option or value, or what changes shapes comes behind what changes
            values.
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
                f"{pin.technique} changes shapes and {found[-1]} the bits of values, which must be last: give "
                f"--method {pin.technique} before --method {found[-1].technique}"
            )
        found.append(choice)
    return tuple(found)


SHRINK_RECORD = "shrink.json"
"""What the record is called in the folder of the smaller model."""

Form = Literal["plain", "code", "torchao", "recurrent"]
"""How a model is loaded where Plimsoll is not installed; see `HOW_TO_LOAD`."""

HOW_TO_LOAD: dict[Form, str] = {
    "plain": "from_pretrained(folder)",
    "code": "from_pretrained(folder, trust_remote_code=True), which runs modeling_shrunk.py of the folder",
    "torchao": (
        "from_pretrained(folder), with torchao installed, and with trust_remote_code=True if modeling_shrunk.py is in "
        "the folder; int4 runs on a GPU only"
    ),
    "recurrent": "a state_dict in model.safetensors, and its sizes in config.json, for torch.nn's layers",
}
"""What loads a folder of each form."""


class Quality(Frozen):
    """What a model is worth on the evaluation data.

    ``num_samples`` are the texts that were judged, of a language model the windows. ``loss`` is the mean of the task;
    ``similarity`` the mean cosine of embeddings with those of the original model,
    where the task is to embed, and then ``loss`` is 1 less that.
    """

    loss: float
    num_samples: int
    accuracy: float | None = None
    entity_f1: float | None = None
    similarity: float | None = None

    @property
    def is_language_model(self) -> bool:
        """Whether the loss is all there is: that of the next token."""
        return self.accuracy is None and self.entity_f1 is None and self.similarity is None

    @property
    def perplexity(self) -> float | None:
        """e to the loss of a language model."""
        return math.exp(min(self.loss, 700.0)) if self.is_language_model else None

    @property
    def score(self) -> float:
        """What models are compared by, more being better: F1 of entities, accuracy, similarity, or less loss."""
        known = (self.entity_f1, self.accuracy, self.similarity)
        return next((one for one in known if one is not None), -self.loss)

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts the better one behind: by its score, and where that is equal by its loss."""
        loss = self.loss if math.isfinite(self.loss) else math.inf
        return (self.score if math.isfinite(self.score) else -math.inf, -loss)


class InferenceCost(Frozen):
    """What applying a model takes, in a process of its own: measured, and what was predicted of the peak.

    ``baseline_bytes`` is what the process took before it had the model, which ``peak_bytes`` includes. ``speed`` is how
    many times as many rows it does in a time as the original, timed in turn with it.
    """

    rows: int
    longest_tokens: int
    peak_bytes: int
    baseline_bytes: int
    row_seconds: float
    speed: float = 1.0
    predicted: Estimate | None = None


class TrainingCost(Frozen):
    """What a training step takes; measured only where the model was trained.

    ``has_teacher`` says that a teacher's passes are part of it.
    """

    predicted: Estimate | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None
    has_teacher: bool = False


class Small(Frozen):
    """One model: what was done to the original in this order, and what came of it.

    Without a ``chain`` it is the original. ``quality`` is that before any training here, ``recovered`` after
    ``recovery_steps`` of it, which the original is given, too. ``rejected`` says why it is not the one that was asked
    for.
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
        """After recovery, where there was one that helped: else what was written is the model without."""
        if self.recovered is None:
            return self.quality
        return max(self.quality, self.recovered, key=lambda one: one.rank)

    @property
    def name(self) -> str:
        """The chain as it is written."""
        return " > ".join(map(str, self.chain)) or "original"


class Unused(Frozen):
    """A method that was not tried, and why."""

    method: str
    reason: str


class ShrinkRecord(Record):
    """Models made of one, the original first; ``best`` is the number of the one that was written to ``output``.

    ``target_bytes`` bounds the files of weights, ``budget_bytes`` the predicted peak of a training; ``saves`` says of
    each method that was tried what becomes smaller by it. One that is not complete is of a search that was stopped.
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
        """What was given."""
        return self.models[0]

    @property
    def front(self) -> tuple[int, ...]:
        """The numbers of the models that no other beats in both size and quality, the smallest first."""
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
