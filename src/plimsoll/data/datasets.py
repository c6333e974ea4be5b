"""The datasets of a job, opened from prepared data, and the size of their largest batches.

The training process opens them: this loads no tokenizer and takes a few MiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.batches.augment import TokenAugmentation
from plimsoll.data.batches.augment_text import TextAugmentation
from plimsoll.data.batches.batching import longest_sample
from plimsoll.data.pipeline import LABELS_FILE
from plimsoll.data.prepare import slots_of, stream_of
from plimsoll.data.samples.packing import PackedDataset, open_packs
from plimsoll.data.samples.streams import StreamDataset
from plimsoll.data.samples.text_windows import open_spans
from plimsoll.data.samples.texts import DocumentDataset, TokenLabels
from plimsoll.data.samples.windows import Samples, Subset, WindowDataset, split
from plimsoll.data.text.corpus import open_index
from plimsoll.data.tokens.on_the_fly import TextDataset
from plimsoll.data.tokens.store import open_tokens
from plimsoll.files.checksums import require_whole
from plimsoll.files.store import kept_facts
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared, PreparedText


def open_datasets(prepared: Prepared, job: Job) -> tuple[Samples | Subset, Samples | Subset | None]:
    """Open the memory-mapped training samples and validation samples (``None`` if the job has no validation).

    Raises:
        DataError: if the data is no longer in the cache, or is too short for the ``sequence_length`` of the job.
    """
    opening = _Opening(prepared, job)
    if job.data.order == "streams":
        return opening.streams()
    samples = opening.samples(prepared.train, is_training=True)
    if prepared.validation is not None:
        return samples, opening.samples(prepared.validation, is_training=False)
    if not isinstance(job.data.validation, float) or job.data.validation == 0:
        return samples, None
    # With a stride, windows of one text overlap. The last windows of the text overlap with one training window;
    # nearly all windows drawn at random would overlap with training windows.
    is_drawn = job.draws_held_out and not (job.reads_streams and job.data.stride)
    train_ids, validation_ids = split(len(samples), job.data.validation, job.seed, is_drawn)
    untouched = opening.samples(prepared.train, is_training=False)
    return Subset(samples, train_ids), Subset(untouched, validation_ids)


def with_rows(prepared: Prepared, job: Job) -> Prepared:
    """Return ``prepared`` with the sizes of the largest batches filled in.

    ``longest_row`` is in tokens, and ``held_out_batch`` in samples and tokens.

    Raises:
        DataError: if the datasets cannot be opened (see `open_datasets`).
    """
    training, held_out = open_datasets(prepared, job)
    augment, length = job.data.augment, job.sequence_length
    changes_tokens = augment is not None and augment.token_function is not None
    # A user's function may make samples longer. With batch_tokens, a batch of shorter samples has more of them.
    longest = length if changes_tokens or job.batch_tokens else _longest_row(training, job)
    held_out_batch = None if held_out is None else (min(job.batch_size, len(held_out)), _longest_row(held_out, job))
    return prepared.model_copy(update={"longest_row": longest, "held_out_batch": held_out_batch})


def _longest_row(samples: Samples | Subset, job: Job) -> int:
    """Return the number of tokens of the longest row of a batch; an upper bound if texts are tokenized on demand."""
    if job.data.on_the_fly or not (job.is_labelled or job.data.borders):
        return job.sequence_length
    return samples.padded_length(longest_sample(len(samples), samples.lengths)[1])


class _Opening:
    """The prepared data of a job, from which datasets are opened."""

    def __init__(self, prepared: Prepared, job: Job) -> None:
        self._prepared, self._job = prepared, job

    def samples(self, text: PreparedText, is_training: bool) -> Samples:
        """Open the samples of texts. Augmentation is applied only if ``is_training``."""
        job, pad_id = self._job, self._prepared.pad_id
        if text.tokens_folder is None:
            return self._on_the_fly(text, is_training)
        store = open_tokens(Path(text.tokens_folder))
        if text.spans_folder is None:
            return WindowDataset(stream_of(text), job.sequence_length, job.data.stride)
        spans = open_spans(store, Path(text.spans_folder))
        if text.packs_folder is not None:
            return PackedDataset(open_packs(spans, Path(text.packs_folder)), pad_id)
        labels = _labels(text) if store.labels is None else TokenLabels(store, self._prepared.label_names)
        return DocumentDataset(spans, labels, pad_id, augmentation=self._tokens(is_training))

    def streams(self) -> tuple[Samples, Samples | None]:
        """Open the stream slots for training and for validation (``None`` if the job has no validation)."""
        train, other = self._prepared.train, self._prepared.validation
        slots, other_slots = slots_of(self._job, train, other)
        resets = self._job.data.reset is not None
        samples = StreamDataset(stream_of(train), slots, resets)
        if other_slots is None:
            return samples, None
        return samples, StreamDataset(stream_of(other or train), other_slots, resets)

    def _on_the_fly(self, text: PreparedText, is_training: bool) -> Samples:
        job, augment = self._job, self._job.data.augment
        assert job.data.long_texts != "window", "the job was checked when it was read"
        corpus = open_index(Path(text.index_folder))
        return TextDataset(
            corpus.with_blocks() if job.data.order == "blocks" else corpus,
            Path(self._prepared.tokenizer_folder),
            _labels(text),
            job.sequence_length,
            self._prepared.pad_id,
            long_texts=job.data.long_texts,
            words=TextAugmentation(augment, job.seed) if is_training and augment and augment.changes_text else None,
            tokens=self._tokens(is_training),
        )

    def _tokens(self, is_training: bool) -> TokenAugmentation | None:
        job, prepared, augment = self._job, self._prepared, self._job.data.augment
        if not is_training or augment is None or not augment.changes_tokens:
            return None
        return TokenAugmentation(augment, job.seed, prepared.special_ids, prepared.mask_id, job.sequence_length)


def _labels(text: PreparedText) -> NDArray[Any] | None:
    if text.labels_folder is None:
        return None
    folder = Path(text.labels_folder)
    kept_facts(folder, "labels")
    require_whole(folder)
    labels: NDArray[Any] = np.load(folder / LABELS_FILE, mmap_mode="r")
    return labels
