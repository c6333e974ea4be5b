"""Hugging Face models: any text architecture of transformers with new weights, or a checkpoint folder.

Transformers silently accepts unknown configuration fields and builds models whose position table is too short for the
sequence. It does not check that a loss fits its labels. Here each of these mistakes raises an error that names the
field.

Weights are float32; the job's ``precision`` only sets the dtype of autocast. Padding has the id `padding_id`. The
key-value cache is off, because training does not use it; ``generate`` on the saved model turns it on.

Not handled: the Hugging Face Hub, encoder-decoder models, and models that also take images or sound.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import JobError, WeightsError
from plimsoll.models.loading import config_of, load_model
from plimsoll.models.names import HEADS, architectures, require_fields
from plimsoll.models.skeleton import quiet
from plimsoll.records.job import Task
from plimsoll.weights.structure import FIELD, class_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

OTHER_LOSS = {
    "cpmant": "compares each position with its own label, not with the next",
    "trocr": "compares each position with its own label, not with the next",
    "xlm": "compares each position with its own label, not with the next",
    "xlnet": "learns by permutation",
}
"""Architectures whose loss is not next-token prediction (as of transformers 5.23), without encoder-decoders."""

_ONE_LABEL: Literal["single_label_classification"] = "single_label_classification"

_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len")

_COUNTED_FROM_PADDING = {
    *(
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "roberta-prelayernorm",
        "data2vec-text",
        "xmod",
        "mpnet",
    ),
    *("longformer", "esm", "ibert", "luke", "lilt"),
}
"""Architectures that number positions from padding id + 1 (as of transformers 5.23)."""

_MAX_UNUSED_ROWS = 1024
"""The largest excess of embedding rows over tokens that counts as rounding up (phi-2: 51200 rows, 50295 tokens).

With more rows, the checkpoint has another vocabulary."""

MODEL_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The errors that models raise for inconsistent fields and for texts that they cannot compute. They have no common base
class."""


class TextShape(NamedTuple):
    """The properties of a job's texts and labels that a model must fit.

    Attributes:
        vocab_size: number of tokens of the tokenizer.
        num_labels: number of labels, or ``None`` for language models.
        end_id: the id of the token that ends a text.
        sequence_length: number of tokens of the longest row.
        is_tagger: whether each token has a label, rather than each text.
        padding_id: the id of the token that fills short rows; ``None`` means ``end_id``.
    """

    vocab_size: int
    num_labels: int | None
    end_id: int
    sequence_length: int
    is_tagger: bool = False
    padding_id: int | None = None

    @property
    def pad_id(self) -> int:
        """The id of the token that fills short rows."""
        return self.end_id if self.padding_id is None else self.padding_id

    @property
    def head(self) -> str:
        """The kind of model, as a phrase for messages."""
        return HEADS[_head_of(self)]


def build_hugging_face(architecture: str, fields: dict[str, Any], shape: TextShape, device: str) -> PreTrainedModel:
    """Build a model with new weights on ``device`` (``"cpu"`` or ``"meta"``, which allocates nothing).

    Args:
        architecture: one of `plimsoll.models.names.architectures`.
        fields: values for fields of its configuration class.
        shape: the requirements of the text. The position table grows to ``sequence_length`` unless ``fields`` set its
            length.
        device: the device of the weights.

    Raises:
        JobError: if a field is unknown, is set by the job, or has a value with which the model cannot be built or used.
    """
    with quiet():
        config = _new_config(architecture, fields, shape)
        skeleton = _skeleton(config, shape)
        _fit_length(config, set(fields), shape, skeleton)
        modules = [weakref.ref(module) for module in skeleton.modules()]
        del skeleton
        if any(module() is not None for module in modules):  # as after the first Mamba; a dry run would count them
            gc.collect()
        with torch.device(device):
            model = _built(config, shape)
    return _ready(model, shape)


def load_hugging_face(folder: Path, shape: TextShape, device: str, files: MappedPool | None = None) -> PreTrainedModel:
    """Load a checkpoint folder for training.

    On the meta device and in a dry run, tensors get shapes but no weights are read. A classifier gets a new head if the
    checkpoint has no classification head.

    Args:
        folder: the checkpoint.
        shape: the requirements of the text.
        device: the device of the weights.
        files: the pool of mapped files for the weights; ``None`` means memory.

    Raises:
        JobError: if the folder cannot be read, lacks weights, or has another vocabulary, length or number of labels.
    """
    with quiet():
        config = _checkpoint_config(folder, shape)
        skeleton = _skeleton(config, shape)
        _fit_length(config, set(_LENGTH_FIELDS), shape, skeleton)
        if device == "meta":
            return _ready(skeleton, shape)
        if isinstance(torch.empty(0), FakeTensor):  # a dry run needs the shapes only
            with torch.device(device):
                return _ready(_built(config, shape), shape)
        try:
            loaded = load_model(
                folder,
                head=_head_of(shape),
                config=config,
                dtype=torch.float32,
                device=device,
                pool=files,
                allow_missing=shape.num_labels is None,  # reported below
            )
        except WeightsError as error:
            raise JobError(
                f"model: the weights in {folder} cannot be read ({error}): save or download it again"
            ) from None
    if shape.num_labels is None and loaded.missing:
        missing = ", ".join(loaded.missing)
        raise JobError(f"model: {folder} lacks weights of a language model ({missing}): give a checkpoint with a head")
    return _ready(cast("PreTrainedModel", loaded.model), shape)


