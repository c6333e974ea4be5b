"""Recurrent language models and classifiers: LSTM, GRU and plain (tanh) RNN on ``torch.nn``.

Called as the Hugging Face models are: ``model(input_ids=..., attention_mask=..., labels=...)`` returns ``.loss`` and
``.logits``. Saved as ``model.safetensors`` and ``config.json``. Dropout is where Zaremba et al. 2014 (arXiv:1409.2329)
have it: on the embeddings, between the layers and on the output, not on the recurrent state.

It does NOT cover a state carried from one batch to the next (every sequence starts from zeros) and padding on the left.

Shapes: B samples, T tokens, E embedding size, H hidden size, V vocabulary, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from plimsoll.errors import JobError
from plimsoll.records.base import Frozen
from plimsoll.records.job import near
from plimsoll.workload import IGNORED_LABEL

_LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}

RECURRENT = tuple(_LAYERS)


class RecurrentConfig(Frozen):
    """The shape of a recurrent model; ``num_labels`` makes it a classifier, of tokens if ``is_tagger``.

    ``label_names`` are kept with the weights.
    """

    architecture: Literal["lstm", "gru", "rnn"]
    vocab_size: int = Field(ge=1)
    num_labels: int | None = Field(None, ge=2)
    embedding_size: int = Field(256, ge=1)
    hidden_size: int = Field(256, ge=1)
    num_layers: int = Field(1, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    tie_weights: bool = False
    bidirectional: bool = False
    is_tagger: bool = False
    label_names: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.num_labels is None and self.is_tagger:
            raise ValueError("is_tagger True needs num_labels: give how many labels a token may have")
        if self.num_labels is None and self.bidirectional:
            raise ValueError(
                "a bidirectional language model would read the token it is to predict: leave bidirectional out"
            )
        if self.num_labels is not None and self.tie_weights:
            raise ValueError("a classifier has no output over the vocabulary to tie: leave tie_weights out")
        if self.tie_weights and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"tie_weights needs embedding_size {self.embedding_size} equal to hidden_size {self.hidden_size}"
            )
        return self


class RecurrentOutput(NamedTuple):
    """What a recurrent model returns. ``loss`` is ``None`` where no labels were given."""

    loss: Tensor | None
    logits: Tensor


class RecurrentModel(nn.Module):
    """What a language model, a classifier and a tagger (`plimsoll.models.recurrent_tagger`) have in common."""

    config: RecurrentConfig


class RecurrentLanguageModel(RecurrentModel):
    """Predicts each token from those before it; its loss is the mean over the labels that are predicted."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = recurrent_layers(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tie_weights:
            self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the logits (B, T, V) and the mean loss of predicting ``labels[:, 1:]``.

        ``attention_mask`` changes nothing: no token sees the padding on its right, and padding has the label -100.
        """
        hidden_BTH, _ = self.recurrent(self.dropout(self.embedding(input_ids)))
        logits_BTV = self.head(self.dropout(hidden_BTH))
        return RecurrentOutput(None if labels is None else _next_token_loss(logits_BTV, labels), logits_BTV)


class RecurrentClassifier(RecurrentModel):
    """Gives a whole sequence one of L labels, from the state after its last token (both ends if bidirectional)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.num_labels is not None
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = recurrent_layers(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size * (1 + config.bidirectional), config.num_labels)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the logits (B, L) and the mean loss over the samples.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: (B, T), 1 for a token and 0 for padding, which then changes nothing; without it all are
                tokens. A sequence without tokens is read as one token of padding.
            labels: (B,), from 0 to L - 1.
        """
        embedded = self.dropout(self.embedding(input_ids))
        if attention_mask is not None:
            num_tokens = attention_mask.sum(dim=1).clamp(min=1).cpu()
            embedded = pack_padded_sequence(embedded, num_tokens, batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(embedded)
        last_NBH = state[0] if isinstance(state, tuple) else state
        directions = last_NBH[-2:] if self.config.bidirectional else last_NBH[-1:]
        logits_BL = self.head(self.dropout(directions.transpose(0, 1).flatten(1)))
        return RecurrentOutput(None if labels is None else functional.cross_entropy(logits_BL, labels), logits_BL)


def build_recurrent(fields: dict[str, Any]) -> RecurrentModel:
    """Build a model with new weights from the fields of a `RecurrentConfig`; taggers are built by `build_tagger`.

    Raises:
        JobError: if a field is unknown or has a wrong value.
    """
    config = recurrent_config(fields)
    if config.is_tagger:
        raise JobError(
            f"model: is_tagger {config.is_tagger} makes a classifier of tokens, not of texts: use "
            "plimsoll.models.recurrent_tagger.build_tagger"
        )
    return RecurrentLanguageModel(config) if config.num_labels is None else RecurrentClassifier(config)


def recurrent_config(fields: dict[str, Any]) -> RecurrentConfig:
    """Check the fields of a recurrent model.

    Raises:
        JobError: if a field is unknown or has a wrong value.
    """
    try:
        return RecurrentConfig.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(_fault(fault) for fault in error.errors())
        raise JobError(f"model: `{fields.get('architecture')}` cannot be built: {faults}") from None


def save_recurrent(model: RecurrentModel, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json`` into an existing folder. No copy of the weights is made."""
    save_model(model, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(
        model.config.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8"
    )


def load_recurrent(folder: Path, build: Callable[[dict[str, Any]], RecurrentModel] = build_recurrent) -> RecurrentModel:
    """Load a model that `save_recurrent` wrote, bitwise as it was; ``build`` is `build_tagger` for a tagger.

    Raises:
        JobError: if a file is missing or damaged.
    """
    try:
        model = build(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        load_model(model, folder / "model.safetensors")
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise JobError(f"model: {folder} cannot be loaded as a recurrent model ({error}): save it again") from None
    return model


def recurrent_layers(config: RecurrentConfig) -> nn.Module:
    """Make the layers of a model; called with a batch, or a packed one, they return the outputs and the last state."""
    return _LAYERS[config.architecture](
        input_size=config.embedding_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        batch_first=True,
        # torch warns of dropout between layers where there is one layer only.
        dropout=config.dropout if config.num_layers > 1 else 0.0,
        bidirectional=config.bidirectional,
    )


def _next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean cross entropy of ``labels[:, 1:]``. The labels are shifted, not the logits: that would copy them."""
    targets_BT = functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED_LABEL)
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED_LABEL)


def _fault(fault: Any) -> str:
    """One fault of a configuration, as pydantic reports it; an unknown field is shown with the nearest known one."""
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"there is no field `{name}`; {near(name, RecurrentConfig.model_fields)}"
    return f"{name} {fault['msg']}".strip().removeprefix("Value error, ")
