"""Recurrent language models, classifiers and taggers: LSTM, GRU and plain (tanh) RNN on ``torch.nn``.

Called as the Hugging Face models are: ``model(input_ids=..., attention_mask=..., labels=...)`` returns ``.loss`` and
``.logits``. Dropout is where Zaremba et al. 2014 (arXiv:1409.2329) have it: on the embeddings, between the layers and
on the output, not on the recurrent state. Padding on the right changes nothing. Every sequence starts from zeros, but
for the windows of a stream (`RecurrentLanguageModel.carry`). Language models and classifiers run in segments of time as
well (`plimsoll.models.recurrent.segments`), but for a bidirectional classifier.

It does NOT cover padding on the left, and labels that depend on their neighbours (a CRF).

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
"""What the ``config.json`` of a recurrent model has for transformers, whose Auto classes show it as they refuse it."""

_NO_STATE: State = ()


class RecurrentConfig(Frozen):
    """The shape of a recurrent model; ``num_labels`` makes it a classifier, of tokens if ``is_tagger``.

    ``label_names`` are kept with the weights. ``adaptive_cutoffs`` gives a language model an adaptive softmax: see
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
            raise ValueError(
                "a bidirectional language model would read the token it is to predict: leave bidirectional out"
            )
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
                "the rare words of an adaptive softmax have fewer features than the embedding that tie_weights would "
                "have them share: leave one of adaptive_cutoffs and tie_weights out"
            )
        fault = cutoffs_fault(self.adaptive_cutoffs, self.vocab_size, self.hidden_size, self.adaptive_div_value)
        if fault is not None:
            raise ValueError(f"adaptive_cutoffs: {fault}")


class RecurrentOutput(NamedTuple):
    """What a recurrent model returns.

    ``loss`` is ``None`` where no labels were given, ``logits`` where they were not needed for it as a whole.
    """

    loss: Tensor | None
    logits: Tensor | None


class RecurrentModel(nn.Module):
    """What a language model, a classifier and a tagger have in common."""

    config: RecurrentConfig
    ignores_padding: ClassVar[bool] = True  # on the right, see `plimsoll.techniques.by_length`


class RecurrentLanguageModel(RecurrentModel):
    """Predicts each token from those before it; its loss is the mean over the labels that are predicted."""

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
        """Keep the state of so many stream slots from one window of a stream to the next; before the model is moved."""
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

        An adaptive softmax has the loss with labels, and without them log-probabilities as logits.
        ``attention_mask`` changes nothing: no token sees the padding on its right, and padding has the label -100.

        With ``slots`` and ``windows`` (B,) these are windows of a stream (`plimsoll.data.samples.streams`): the state
        goes on from the window before, and begins anew before the tokens of ``resets`` (B, T). The last token is then
        not read, for the next window begins with it, and has no logits: they are (B, T - 1, V).
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
        """Compute the loss of `forward` a stretch of time after another; see `plimsoll.models.recurrent.segments`."""
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
        """The loss of predicting the targets, and the logits if they were all made."""
        if isinstance(self.head, nn.AdaptiveLogSoftmaxWithLoss):
            return adaptive_loss(self.head, hidden_BTH, targets_BT, reduction), None
        logits_BTV = self.head(hidden_BTH)
        loss = functional.cross_entropy(
            widened(logits_BTV.flatten(0, 1)), targets_BT.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction
        )
        return loss, logits_BTV

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return what the logits are made of, (B, T, H): each sequence read from zeros."""
        hidden_BTH, _ = self.recurrent(self.dropout(self.embedding(input_ids)))
        return self.dropout(hidden_BTH)  # type: ignore[no-any-return]

    def logits_of(self, hidden_BTH: Tensor) -> Tensor:
        """Return the logits, or of an adaptive softmax the log-probabilities, (B, T, V), of some positions."""
        if isinstance(self.head, nn.AdaptiveLogSoftmaxWithLoss):
            return log_probabilities(self.head, hidden_BTH)
        logits_BTV: Tensor = self.head(hidden_BTH)
        return logits_BTV

    def _carried_by(self, slots: Tensor) -> CarriedState:
        if self.carried is None:
            raise InputError(
                f"a batch has windows of {len(slots)} stream slots, but the model keeps no state between two: call "
                "model.carry(num_slots) first"
            )
        return self.carried


class RecurrentLabeller(RecurrentModel):
    """What gives labels, to sequences or to tokens: its layers."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.num_labels is not None
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.recurrent = recurrent_layers(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size * (1 + config.bidirectional), config.num_labels)


