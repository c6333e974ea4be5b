"""Recurrent language models and classifiers: LSTM, GRU and plain (tanh) RNN on ``torch.nn``.

Called as the Hugging Face models are: ``model(input_ids=..., attention_mask=..., labels=...)`` returns ``.loss`` and
``.logits``. Saved as ``model.safetensors`` and ``config.json``. Dropout is where Zaremba et al. 2014 (arXiv:1409.2329)
have it: on the embeddings, between the layers and on the output, not on the recurrent state.

Every sequence starts from zeros, but for the windows of a stream, of a language model that was told to carry its state
(`RecurrentLanguageModel.carry`). It does NOT cover padding on the left.

Shapes: B samples, T tokens, E embedding size, H hidden size, V vocabulary, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from plimsoll.errors import InputError, JobError
from plimsoll.models.carried import CarriedState, run_with_resets
from plimsoll.records.base import Frozen
from plimsoll.records.job import near
from plimsoll.workload import IGNORED_LABEL

_LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}

RECURRENT = tuple(_LAYERS)


class RecurrentConfig(Frozen):
    """The shape of a recurrent model; ``num_labels`` makes it a classifier."""

    architecture: Literal["lstm", "gru", "rnn"]
    vocab_size: int = Field(ge=1)
    num_labels: int | None = Field(None, ge=2)
    embedding_size: int = Field(256, ge=1)
    hidden_size: int = Field(256, ge=1)
    num_layers: int = Field(1, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    tie_weights: bool = False
    bidirectional: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
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


class RecurrentLanguageModel(nn.Module):
    """Predicts each token from those before it; its loss is the mean over the labels that are predicted."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = _recurrent_layers(config)
        self.carried: CarriedState | None = None
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tie_weights:
            self.head.weight = self.embedding.weight

    def carry(self, num_lanes: int) -> None:
        """Keep the state of so many lanes from one window of a stream to the next; before the model is moved."""
        self.carried = CarriedState(self.recurrent, num_lanes)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        lanes: Tensor | None = None,
        windows: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> RecurrentOutput:
        """Compute the logits (B, T, V) and the mean loss of predicting ``labels[:, 1:]``.

        ``attention_mask`` changes nothing: no token sees the padding on its right, and padding has the label -100.

        With ``lanes`` and ``windows`` (B,) these are windows of a stream (`plimsoll.data.streams`): the state goes on
        from the window before, and begins anew before the tokens of ``resets`` (B, T). The last token is then not read,
        for the next window begins with it, and has no logits: they are (B, T - 1, V).
        """
        if lanes is None or windows is None:
            hidden_BTH, _ = self.recurrent(self.dropout(self.embedding(input_ids)))
        else:
            embedded_BTE = self.dropout(self.embedding(input_ids[:, :-1]))
            hidden_BTH = self._carried_on(embedded_BTE, lanes, windows, resets)
        logits_BTV = self.head(self.dropout(hidden_BTH))
        return RecurrentOutput(None if labels is None else _next_token_loss(logits_BTV, labels), logits_BTV)

    def _carried_on(self, embedded_BTE: Tensor, lanes: Tensor, windows: Tensor, resets: Tensor | None) -> Tensor:
        if self.carried is None:
            raise InputError(
                f"a batch has windows of {len(lanes)} lanes, but the model keeps no state between two: call "
                "model.carry(num_lanes) first"
            )
        hidden_BTH, state = run_with_resets(
            self.recurrent, embedded_BTE, self.carried.state(lanes, windows), None if resets is None else resets[:, :-1]
        )
        self.carried.put(lanes, windows, state)
        return hidden_BTH


class RecurrentClassifier(nn.Module):
    """Gives a whole sequence one of L labels, from the state after its last token (both ends if bidirectional)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.num_labels is not None
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = _recurrent_layers(config)
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


RecurrentModel = RecurrentLanguageModel | RecurrentClassifier


def build_recurrent(fields: dict[str, Any]) -> RecurrentModel:
    """Build a model with new weights from the fields of a `RecurrentConfig`.

    Raises:
        JobError: if a field is unknown or has a wrong value.
    """
    try:
        config = RecurrentConfig.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(_fault(fault) for fault in error.errors())
        raise JobError(f"model: `{fields.get('architecture')}` cannot be built: {faults}") from None
    return RecurrentLanguageModel(config) if config.num_labels is None else RecurrentClassifier(config)


def save_recurrent(model: RecurrentModel, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json`` into an existing folder. No copy of the weights is made.

    A state that was carried is of the training, not of the model: it is left out.
    """
    with _without_carried_state(model):
        save_model(model, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(
        model.config.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8"
    )


def load_recurrent(folder: Path) -> RecurrentModel:
    """Load a model that `save_recurrent` wrote, bitwise as it was.

    Raises:
        JobError: if a file is missing or damaged.
    """
    try:
        model = build_recurrent(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        load_model(model, folder / "model.safetensors")
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise JobError(f"model: {folder} cannot be loaded as a recurrent model ({error}): save it again") from None
    return model


@contextmanager
def _without_carried_state(model: RecurrentModel) -> Iterator[None]:
    if not isinstance(model, RecurrentLanguageModel) or model.carried is None:
        yield
        return
    carried, model.carried = model.carried, None
    try:
        yield
    finally:
        model.carried = carried


def _recurrent_layers(config: RecurrentConfig) -> nn.RNNBase:
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
    num_beyond = logits_BTV.shape[1] - (labels_BT.shape[1] - 1)  # 0 or 1 logits that predict none of the labels
    targets_BT = functional.pad(labels_BT[:, 1:], (0, num_beyond), value=IGNORED_LABEL)
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED_LABEL)


def _fault(fault: Any) -> str:
    """One fault of a configuration, as pydantic reports it; an unknown field is shown with the nearest known one."""
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"there is no field `{name}`; {near(name, RecurrentConfig.model_fields)}"
    return f"{name} {fault['msg']}".strip().removeprefix("Value error, ")