def is_hugging_face(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Return whether a model is a transformers model.

    Transformers takes seconds to import, so it is not imported here. If nothing else has imported it, no such model
    exists.
    """
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def save_hugging_face(model: PreTrainedModel, folder: Path) -> None:
    """Write a model folder for ``from_pretrained``. Safetensors writes the weights without copying them."""
    with quiet():
        model.save_pretrained(folder)


def longest_text(folder: Path) -> int | None:
    """Return the maximum number of tokens per text for the model in a folder, or ``None`` if there is no limit.

    Raises:
        JobError: if the configuration cannot be read.
    """
    config = read_hugging_face_config(folder).get_text_config()
    limits = [getattr(config, name, None) for name in _LENGTH_FIELDS]
    # RoBERTa and related models number positions from padding id + 1.
    num_reserved = (config.pad_token_id or 0) + 1 if config.model_type in _COUNTED_FROM_PADDING else 0
    return min((limit - num_reserved for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _new_config(architecture: str, fields: dict[str, Any], shape: TextShape) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[architecture]
    _check_fields(architecture, config_class, fields)
    given = {"vocab_size": shape.vocab_size, **fields}
    if isinstance(given["vocab_size"], int) and given["vocab_size"] < shape.vocab_size:
        raise JobError(
            f"model: vocab_size is {given['vocab_size']}, but the tokenizer has {shape.vocab_size} tokens: "
            "leave vocab_size out"
        )
    try:
        config = config_class(**given, **_fields_of_text(config_class, shape))
    except (StrictDataclassError, ValueError, TypeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise JobError(
            f"model: `{architecture}` cannot be built with {fields} ({reason}): change these fields"
        ) from None
    _check_objective(config, shape)
    return config


def _check_fields(architecture: str, config_class: type[PreTrainedConfig], fields: dict[str, Any]) -> None:
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    require_fields(architecture, fields, (_names_of(config_class) | config_class.attribute_map.keys()) - common)


def _names_of(config_class: type[PreTrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def _fields_of_text(config_class: type[PreTrainedConfig], shape: TextShape) -> dict[str, Any]:
    """Return the fields that follow from the text: the ids of special tokens, and the task of the head."""
    is_language_model = shape.num_labels is None
    pads_by_default = getattr(config_class, "pad_token_id", None) is not None
    fields: dict[str, Any] = {
        "bos_token_id": shape.end_id,
        "eos_token_id": shape.end_id,
        "pad_token_id": None if is_language_model and not pads_by_default else shape.pad_id,
    }
    if is_language_model:
        fields["is_decoder"] = True
    fields = {name: value for name, value in fields.items() if name in _names_of(config_class)}
    if is_language_model:
        return fields
    problem = {} if shape.is_tagger else {"problem_type": _ONE_LABEL}
    return fields | {"num_labels": shape.num_labels, **problem}


def _checkpoint_config(folder: Path, shape: TextShape) -> PreTrainedConfig:
    """Read the configuration of a checkpoint, check that it fits the text, and set the fields for training."""
    config = read_hugging_face_config(folder)
    _check_checkpoint(config, folder, shape)
    if shape.num_labels is None:
        config.is_decoder = True
        return config
    if config.num_labels != shape.num_labels:
        config.num_labels = shape.num_labels
    config.problem_type = None if shape.is_tagger else _ONE_LABEL
    if config.pad_token_id is None:
        config.pad_token_id = shape.pad_id
    return config


def read_hugging_face_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration of a checkpoint folder.

    Raises:
        JobError: if it cannot be read.
    """
    try:
        return config_of(folder)
    except WeightsError as error:
        raise JobError(f"model: {error}") from None


def _check_checkpoint(config: PreTrainedConfig, folder: Path, shape: TextShape) -> None:
    said = getattr(config, "quantization_config", None)
    if said is not None:
        method = said.get("quant_method") if isinstance(said, dict) else said.quant_method
        raise JobError(
            f"model: {folder} is quantized already (quantization_config of {method} in its config.json), and integer "
            "weights cannot be trained: train the original model, for example with `quantization_aware: int8`, and "
            "quantize the result"
        )
    if config.model_type not in architectures(_head_of(shape)):
        raise JobError(
            f"model: {folder} has architecture `{config.model_type}`, for which transformers has no {shape.head}: give "
            "another checkpoint"
        )
    _check_objective(config, shape)
    num_rows = getattr(config, "vocab_size", 0)
    if not shape.vocab_size <= num_rows < shape.vocab_size + _MAX_UNUSED_ROWS:
        raise JobError(
            f"model: {folder} has {num_rows} token embeddings, but the tokenizer has {shape.vocab_size} tokens: "
            f"set `tokenizer: {folder}`, or the folder of the tokenizer it was trained with"
        )
    ending = "ForTokenClassification" if shape.is_tagger else "ForSequenceClassification"
    is_classifier = any(name.endswith(ending) for name in config.architectures or ())
    if shape.num_labels and is_classifier and config.num_labels != shape.num_labels:
        raise JobError(
            f"model: {folder} has {config.num_labels} labels, but the data have {shape.num_labels}: "
            "give a checkpoint without a classification head"
        )


def _check_objective(config: PreTrainedConfig, shape: TextShape) -> None:
    if config.is_encoder_decoder:
        raise JobError(
            f"model: `{config.model_type}` is an encoder-decoder, which cannot be a {shape.head}: use for example gpt2"
        )
    if shape.num_labels is None and config.model_type in OTHER_LOSS:
        raise JobError(
            f"model: `{config.model_type}` {OTHER_LOSS[config.model_type]}, so its loss is not a "
            "language model's: use for example gpt2"
        )


def _skeleton(config: PreTrainedConfig, shape: TextShape) -> PreTrainedModel:
    """Build the model on the meta device, so that any error is about the configuration and not about memory."""
    try:
        with torch.device("meta"):
            return _built(config, shape)
    except MODEL_FAULTS as error:
        raise JobError(f"model: `{config.model_type}` cannot be built with these fields: {error}") from None


def _built(config: PreTrainedConfig, shape: TextShape) -> PreTrainedModel:
    """Build a model with new weights. If the configuration describes a compressed model, build its structure."""
    auto: Any = _auto_class(shape)
    if not getattr(config, FIELD, None):
        return cast("PreTrainedModel", auto.from_config(config, dtype=torch.float32))
    found = auto._model_mapping[type(config)]
    model_class: Any = class_for(found[0] if isinstance(found, tuple) else found, config)
    return cast("PreTrainedModel", model_class._from_config(config, dtype=torch.float32))


def _fit_length(config: PreTrainedConfig, given: set[str], shape: TextShape, skeleton: PreTrainedModel) -> None:
    """Lengthen a position table that is shorter than the sequence.

    If the user or a checkpoint set its length, raise an error instead.
    """
    needed = shape.sequence_length + _num_reserved_positions(skeleton)
    for name in _LENGTH_FIELDS:
        longest = getattr(config, name, None)
        if longest is None or longest >= needed:
            continue
        own_name = config.attribute_map.get(name, name)
        if given & {name, own_name}:
            raise JobError(
                f"model: `{config.model_type}` with {own_name} {longest} cannot hold sequence_length "
                f"{shape.sequence_length}, which takes {needed}: "
                f"set sequence_length to {shape.sequence_length + longest - needed} or less"
            )
        setattr(config, name, needed)


def _num_reserved_positions(model: PreTrainedModel) -> int:
    """Return the number of positions that no token can have. RoBERTa, for example, counts from padding id + 1."""
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    return max(
        (
            table.padding_idx + 1
            for table in tables
            if isinstance(table, nn.Embedding) and table.padding_idx is not None
        ),
        default=0,
    )


def _auto_class(shape: TextShape) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    if shape.num_labels is None:
        return AutoModelForCausalLM
    return AutoModelForTokenClassification if shape.is_tagger else AutoModelForSequenceClassification


def _head_of(shape: TextShape) -> Task:
    if shape.num_labels is None:
        return "language-modeling"
    return "token-classification" if shape.is_tagger else "classification"


def _ready(model: PreTrainedModel, shape: TextShape) -> PreTrainedModel:
    """Set attributes for training that a configuration file does not contain."""
    model.config.use_cache = False
    if shape.num_labels is None:
        # Transformers uses this as a fallback for classes not named ...ForCausalLM; setting it here avoids a warning.
        model.loss_type = "ForCausalLM"
        # Packed text has no padding. The end token is a real token, so its embedding must be trained.
        cast(nn.Embedding, model.get_input_embeddings()).padding_idx = None
    model.train()
    return model