class RecurrentClassifier(RecurrentLabeller):
    """Gives a whole sequence one of L labels, from the state after its last token (both ends if bidirectional)."""

    judges_the_end: ClassVar[bool] = True
    packs_sequences: ClassVar[bool] = True  # see `plimsoll.techniques.packed_stretches`

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        # In reverse a sequence is read from its end, which no segment but the last has.
        self.in_segments = None if config.bidirectional else self._in_segments

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
        return self._judged(as_state(state), labels)

    def _in_segments(
        self, unroll: Unroll, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute what `forward` does a stretch of time after another; see `plimsoll.models.recurrent.segments`."""
        mask_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
        mask_BT[:, 0] = 1  # see `forward` on a sequence without tokens
        order_B = mask_BT.sum(dim=1).argsort(descending=True, stable=True)  # those that go on are the first

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
        """Compute the logits of the state after the last token."""
        directions = state[0][-2:] if self.config.bidirectional else state[0][-1:]
        logits_BL = self.head(self.dropout(directions.transpose(0, 1).flatten(1)))
        loss = None if labels is None else functional.cross_entropy(widened(logits_BL), labels)
        return RecurrentOutput(loss, logits_BL)


class RecurrentTagger(RecurrentLabeller):
    """Gives each token one of L labels; its loss is the mean over the tokens that have a label."""

    @property
    def packs_sequences(self) -> bool:
        """Whether sequences are packed, so that the one from right to left begins at the last token.

        On the CPU the time for a packed sequence grows with the square of its length, but with
        `plimsoll.techniques.packed_stretches`.
        """
        return self.config.bidirectional

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the logits (B, T, L) and the mean loss over the labels that are not -100.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: (B, T), 1 for a token and 0 for padding, which then changes nothing; without it all are
                tokens. A sequence without tokens is read as one token of padding.
            labels: (B, T), from 0 to L - 1, or -100.
        """
        embedded = self.dropout(self.embedding(input_ids))
        if attention_mask is None or not self.config.bidirectional:  # from left to right no token sees the padding
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
    """Write ``model.safetensors`` and ``config.json`` into an existing folder; for copies see `save_weights`.

    A state that was carried is of the training, not of the model: it is left out.
    """
    with _without_carried_state(model):
        save_weights(model, folder / "model.safetensors")
    fields = {"model_type": MODEL_TYPE, **model.config.model_dump(mode="json", exclude_none=True)}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def load_recurrent(folder: Path, dtype: torch.dtype = torch.float32) -> RecurrentModel:
    """Load a model that `save_recurrent` wrote, bitwise where it was of that type.

    Args:
        folder: of the model.
        dtype: of the weights, whatever they have in the file.

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


def _output_layer(config: RecurrentConfig) -> nn.Module:
    if config.adaptive_cutoffs is None:
        return nn.Linear(config.hidden_size, config.vocab_size)
    sizes = config.hidden_size, config.vocab_size
    return adaptive_head(*sizes, config.adaptive_cutoffs, config.adaptive_div_value)


def _next_tokens(labels_BT: Tensor, num_read: int) -> Tensor:
    """What each token that is read predicts. The labels are shifted, not the logits: that would copy them.

    Written into new memory, so that a dry run does not know it: it must not take its own labels for those of a text.
    """
    targets_BT = torch.empty((len(labels_BT), num_read), dtype=labels_BT.dtype, device=labels_BT.device)
    targets_BT[:, : labels_BT.shape[1] - 1].copy_(labels_BT[:, 1:])
    targets_BT[:, labels_BT.shape[1] - 1 :].fill_(IGNORED_LABEL)
    return targets_BT


def _rows(embedding: nn.Embedding, ids_BS: Tensor, ids_BT: Tensor) -> Tensor:
    """The vectors of a stretch of the tokens; each stretch gives a gradient of its own rows, not of all there are."""
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
    """One fault of a configuration, as pydantic reports it; an unknown field is shown with the nearest known one."""
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"there is no field `{name}`; {near(name, RecurrentConfig.model_fields)}"
    return f"{name} {fault['msg']}".strip().removeprefix("Value error, ")
