"""Inference tasks: from a batch of token ids to a result for each text.

`inference_task` reads the settings of a task from the model's folder, such as the names of labels or the pooling.
``compute`` is then a pure function of tensors. It uses no autograd and reads no values, and the shapes of its results
follow from the batch. A dry run on fake tensors is therefore possible. Results are float32 (counts are integers), with
one entry per text along the first dimension. ``fields`` converts them to JSON values.

Texts of a batch are padded on the right, or on the left for ``generate``. Supported are Hugging Face models that are
encoders or decoders of text, and Plimsoll's recurrent models.

Not handled: encoder-decoder models, labels of tokens, and sampling. `Generate` is only the first pass of generation;
`plimsoll.models.generation` contains the other passes.

Shapes: B texts, T tokens, L labels, D features, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from plimsoll.errors import JobError
from plimsoll.models.hugging_face import OTHER_LOSS, read_hugging_face_config
from plimsoll.models.loading import Head as Head  # noqa: PLC0414 -- part of this interface
from plimsoll.models.names import RECURRENT
from plimsoll.models.pooling import MODULES_FILE, Pooling, pool, pooling_of
from plimsoll.models.token_scores import token_log_probabilities
from plimsoll.weights.structure import unmarked

Batch = Mapping[str, Tensor]

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]

_MEAN = Pooling()

_YES_FROM = 0.5
"""With multi-label classification, a label applies if its probability is above this value."""


class InferenceTask(Protocol):
    """The interface of an inference task: a computation on a batch, and the conversion of its results to JSON."""

    name: ClassVar[str]
    head: ClassVar[Head]

    def compute(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the results of a batch on the model's device.

        Call it under ``torch.inference_mode`` or ``torch.no_grad``, with the model in evaluation mode.

        Args:
            model: the model.
            batch: ``input_ids`` and ``attention_mask``, (B, T).
        """
        ...

    def fields(self, results: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        """Return the JSON fields of each text. If a result is not finite, the field ``error`` reports it."""
        ...


@dataclass(frozen=True)
class Score:
    """The log-probability of a text, summed over all tokens but the first, and the number of these tokens."""

    name: ClassVar[str] = "score"
    head: ClassVar[Head] = "language-modeling"

    def compute(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the log-probability of each text (B,) and its number of predicted tokens (B,)."""
        mask_BT = batch["attention_mask"]
        scores_BT = token_log_probabilities(model, batch["input_ids"], mask_BT)
        return scores_BT.sum(dim=1), mask_BT[:, 1:].sum(dim=1)

    def fields(self, results: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        """Return log-probability, number of predicted tokens, and perplexity exp(-log-probability / number)."""
        return [
            _score_fields(total, number) for total, number in zip(*(part.tolist() for part in results), strict=True)
        ]


@dataclass(frozen=True)
class Classify:
    """The class of a text: the probability of each label, or the values of a regression."""

    name: ClassVar[str] = "classify"
    head: ClassVar[Head] = "classification"
    labels: tuple[str, ...] = ()
    problem: Problem = "single_label_classification"

    def compute(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return a tensor (B, L): probabilities that sum to 1, multi-label probabilities, or regression values."""
        logits_BL = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        if self.problem == "regression":
            return (logits_BL,)
        return (logits_BL.sigmoid() if self.problem == "multi_label_classification" else logits_BL.softmax(dim=-1),)

    def fields(self, results: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        """Return the best label, its probability and all probabilities, or the regression values."""
        return [self._fields(numbers) for numbers in results[0].tolist()]

    def _fields(self, numbers: list[float]) -> dict[str, Any]:
        found = {label: _finite(number) for label, number in zip(self.labels, numbers, strict=True)}
        if fault := _said_if_not_finite(list(found.values())):
            return fault
        if self.problem == "regression":
            return {"value": numbers[0]} if len(numbers) == 1 else {"values": found}
        if self.problem == "multi_label_classification":
            likely = [label for label, number in zip(self.labels, numbers, strict=True) if number > _YES_FROM]
            return {"labels": likely, "probabilities": found}
        best = max(range(len(numbers)), key=numbers.__getitem__)
        return {"label": self.labels[best], "score": numbers[best], "probabilities": found}


@dataclass(frozen=True)
class Embed:
    """The embedding of a text: one vector, pooled from the vectors of its tokens."""

    name: ClassVar[str] = "embed"
    head: ClassVar[Head] = "none"
    pooling: Pooling = _MEAN

    def compute(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the embeddings in float32: (B, D), or (B, D * number of pooling modes)."""
        mask_BT = batch["attention_mask"]
        hidden_BTD = model(input_ids=batch["input_ids"], attention_mask=mask_BT)[0]
        return (pool(hidden_BTD, mask_BT, self.pooling),)

    def fields(self, results: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        """Return the embedding of each text."""
        return [_embedding_fields(vector) for vector in results[0].tolist()]


@dataclass(frozen=True)
class Generate:
    """The first pass of generating a continuation: it reads the prompt and fills the key-value cache."""

    name: ClassVar[str] = "generate"
    head: ClassVar[Head] = "language-modeling"

    def compute(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the logits (B, V) of the token that follows each prompt."""
        mask_BT = batch["attention_mask"]
        outputs = model(input_ids=batch["input_ids"], attention_mask=mask_BT, use_cache=True, logits_to_keep=1)
        return (outputs.logits[:, -1].float(),)

    def fields(self, results: tuple[Tensor, ...]) -> list[dict[str, Any]]:
        """Return the id of the most likely next token of each text."""
        return [{"next_token": number} for number in results[0].argmax(dim=-1).tolist()]


def _classify(folder: Path) -> Classify:
    config = read_config(folder)
    if config.get("architecture") in RECURRENT:
        names = config.get("label_names") or [str(number) for number in range(config["num_labels"])]
        return Classify(tuple(names))
    loaded: Any = read_hugging_face_config(folder)
    labels = tuple(str(loaded.id2label[number]) for number in range(loaded.num_labels))
    # If the configuration has no problem_type, the pipeline of transformers uses the same default.
    problem: Problem = loaded.problem_type or (
        "multi_label_classification" if len(labels) == 1 else "single_label_classification"
    )
    return Classify(labels, problem)


INFERENCE_TASKS: Mapping[str, Callable[[Path], InferenceTask]] = {
    "classify": _classify,
    "score": lambda folder: Score(),
    "embed": lambda folder: Embed(pooling_of(folder)),
    "generate": lambda folder: Generate(),
}
"""The factory of each task, which takes the model's folder."""


def inference_task(name: str, folder: Path) -> InferenceTask:
    """Create a task for the model in a folder.

    Raises:
        JobError: if the task does not exist, the folder lacks settings for it, or the model does not support it.
    """
    if name not in INFERENCE_TASKS:
        raise JobError(f"there is no task `{name}`: use one of {', '.join(sorted(INFERENCE_TASKS))}")
    config = read_config(folder)
    kind = kind_of(config, folder)
    if name not in _TASKS_OF[kind]:
        possible = _TASKS_OF[kind]
        instead = f"use --task {' or '.join(possible)}" if possible else "use a model with a head for texts"
        raise JobError(f"model: {folder} is a {_KINDS[kind]}, which cannot {name} texts: {instead}")
    _refuse_unable(name, config, folder)
    return INFERENCE_TASKS[name](folder)


def _refuse_unable(name: str, config: dict[str, Any], folder: Path) -> None:
    """Raise an error if a model's architecture cannot do a task that other models of its kind can do."""
    if config.get("architecture") in RECURRENT:
        if name in {"embed", "generate"}:
            raise JobError(f"model: {folder} is a recurrent model, which cannot {name} texts: use a transformers model")
        return
    if name not in {"score", "generate"}:
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if model_type in OTHER_LOSS:
        raise JobError(
            f"model: `{model_type}` {OTHER_LOSS[model_type]}, so it cannot {name} texts: use for example gpt2"
        )
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        raise JobError(
            f"model: {folder} reads texts in both directions (is_decoder is not true in its config.json), so it "
            f"cannot {name} them: use --task embed, or a causal model"
        )


def default_task(folder: Path) -> str:
    """Return the task that the model in a folder was trained for.

    Raises:
        JobError: if no supported task fits the model, or its configuration cannot be read.
    """
    kind = kind_of(read_config(folder), folder)
    if not _TASKS_OF[kind]:
        raise JobError(
            f"model: {folder} is a {_KINDS[kind]}, which no task supports: use a model with a head for texts"
        )
    return _TASKS_OF[kind][0]


Kind = Literal["causal", "classifier", "encoder", "sentences", "tagger", "encoder-decoder"]

_TASKS_OF: Mapping[Kind, tuple[str, ...]] = {
    "causal": ("score", "generate", "embed"),
    "classifier": ("classify", "embed"),
    "encoder": ("embed",),
    "sentences": ("embed",),
    "tagger": (),
    "encoder-decoder": (),
}
"""The tasks of each kind of model; the first one is the default."""

_KINDS: Mapping[Kind, str] = {
    "causal": "language model",
    "classifier": "classifier of texts",
    "encoder": "model without a head for texts",
    "sentences": "model of sentence embeddings",
    "tagger": "classifier of tokens",
    "encoder-decoder": "encoder-decoder",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a model folder.

    Raises:
        JobError: if the file is missing or cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(
            f"model: {folder} is not a model folder, its config.json cannot be read ({error}): give a folder that "
            "`save_pretrained` wrote, or a run directory of `plimsoll train`"
        ) from None
    if not isinstance(config, dict):
        raise JobError(f"model: {path} is not a JSON object: save or download the model again")
    return unmarked(config)


def kind_of(config: dict[str, Any], folder: Path) -> Kind:
    """Return the kind of a model (see `Kind`), mainly from the class name in its configuration."""
    if config.get("architecture") in RECURRENT:
        is_tagger, is_causal = config.get("is_tagger"), config.get("num_labels") is None
        return "tagger" if is_tagger else "causal" if is_causal else "classifier"
    if (folder / MODULES_FILE).is_file():
        return "sentences"
    if config.get("is_encoder_decoder"):
        return "encoder-decoder"
    saved_from = tuple(map(str, config.get("architectures") or ()))
    endings: dict[str, Kind] = {"ForSequenceClassification": "classifier", "ForTokenClassification": "tagger"}
    for ending, kind in endings.items():
        if any(name.endswith(ending) for name in saved_from):
            return kind
    return "causal" if set(saved_from) & _causal_classes() else "encoder"


def _causal_classes() -> set[str]:
    """Return the names of causal language model classes; masked models, which transformers lists too, are left out."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = (
        name
        for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([entry] if isinstance(entry, str) else entry)
    )
    return {name for name in names if not name.endswith("ForMaskedLM")}


def _score_fields(log_probability: float, num_tokens: int) -> dict[str, Any]:
    value = _finite(log_probability)
    return _said_if_not_finite([value]) | {
        "log_probability": value,
        "num_predicted_tokens": num_tokens,
        "perplexity": _perplexity(value, num_tokens),
    }


def _perplexity(log_probability: float | None, num_tokens: int) -> float | None:
    if log_probability is None or not num_tokens:
        return None
    try:
        return math.exp(-log_probability / num_tokens)
    except OverflowError:
        return None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _said_if_not_finite(numbers: list[float | None]) -> dict[str, Any]:
    if None not in numbers:
        return {}
    return {
        "error": "the result is not a finite number: the weights contain NaN or infinity, or the range "
        "of --dtype is too small"
    }


def _embedding_fields(vector: list[float]) -> dict[str, Any]:
    fault = _said_if_not_finite([_finite(number) for number in vector])
    # Nine digits identify every float32. Python would write up to seventeen.
    return fault or {"embedding": [float(f"{number:.9g}") for number in vector]}
