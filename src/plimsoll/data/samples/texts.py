"""Samples that are texts, or windows of texts: with a class, with tags, or for language modelling.

Each batch is padded to its longest sample, rounded up to a small multiple. A window of a classified text has the class
of its text. `Spans.parents` returns the text of each window, and `plimsoll.data.samples.pooling` combines predictions
for windows into one per text. Token augmentation is applied when samples are read. Not handled: several classes per
text.

Shapes: B samples of the batch, T tokens of the padded rows, N tokens of all samples together.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.batches.augment import TokenAugmentation
from plimsoll.data.samples import ragged
from plimsoll.data.samples.tags import INSIDE_WORD
from plimsoll.data.samples.text_windows import Spans, select_spans
from plimsoll.data.samples.windows import IGNORED_LABEL, Samples
from plimsoll.data.text.held_out import sides
from plimsoll.data.tokens.store import TokenStore
from plimsoll.errors import DataError
from plimsoll.files.checksums import require_runs


class DocumentDataset(Samples):
    """One sample per span of a text.

    Args:
        spans: the texts, or their windows.
        labels: the class of every text, or the labels of tokens, or ``None`` for language modelling. With ``None``,
            each token is its own label, for a model that shifts the labels. A token that an earlier window of the text
            predicts has no label.
        pad_id: the id of the padding token.
        pad_multiple: rows are padded to a multiple of this, but to no more than the maximum length of a span. ``None``
            chooses the largest of 8, 4, 2 and 1 that adds at most 3 % to the tokens.
        augmentation: a change to the tokens of each sample, drawn anew in each epoch. In language modelling, the labels
            of masked tokens are still the original tokens.

    Raises:
        DataError: if ``token_function`` is used for language modelling or with labels of tokens.
    """

    def __init__(
        self,
        spans: Spans,
        labels: NDArray[np.integer[Any]] | TokenLabels | None,
        pad_id: int,
        pad_multiple: int | None = None,
        augmentation: TokenAugmentation | None = None,
    ) -> None:
        self._labels = labels if isinstance(labels, np.ndarray) else None
        self._token_labels = None if isinstance(labels, np.ndarray) else labels
        assert self._labels is None or len(spans.store.ends) == len(self._labels), (len(spans.store.ends), labels)
        if self._labels is None and augmentation is not None and augmentation.config.token_function is not None:
            raise DataError(
                f"token_function {augmentation.config.token_function} changes tokens that are also labels, but cannot "
                f"change the labels: use `function`, which changes the text itself"
            )
        self.spans, self._augmentation = spans, augmentation
        self.sequence_length = spans.sequence_length
        self.pad_multiple = pad_multiple or ragged.pad_multiple_for(spans.lengths(ragged.some_ids(len(spans))))
        self.padding = {"input_ids": pad_id, "attention_mask": 0} | (
            {"labels": IGNORED_LABEL} if self._labels is None else {}
        )

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def fingerprint(self) -> str:
        """A string that differs if the samples differ."""
        names = self._token_labels and self._token_labels.names
        labels = names if self._labels is None else zlib.crc32(np.ascontiguousarray(self._labels).data)
        config = self._augmentation and self._augmentation.config
        return f"{self.spans.folder.name} {labels} {config} {self.padding}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_labels": _Mapped.of(self._labels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        labels = state["_labels"]
        self.__dict__ |= state | {"_labels": labels.opened() if isinstance(labels, _Mapped) else labels}

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``attention_mask`` (B, T), and ``labels``, all int64.

        Labels are (B,) for classes of texts, and (B, T) for labels of tokens.
        """
        tokens_N, lengths_B = self.spans.rows(ids)
        labels_N = self._own_labels(tokens_N, lengths_B, ids) if self._labels is None else None
        if self._augmentation is not None:
            begins_N = None if self._token_labels is None else self._token_labels.begins(self.spans, ids)
            changed = self._augmentation.apply(tokens_N, labels_N, lengths_B, ids, epoch, begins_N)
            tokens_N, labels_N, lengths_B = changed
        inside_BT = ragged.inside(lengths_B, self.padded_length(int(lengths_B.max())))
        input_ids_BT = ragged.padded(tokens_N, inside_BT, self.padding["input_ids"])
        if self._labels is not None:
            labels = self._labels[self.spans.parents(ids)].astype(np.int64)
        elif labels_N is not None:
            labels = ragged.padded(labels_N, inside_BT, IGNORED_LABEL)
        return {
            "input_ids": torch.from_numpy(input_ids_BT),
            "attention_mask": torch.from_numpy(inside_BT.astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample (B,), before augmentation."""
        return self.spans.lengths(ids)

    @property
    def windows(self) -> Spans | None:
        """The spans, which map windows to texts; ``None`` if every sample is a text."""
        return None if self.spans.are_texts else self.spans

    def parents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the text of each sample (B,)."""
        return self.spans.parents(ids)

    def _own_labels(
        self, tokens_N: NDArray[np.int64], lengths_B: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if self._token_labels is not None:
            return self._token_labels.of(self.spans, ids)
        num_known_N = np.repeat(self.spans.num_known(ids), lengths_B)
        return np.where(ragged.positions(lengths_B) < num_known_N, IGNORED_LABEL, tokens_N)


class TokenLabels:
    """The labels of the tokens of a store, as the label indices of a model; picklable.

    If windows of a long text overlap, a word has its label only in the window in which it is farther from an edge. So
    each word counts once, in training and in evaluation, and with as much context as possible.

    Args:
        store: tokens of words with tags.
        names: the tags in the order of their indices; they must include all tags of the store.
    """

    def __init__(self, store: TokenStore, names: Sequence[str]) -> None:
        assert store.labels is not None, store.folder
        self._store, self.names = store, tuple(names)
        self._labels: NDArray[Any] = np.asarray(store.labels)  # verified when they are read
        self._numbers = np.array([self.names.index(name) for name in store.tag_names], np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenLabels, (self._store, self.names)

    def of(self, spans: Spans, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the label of each token of spans, end to end (N,); -100 if the token has no label in this span."""
        starts_B, lengths_B = spans.places(ids)
        require_runs(self._store.labels, starts_B, starts_B + lengths_B)
        labels_N = self._labels[ragged.places(starts_B, lengths_B)]
        is_own_N = labels_N >= 0
        if not spans.are_texts:
            places_N = ragged.positions(lengths_B)
            first_B, stop_B = spans.own_ranges(ids)
            is_own_N &= (places_N >= np.repeat(first_B, lengths_B)) & (places_N < np.repeat(stop_B, lengths_B))
        own_N = np.where(is_own_N, self._numbers[np.maximum(labels_N, 0)], IGNORED_LABEL)
        return spans.template.around(own_N, lengths_B, IGNORED_LABEL)[0]

    def begins(self, spans: Spans, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each token of spans, end to end (N,), begins a word. Special tokens count as words.

        The first text token of a window is also marked, even if it is inside a word.
        """
        starts_B, lengths_B = spans.places(ids)
        require_runs(self._store.labels, starts_B, starts_B + lengths_B)
        begins_N = self._labels[ragged.places(starts_B, lengths_B)] != INSIDE_WORD
        begins_N[ragged.positions(lengths_B) == 0] = True
        return spans.template.around(begins_N, lengths_B, True)[0]


def split_by_text(spans: Spans, share: float, seed: int, is_drawn: bool = True) -> tuple[Spans, Spans]:
    """Hold out ``share`` of the texts with all their windows, so that no text is in both parts.

    This writes two tables. To split whole texts, use `plimsoll.data.samples.windows.split`, which writes nothing.

    Args:
        spans: the windows of all texts.
        share: the fraction to hold out, from 0 to 1 (both exclusive). `split` would hold out the same texts.
        seed: a different seed draws different texts.
        is_drawn: whether held-out texts are drawn at random; otherwise they are the last texts.

    Returns:
        the spans for training, and the spans for validation.

    Raises:
        DataError: if a share is to be held out of fewer than 2 texts.
        OutputError: if the cache cannot be written.
    """
    training, held = sides(len(spans.store.ends), share, seed, is_drawn)
    return select_spans(spans, training.name, training.is_chosen), select_spans(spans, held.name, held.is_chosen)


@dataclass(frozen=True)
class _Mapped:
    """A picklable reference to a memory-mapped array: its file, dtype, offset and shape, without its content."""

    path: str
    dtype: np.dtype[Any]
    offset_bytes: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: NDArray[Any] | None) -> _Mapped | NDArray[Any] | None:
        if not isinstance(array, np.memmap):
            return array
        return cls(str(array.filename), array.dtype, array.offset, array.shape)

    def opened(self) -> NDArray[Any]:
        return np.memmap(self.path, self.dtype, "r", self.offset_bytes, self.shape)
