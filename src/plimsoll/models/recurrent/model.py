"""Recurrent language models, classifiers and taggers: LSTM, GRU and plain (tanh) RNN on ``torch.nn``.

They are called like Hugging Face models: ``model(input_ids=..., attention_mask=..., labels=...)`` returns ``.loss`` and
``.logits``. Dropout is applied to the embeddings, between the layers and to the output, but not to the recurrent state
(Zaremba et al. 2014, arXiv:1409.2329). Padding on the right has no effect. Every sequence starts from a zero state,
except windows of a stream (`RecurrentLanguageModel.carry`). Language models and unidirectional classifiers also run in
time segments (`plimsoll.models.recurrent.segments`).

Not handled: padding on the left, and labels that depend on their neighbours (a CRF).

Shapes: B samples, T tokens, E embedding size, H hidden size, V vocabulary, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from plimsoll.data.batch import IGNORED_LABEL
from plimsoll.errors import InputError, JobError
from plimsoll.models.adaptive import DIV_VALUE, adaptive_head, adaptive_loss, cutoffs_fault, log_probabilities, widened
from plimsoll.models.names import RECURRENT
from plimsoll.models.recurrent.carried_state import CarriedState, run_with_resets
from plimsoll.models.recurrent.segments import Passed, State, Unroll, as_hidden, as_state
from plimsoll.records.base import Frozen
from plimsoll.records.job_yaml import near
from plimsoll.weights.saving import save_weights

_LAYERS: dict[str, Callable[..., nn.RNNBase]] = {name: getattr(nn, name.upper()) for name in RECURRENT}

MODEL_TYPE = "recurrent of Plimsoll: load it with plimsoll.load_model(folder)"
"""The ``model_type`` in the ``config.json`` of a recurrent model. The Auto classes of transformers show it in their
error."""

_NO_STATE: State = ()


class RecurrentConfig(Frozen):
    """The configuration of a recurrent language model or, with ``num_labels``, of a classifier.

    The classifier labels texts or, if ``is_tagger``, tokens.

    ``label_names`` are saved with the model. ``adaptive_cutoffs`` gives a language model an adaptive softmax: see
    `plimsoll.models.adaptive`.
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
    adaptive_cutoffs: tuple[int, ...] | None = None
    adaptive_div_value: float = Field(DIV_VALUE, ge=1)
    is_tagger: bool = False
    label_names: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.num_labels is None and self.is_tagger:
            raise ValueError("is_tagger True needs num_labels: give how many labels a token may have")
        if self.num_labels is None and self.bidirectional:
            raise ValueError("a bidirectional language model would see the token it predicts: leave bidirectional out")
        if self.num_labels is not None and self.tie_weights:
            raise ValueError("a classifier has no output over the vocabulary to tie: leave tie_weights out")
        if self.tie_weights and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"tie_weights needs embedding_size {self.embedding_size} equal to hidden_size {self.hidden_size}"
            )
        self._check_clusters()
        return self

    def _check_clusters(self) -> None:
        if self.adaptive_cutoffs is None:
            return
        if self.num_labels is not None:
            raise ValueError("a classifier has no output over the vocabulary: leave adaptive_cutoffs out")
        if self.tie_weights:
            raise ValueError(
                "the rare words of an adaptive softmax have fewer features than the embedding, so tie_weights cannot "
                "be used: leave adaptive_cutoffs or tie_weights out"
            )
        fault = cutoffs_fault(self.adaptive_cutoffs, self.vocab_size, self.hidden_size, self.adaptive_div_value)
        if fault is not None:
            raise ValueError(f"adaptive_cutoffs: {fault}")


class RecurrentOutput(NamedTuple):
    """The loss and the logits of a recurrent model.

    ``loss`` is ``None`` without labels. ``logits`` is ``None`` if the loss was computed without all logits at once.
    """

    loss: Tensor | None
    logits: Tensor | None


class RecurrentModel(nn.Module):
    """The base class of language models, classifiers and taggers."""

    config: RecurrentConfig
    ignores_padding: ClassVar[bool] = True  # padding on the right, see `plimsoll.techniques.by_length`


