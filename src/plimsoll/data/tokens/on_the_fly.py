"""A data set that tokenizes texts on demand: nothing is stored, and words can be augmented anew in each epoch.

One sample is one text. Tokenizing takes hundreds of times longer than reading stored tokens. So use this data set with
loader workers, for a corpus that is read once or twice, or for augmentation of words. The samples equal the samples of
`plimsoll.data.samples.texts.DocumentDataset` over stored tokens of the same corpus, with the same truncation.

The token counts of texts are not known in advance. `TextDataset.lengths` returns bytes instead, which sort texts nearly
as well.

Not handled: windows of long texts, rows of several texts, and batches with a fixed number of tokens.

Shapes: B samples of the batch, T tokens of the padded rows, N tokens of all samples together.
"""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.samples import ragged
from plimsoll.data.samples.windows import IGNORED_LABEL, Samples
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.tokens.tokenizer import open_tokenizer, tokenizer_threads
from plimsoll.errors import DataError

if TYPE_CHECKING:
    from plimsoll.data.batches.augment import TokenAugmentation
    from plimsoll.data.batches.augment_text import TextAugmentation
    from plimsoll.data.tokens.tokenizer import Tokenizer

_MOST_WORKERS = 255
_MOST_TOKEN_BYTES = 16  # a text with more bytes than this per token of a sample is longer than the sample

_BYTES_PER_TOKEN = 4  # an estimate, before any text is read


