"""What became of making a model smaller: each way that was tried, what it takes, and what it costs in quality."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.plan import Choice
from plimsoll.records.prediction import Estimate

SHRINK_RECORD = "shrink.json"
"""What the record is called in the folder of the smaller model."""

Form = Literal["plain", "code", "torchao", "recurrent"]
"""How a model is loaded where Plimsoll is not installed; see `HOW_TO_LOAD`."""

HOW_TO_LOAD: dict[Form, str] = {
    "plain": "from_pretrained(folder)",
    "code": "from_pretrained(folder, trust_remote_code=True), which runs modeling_shrunk.py of the folder",
    "torchao": (
        "from_pretrained(folder), with torchao installed, and with trust_remote_code=True where modeling_shrunk.py is "
        "in the folder; int4 computes on a GPU only"
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
        """What ways are compared by, more being better: F1 of entities, accuracy, similarity, or less loss."""
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