class RecurrentLanguageModel(RecurrentModel):
    """Predicts each token from the tokens before it. The loss is the mean over the predicted labels."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = recurrent_layers(config)
        self.carried: CarriedState | None = None
        self.dropout = nn.Dropout(config.dropout)
        self.head = _output_layer(config)
        if config.tie_weights:
            self.head.weight = self.embedding.weight

    def carry(self, num_slots: int) -> None:
        """Make the model carry the state of ``num_slots`` stream slots from each window of a stream to the next.

        Call it before you move the model to a device.
        """
        self.carried = CarriedState(self.recurrent, num_slots)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        windows: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> RecurrentOutput:
        """Compute the logits (B, T, V) and the mean loss of predicting ``labels[:, 1:]``.

        With an adaptive softmax the output is the loss only, or log-probabilities in place of logits if there are no
        labels.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: ignored, because no token sees the padding on its right, and padding has the label -100.
            labels: (B, T), the token ids or -100; ``None``: compute no loss.
            slots: (B,), the stream slot of each sample, if the samples are windows of a stream
                (`plimsoll.data.samples.streams`). The state then continues from the previous window. The last token is
                not read, because the next window begins with it, so logits are (B, T - 1, V).
            windows: (B,), the number of each window in its stream.
            resets: (B, T), true for a token before which the state is set to zeros.
        """
        if slots is None or windows is None:
            hidden_BTH, _ = self.recurrent(self.dropout(self.embedding(input_ids)))
        else:
            embedded_BTE = self.dropout(self.embedding(input_ids[:, :-1]))
            carried, cuts_BT = self._carried_by(slots), None if resets is None else resets[:, :-1]
            state = carried.state(slots, windows)
            hidden_BTH, state = run_with_resets(self.recurrent, embedded_BTE, state, cuts_BT)
            carried.put(slots, windows, state)
        hidden_BTH = self.dropout(hidden_BTH)
        if labels is None:
            return RecurrentOutput(None, self.logits_of(hidden_BTH))
        return RecurrentOutput(*self._loss(hidden_BTH, _next_tokens(labels, hidden_BTH.shape[1]), "mean"))

    def in_segments(
        self,
        unroll: Unroll,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        windows: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> RecurrentOutput:
        """Compute the loss of `forward` in time segments; see `plimsoll.models.recurrent.segments`."""
        if labels is None:
            return type(self).forward(self, input_ids, attention_mask, slots=slots, windows=windows, resets=resets)
        read_BT, begin = input_ids, _NO_STATE
        if slots is not None and windows is not None:
            read_BT = input_ids[:, :-1]
            begin = as_state(self._carried_by(slots).state(slots, windows))
        targets_BT = _next_tokens(labels, read_BT.shape[1])

        def run(state: State, ids_BS: Tensor, targets_BS: Tensor, resets_BS: Tensor | None = None) -> Passed:
            embedded_BSE = self.dropout(_rows(self.embedding, ids_BS, read_BT))
            hidden_BSH, last = run_with_resets(self.recurrent, embedded_BSE, as_hidden(state), resets_BS)
            loss, _ = self._loss(self.dropout(hidden_BSH), targets_BS, "sum")
            return Passed(sums=(loss,), state=as_state(last))

        sequences = (read_BT, targets_BT) if resets is None else (read_BT, targets_BT, resets[:, :-1])
        passed = unroll(run, sequences, begin)
        if slots is not None and windows is not None:
            self._carried_by(slots).put(slots, windows, as_hidden(passed.state))
        return RecurrentOutput(passed.sums[0] / (targets_BT != IGNORED_LABEL).sum(), None)

    def _loss(
        self, hidden_BTH: Tensor, targets_BT: Tensor, reduction: Literal["mean", "sum"]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss for the targets, and the logits. ``None``: the logits never existed all at once."""
        if isinstance(self.head, nn.AdaptiveLogSoftmaxWithLoss):
            return adaptive_loss(self.head, hidden_BTH, targets_BT, reduction), None
        logits_BTV = self.head(hidden_BTH)
        loss = functional.cross_entropy(
            widened(logits_BTV.flatten(0, 1)), targets_BT.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction
        )
        return loss, logits_BTV

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, H) that the head reads. Each sequence starts from a zero state."""
        hidden_BTH, _ = self.recurrent(self.dropout(self.embedding(input_ids)))
        return self.dropout(hidden_BTH)  # type: ignore[no-any-return]

    def logits_of(self, hidden_BTH: Tensor) -> Tensor:
        """Return the logits (B, T, V) for hidden states, or log-probabilities with an adaptive softmax."""
        if isinstance(self.head, nn.AdaptiveLogSoftmaxWithLoss):
            return log_probabilities(self.head, hidden_BTH)
        logits_BTV: Tensor = self.head(hidden_BTH)
        return logits_BTV

    def _carried_by(self, slots: Tensor) -> CarriedState:
        if self.carried is None:
            raise InputError(
                f"the batch continues {len(slots)} streams of text, but the model keeps no state between batches: "
                "call model.carry(num_slots) first"
            )
        return self.carried


class RecurrentLabeller(RecurrentModel):
    """The base class of classifiers and taggers, which have the same layers."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.num_labels is not None
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = recurrent_layers(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size * (1 + config.bidirectional), config.num_labels)