class TextDataset(Samples):
    """A data set with one sample per text of a corpus.

    Args:
        corpus: the texts.
        tokenizer_folder: the cache folder that `plimsoll.data.tokens.tokenizer.prepare_tokenizer` wrote.
        labels: the class of every text, or ``None`` for language modelling: each token is its own label, and the end
            token follows the text.
        sequence_length: the maximum number of tokens of a sample.
        pad_id: the id of the padding token.
        long_texts: the handling of longer texts: ``"truncate"``, counted by `num_truncated`, or ``"stop"``.
        pad_multiple: rows are padded to a multiple of this, but not beyond ``sequence_length``. ``None``: the largest
            of 8, 4, 2 and 1 that adds at most 3 % to the tokens, assuming 4 bytes per token.
        words: augmentation of the words of each text, applied anew in each epoch.
        tokens: augmentation of the tokens, applied after ``words``.
    """

    reads_fast = False

    def __init__(
        self,
        corpus: Corpus,
        tokenizer_folder: Path,
        labels: NDArray[np.integer[Any]] | None,
        sequence_length: int,
        pad_id: int,
        *,
        long_texts: Literal["truncate", "stop"] = "stop",
        pad_multiple: int | None = None,
        words: TextAugmentation | None = None,
        tokens: TokenAugmentation | None = None,
    ) -> None:
        self._corpus, self._tokenizer_folder, self._labels = corpus, tokenizer_folder, labels
        self.sequence_length, self._long_texts = sequence_length, long_texts
        some = corpus.byte_lengths(ragged.some_ids(len(corpus)))
        self.pad_multiple = pad_multiple or pad_multiple_for_bytes(some, sequence_length)
        self.block_samples = corpus.texts_per_block
        self._words, self._tokens = words, tokens
        self.padding = {"input_ids": pad_id, "attention_mask": 0} | (
            {"labels": IGNORED_LABEL} if labels is None else {}
        )
        self._counts = _Counts()
        self._tokenizer: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None, "_counts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_counts": _Counts()}

    def __len__(self) -> int:
        return len(self._corpus)

    @property
    def fingerprint(self) -> str:
        """A string that identifies the corpus, the tokenizer and the maximum length of a sample.

        It is not a hash of samples, because reading a sample would count its truncation.
        """
        return f"{self._corpus.key} {self._tokenizer_folder.name} {self.sequence_length}"

    @property
    def num_truncated(self) -> int:
        """The number of samples truncated so far by this process and its forked workers."""
        return self._counts.total()

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``attention_mask`` (B, T), and ``labels``: (B,), or (B, T) for language modelling.

        All are int64.

        Raises:
            DataError: if a text is too long and ``long_texts`` is ``"stop"``.
        """
        rows = self._rows(ids, epoch)
        lengths_B = np.array([len(row) for row in rows], np.int64)
        tokens_N = np.concatenate(rows)
        labels_N = tokens_N if self._labels is None else None
        if self._tokens is not None:
            tokens_N, labels_N, lengths_B = self._tokens.apply(tokens_N, labels_N, lengths_B, ids, epoch)
        inside_BT = ragged.inside(lengths_B, self.padded_length(int(lengths_B.max())))
        if labels_N is not None:
            labels = ragged.padded(labels_N, inside_BT, IGNORED_LABEL)
        elif self._labels is not None:
            labels = self._labels[ids].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(ragged.padded(tokens_N, inside_BT, self.padding["input_ids"])),
            "attention_mask": torch.from_numpy(inside_BT.astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sort keys in bytes (B,): the bytes of each text, capped because longer texts are truncated anyway."""
        return bytes_that_sort(self._corpus.byte_lengths(ids), self.sequence_length)

    def parents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the text of each sample (B,)."""
        return ids

    def _rows(self, ids: NDArray[np.int64], epoch: int) -> list[NDArray[np.int64]]:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._tokenizer_folder)
        texts = self._corpus.texts(ids)
        if self._words is not None:
            texts = self._words.apply_all(texts, ids, epoch)
        with tokenizer_threads() if torch.utils.data.get_worker_info() is None else nullcontext():
            encodings = self._tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [
            self._row(encoding.ids, number, self._tokenizer)
            for encoding, number in zip(encodings, ids.tolist(), strict=True)
        ]

    def _row(self, tokens: list[int], number: int, tokenizer: Tokenizer) -> NDArray[np.int64]:
        template = tokenizer.template
        is_text = self._labels is None and not template.suffix  # else the end is not learned, or in the template
        if is_text or not (
            tokens or template.num_tokens
        ):  # no sample is empty, as in `plimsoll.data.samples.text_windows`
            tokens.append(tokenizer.end_id)
        num_tokens, room = len(tokens) + template.num_tokens, template.room(self.sequence_length)
        if num_tokens > self.sequence_length:
            if self._long_texts == "stop":
                raise DataError(
                    f"text {number} has {num_tokens} tokens, but a sample holds sequence_length = "
                    f"{self.sequence_length}: set data.long_texts=truncate, or a larger sequence_length"
                )
            self._counts.add_one()
        kept = tokens[-room:] if tokenizer.keeps_end else tokens[:room]
        return np.array([*template.prefix, *kept, *template.suffix], np.int64)


def bytes_that_sort(num_bytes: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Return the sizes of texts in bytes, with an upper limit, as keys to sort texts by length before tokenization."""
    return np.minimum(num_bytes, _MOST_TOKEN_BYTES * sequence_length)


def pad_multiple_for_bytes(num_bytes: NDArray[np.int64], sequence_length: int) -> int:
    """Return the multiple of tokens to which rows are padded, assuming 4 bytes per token."""
    return ragged.pad_multiple_for(np.minimum(num_bytes // _BYTES_PER_TOKEN, sequence_length))


class _Counts:
    """Counters of truncated samples for each worker and the main process, in memory shared with forked processes."""

    def __init__(self) -> None:
        self._num_of_processes = np.frombuffer(mmap.mmap(-1, 8 * (1 + _MOST_WORKERS)), np.int64)

    def add_one(self) -> None:
        worker = torch.utils.data.get_worker_info()
        self._num_of_processes[0 if worker is None else 1 + worker.id % _MOST_WORKERS] += 1

    def total(self) -> int:
        return int(self._num_of_processes.sum())