class RecurrentClassifier(RecurrentLabeller):
    """Predicts one of L labels for a sequence from the last state, or the last states of both directions."""

    judges_the_end: ClassVar[bool] = True
    packs_sequences: ClassVar[bool] = True  # see `plimsoll.techniques.packed_stretches`

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        # The reverse direction starts at the end of the sequence, which only the last segment contains.
        self.in_segments = None if config.bidirectional else self._in_segments

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the logits (B, L) and the mean loss over the samples.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: (B, T), 1 for a token and 0 for padding, which has no effect on the result; ``None``: no
                padding. A sequence without tokens is read as one token of padding.
            labels: (B,), from 0 to L - 1; ``None``: compute no loss.
        """
        embedded = self.dropout(self.embedding(input_ids))
        if attention_mask is not None:
            num_tokens = attention_mask.sum(dim=1).clamp(min=1).cpu()
            embedded = pack_padded_sequence(embedded, num_tokens, batch_first=True, enforce_sorted=False)
        _, state = self.recurrent(embedded)
        return self._judged(as_state(state), labels)

    def _in_segments(
        self, unroll: Unroll, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the result of `forward` in time segments; see `plimsoll.models.recurrent.segments`."""
        mask_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
        mask_BT[:, 0] = 1  # a sequence without tokens, see `forward`
        order_B = mask_BT.sum(dim=1).argsort(descending=True, stable=True)  # unfinished sequences come first

        def run(state: State, ids_BS: Tensor, mask_BS: Tensor) -> Passed:
            num_tokens = mask_BS.sum(dim=1).cpu()
            num_active = int((num_tokens > 0).sum())
            if num_active == 0:
                return Passed(state=state)
            embedded = self.dropout(_rows(self.embedding, ids_BS[:num_active], input_ids))
            packed = pack_padded_sequence(embedded, num_tokens[:num_active], batch_first=True)
            _, last = self.recurrent(packed, as_hidden(tuple(part[:, :num_active] for part in state)))
            pairs = zip(as_state(last), state, strict=True) if state else ((part, part) for part in as_state(last))
            return Passed(state=tuple(torch.cat((new, old[:, num_active:]), 1) for new, old in pairs))

        state = unroll(run, (input_ids.index_select(0, order_B), mask_BT.index_select(0, order_B))).state
        return self._judged(tuple(part.index_select(1, order_B.argsort()) for part in state), labels)

    def _judged(self, state: State, labels: Tensor | None) -> RecurrentOutput:
        """Compute the logits and the loss from the state after the last token."""
        directions = state[0][-2:] if self.config.bidirectional else state[0][-1:]
        logits_BL = self.head(self.dropout(directions.transpose(0, 1).flatten(1)))
        loss = None if labels is None else functional.cross_entropy(widened(logits_BL), labels)
        return RecurrentOutput(loss, logits_BL)


class RecurrentTagger(RecurrentLabeller):
    """Predicts one of L labels for each token. The loss is the mean over the tokens with a label."""

    @property
    def packs_sequences(self) -> bool:
        """True if sequences are packed, so that the reverse direction starts at the last token and not in the padding.

        On the CPU, the time for a packed sequence grows with the square of its length unless
        `plimsoll.techniques.packed_stretches` is used.
        """
        return self.config.bidirectional

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the logits (B, T, L) and the mean loss over the labels that are not -100.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: (B, T), 1 for a token and 0 for padding, which has no effect on the result; ``None``: no
                padding. A sequence without tokens is read as one token of padding.
            labels: (B, T), from 0 to L - 1, or -100 for tokens that do not count; ``None``: compute no loss.
        """
        embedded = self.dropout(self.embedding(input_ids))
        if attention_mask is None or not self.config.bidirectional:  # the forward direction never sees the padding
            hidden_BTH, _ = self.recurrent(embedded)
        else:
            num_tokens = attention_mask.sum(dim=1).clamp(min=1).cpu()
            packed = pack_padded_sequence(embedded, num_tokens, batch_first=True, enforce_sorted=False)
            hidden, _ = self.recurrent(packed)
            hidden_BTH, _ = pad_packed_sequence(hidden, batch_first=True, total_length=input_ids.shape[1])
        logits_BTL = self.head(self.dropout(hidden_BTH))
        if labels is None:
            return RecurrentOutput(None, logits_BTL)
        logits = widened(logits_BTL.flatten(0, 1))
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL)
        return RecurrentOutput(loss, logits_BTL)


def build_recurrent(fields: dict[str, Any]) -> RecurrentModel:
    """Build a model with new weights from the fields of a `RecurrentConfig`.

    Raises:
        JobError: if a field is unknown or has a wrong value.
    """
    config = recurrent_config(fields)
    if config.num_labels is None:
        return RecurrentLanguageModel(config)
    return RecurrentTagger(config) if config.is_tagger else RecurrentClassifier(config)


def recurrent_config(fields: dict[str, Any]) -> RecurrentConfig:
    """Check the fields of a recurrent model.

    Raises:
        JobError: if a field is unknown or has a wrong value.
    """
    own = {name: value for name, value in fields.items() if (name, value) != ("model_type", MODEL_TYPE)}
    try:
        return RecurrentConfig.model_validate(own)
    except ValidationError as error:
        faults = "; ".join(_fault(fault) for fault in error.errors())
        raise JobError(f"model: `{fields.get('architecture')}` cannot be built: {faults}") from None


def save_recurrent(model: RecurrentModel, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json`` into an existing folder, in little memory (`save_weights`).

    The carried state is left out, because it belongs to the training and not to the model.
    """
    with _without_carried_state(model):
        save_weights(model, folder / "model.safetensors")
    fields = {"model_type": MODEL_TYPE, **model.config.model_dump(mode="json", exclude_none=True)}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def load_recurrent(folder: Path, dtype: torch.dtype = torch.float32) -> RecurrentModel:
    """Load a model that `save_recurrent` wrote. The weights are bitwise equal if the dtype is unchanged.

    Args:
        folder: the folder of the model.
        dtype: the dtype to which the weights are converted.

    Raises:
        JobError: if a file is missing or damaged.
    """
    try:
        model = build_recurrent(json.loads((folder / "config.json").read_text(encoding="utf-8"))).to(dtype)
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


def recurrent_layers(config: RecurrentConfig) -> nn.RNNBase:
    """Return new recurrent layers, which map a padded or packed batch to their outputs and last state."""
    return _LAYERS[config.architecture](
        input_size=config.embedding_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        batch_first=True,
        # Without this case, torch would warn that dropout between layers has no effect in one layer.
        dropout=config.dropout if config.num_layers > 1 else 0.0,
        bidirectional=config.bidirectional,
    )


def _output_layer(config: RecurrentConfig) -> nn.Module:
    if config.adaptive_cutoffs is None:
        return nn.Linear(config.hidden_size, config.vocab_size)
    sizes = config.hidden_size, config.vocab_size
    return adaptive_head(*sizes, config.adaptive_cutoffs, config.adaptive_div_value)


def _next_tokens(labels_BT: Tensor, num_read: int) -> Tensor:
    """Return the target (B, T) of each token that is read, which is the label of the next token.

    The labels are shifted rather than the logits, because shifted logits would be a copy.

    The targets are new memory, so that a dry run does not know their values and cannot mistake placeholder labels for
    real labels.
    """
    targets_BT = torch.empty((len(labels_BT), num_read), dtype=labels_BT.dtype, device=labels_BT.device)
    targets_BT[:, : labels_BT.shape[1] - 1].copy_(labels_BT[:, 1:])
    targets_BT[:, labels_BT.shape[1] - 1 :].fill_(IGNORED_LABEL)
    return targets_BT


def _rows(embedding: nn.Embedding, ids_BS: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the embeddings of a segment. The table's gradient has only the rows of the tokens in the segment."""
    is_part, hooks = ids_BS.shape[1] < ids_BT.shape[1], (embedding._forward_hooks, embedding._forward_pre_hooks)
    is_plain = type(embedding) is nn.Embedding and "forward" not in vars(embedding) and not any(hooks)
    if (
        not (is_part and is_plain)
        or embedding.max_norm
        or embedding.scale_grad_by_freq
        or embedding.padding_idx is not None
    ):
        vectors: Tensor = embedding(ids_BS)
        return vectors
    return functional.embedding(ids_BS, embedding.weight, sparse=True)


def _fault(fault: Any) -> str:
    """Return the message for one fault that pydantic reports. For an unknown field, suggest the nearest known field."""
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"there is no field `{name}`; {near(name, RecurrentConfig.model_fields)}"
    return f"{name} {fault['msg']}".strip().removeprefix("Value error, ")
