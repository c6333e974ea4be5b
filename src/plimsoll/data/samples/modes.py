"""Ways to make samples and batches of texts, with the padding that each causes, to compare with the setting of a job.

Only the lengths of texts are used. Samples and batches are counted by the functions that training uses
(`plimsoll.data.samples.text_windows`, `plimsoll.data.samples.packing`, `plimsoll.data.batches.batching`). So the
counts for the setting of the job agree with the report of `plimsoll train`. All texts are counted, including those
held out for validation. Not handled: the effect of augmentation on lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.batches.batching import Batches, Buckets, Cursor, batches_of
from plimsoll.data.batches.order import BlockShuffle
from plimsoll.data.samples import ragged
from plimsoll.data.samples.stream_slots import StreamSlots
from plimsoll.data.samples.text_windows import checked_stride, num_windows, windows_of
from plimsoll.data.tokens.template import Template
from plimsoll.records.corpus import Filling
from plimsoll.records.job import Job

Ints = NDArray[np.int64]


class Texts(NamedTuple):
    """Lengths of some texts of a corpus, and the job that trains on it. Each length stands for ``scale`` texts.

    Args:
        job: the job.
        lengths: the number of tokens of each text, without special tokens.
        scale: the number of texts of the corpus per text in ``lengths``.
        num_bytes: the size of each text in its file, in bytes; ``None`` unless texts are tokenized on demand.
        at_borders: the number of tokens of each window; ``None`` unless the job cuts texts at sentences or paragraphs.
        template: the special tokens around each text, or each window.
    """

    job: Job
    lengths: Ints
    scale: float = 1.0
    num_bytes: Ints | None = None
    at_borders: Ints | None = None
    template: Template = Template()

    @property
    def whole(self) -> Ints:
        """The number of tokens of each text as one sample, including special tokens and a predicted end token."""
        has_end = not (self.job.is_labelled or self.template.suffix)
        return np.maximum(self.lengths + has_end + self.template.num_tokens, 1)

    @property
    def num_long(self) -> int:
        """The number of texts that are longer than a sample."""
        return round(int(np.count_nonzero(self.whole > self.job.sequence_length)) * self.scale)

    def fillings(self) -> Iterator[Filling]:
        """Yield a record for each method to make samples and batches of the texts."""
        if not self.job.is_labelled:
            yield from self._streams()
            yield self._packed()
        for way in self._ways():
            yield self._padded(f"{way.name}, all of {self.job.sequence_length}", way)
            for order in self._orders(way):
                batches = self._buckets if order == "by_length" else self.job.batch_size
                if len(way.lengths) >= (batches if isinstance(batches, int) else batches.batch_size or 1):
                    yield self._planned(way, order, batches)

    @property
    def _are_samples(self) -> bool:
        return self.job.is_labelled or self.job.data.has_padding

    @property
    def _buckets(self) -> Buckets:
        tokens = self.job.batch_tokens
        return Buckets(max_tokens=tokens) if tokens else Buckets(batch_size=self.job.batch_size)

    def _orders(self, way: _Way) -> tuple[str, ...]:
        own = self.job.data.order
        return ("shuffle", "by_length", *((own,) if way.is_this_job and own in {"blocks", "as_is"} else ()))

    def _streams(self) -> Iterator[Filling]:
        """Yield records for windows of all texts end to end: without overlap, and with the stride of the job."""
        longest, stride = self.job.sequence_length, self.job.data.stride
        steps = [longest] if checked_stride(stride, longest) == longest else [longest, checked_stride(stride, longest)]
        is_stream = not (self.job.data.pack or self._are_samples or self.job.data.order == "streams")
        num_tokens = round(int(self.whole.sum()) * self.scale)
        if self.job.data.order == "streams" and num_tokens > self.job.batch_size:
            yield self._slots(StreamSlots(0, num_tokens, self.job.batch_size, longest))
        for step in steps:
            num_samples = num_windows(num_tokens, longest, step)
            # A token that an earlier window predicts has no label in a later window.
            num_predicted = longest + (num_samples - 1) * step if num_samples else 0
            yield Filling(
                name=f"windows of {longest}" + (f", stride {step}" if step < longest else ""),
                num_samples=num_samples,
                batch_samples=self.job.batch_size,
                padding_share=0.0,
                useful_tokens=self.job.batch_size * num_predicted / max(num_samples, 1),
                num_dropped_tokens=num_tokens - num_predicted,
                is_this_job=is_stream and step == steps[-1],
            )

    def _slots(self, slots: StreamSlots) -> Filling:
        """Return the record for windows of contiguous stream slots. Every token except the first is predicted."""
        return Filling(
            name=f"streams of {slots.sequence_length}",
            num_samples=slots.num_samples,
            batch_samples=slots.num_slots,
            padding_share=0.0,
            useful_tokens=slots.slot_tokens * slots.num_slots / slots.num_windows,
            num_dropped_tokens=slots.num_dropped_tokens,
            is_this_job=True,
        )

    def _packed(self) -> Filling:
        from plimsoll.data.samples.packing import num_packed_rows  # imports torch

        data, longest = self.job.data, self.job.sequence_length
        truncated = _Way("packed texts", np.minimum(self.whole, longest), self._num_beyond)
        cut = _Way("packed texts", self._cut(self.template.room(longest)))
        way = truncated if data.long_texts == "truncate" else cut
        filling = self._padded(way.name, way, num_packed_rows(way.lengths, longest))
        is_refused = data.long_texts == "stop" and self.num_long > 0
        return filling.model_copy(update={"is_this_job": data.pack and not is_refused})

    @property
    def _num_beyond(self) -> int:
        """The number of tokens that truncation would lose."""
        return round(int(np.maximum(self.whole - self.job.sequence_length, 0).sum()) * self.scale)

    def _ways(self) -> Iterator[_Way]:
        """Yield the ways to make samples that each belong to one text.

        If no text is longer than a sample, this is whole texts. Otherwise it is windows, then truncated texts.
        """
        data, longest = self.job.data, self.job.sequence_length
        truncated = np.minimum(self.whole, longest)
        num_bytes = self.num_bytes if data.on_the_fly else None
        if not self.num_long:
            yield _Way("texts", truncated, 0, self._are_samples, num_bytes)
            return
        name, step = "windows of texts", self.template.room(longest)
        if self.job.is_labelled:  # in language modelling, the stride applies to windows of all texts end to end
            step = checked_stride(data.stride, step)
            name += f", stride {step}" if data.stride and data.stride < self.template.room(longest) else ""
        windows = self._cut(step)
        if self.at_borders is not None:
            name, windows = f"windows at {data.borders}s", self.at_borders
        yield _Way(name, windows, 0, self._are_samples and data.long_texts == "window")
        is_this_job = self._are_samples and data.long_texts == "truncate"
        yield _Way("truncated texts", truncated, self._num_beyond, is_this_job, num_bytes)

    def _cut(self, step: int) -> Ints:
        """Return the lengths of the windows that texts are cut into, with special tokens."""
        around, room = self.template.num_tokens, self.template.room(self.job.sequence_length)
        windows = windows_of(self.whole - around, room, step)
        return np.concatenate([lengths_N for _, _, lengths_N in windows]) + around

    def _padded(self, name: str, way: _Way, num_rows: int | None = None) -> Filling:
        """Return the record for rows that are all padded to ``sequence_length``.

        ``num_rows`` is the number of rows; ``None``: one row per sample.
        """
        longest, size = self.job.sequence_length, self.job.batch_size
        full = int(way.lengths.sum()) / ((num_rows or len(way.lengths)) * longest)
        return Filling(
            name=name,
            num_samples=round((num_rows or len(way.lengths)) * self.scale),
            batch_samples=size,
            padding_share=1 - full,
            useful_tokens=size * longest * full,
            num_long_texts=self.num_long,
            num_dropped_tokens=way.num_dropped,
        )

    def _planned(self, way: _Way, order: str, batches: int | Buckets) -> Filling:
        """Return the record for the batches of one epoch, in which samples are in the order that ``order`` names."""
        samples = _Samples(way, self.job.sequence_length)
        num_batches, num_elements = 0, 0
        for ids in _epoch(batches_of(samples, batches, self.job.seed, self._shuffle(order))):
            num_elements += len(ids) * samples.padded_length(int(way.lengths[ids].max()))
            num_batches += 1
        num_useful = int(way.lengths.sum())
        return Filling(
            name=f"{way.name}, {order}",
            num_samples=round(len(way.lengths) * self.scale),
            batch_samples=len(way.lengths) / num_batches,
            padding_share=1 - num_useful / num_elements,
            useful_tokens=num_useful / num_batches,
            num_long_texts=self.num_long,
            num_dropped_tokens=way.num_dropped,
            is_this_job=way.is_this_job and order == self.job.data.order,
        )

    def _shuffle(self, order: str) -> bool | BlockShuffle:
        if order != "blocks":
            return order != "as_is"
        # `lengths` has one of `scale` texts, so a block has fewer lengths than texts.
        return BlockShuffle(max(round(BlockShuffle.block_samples / self.scale), 1))


class _Way(NamedTuple):
    """A way to make samples: the number of tokens of each sample, and the number of tokens lost by truncation.

    ``num_bytes`` is the size of the text of each sample, if batches are formed by size. ``None``: by tokens.
    """

    name: str
    lengths: Ints
    num_dropped: int = 0
    is_this_job: bool = False
    num_bytes: Ints | None = None


class _Samples:
    """Samples that have only lengths, padded as in training.

    They stand for `plimsoll.data.samples.texts.DocumentDataset` or `plimsoll.data.tokens.on_the_fly.TextDataset`.
    """

    def __init__(self, way: _Way, sequence_length: int) -> None:
        self._lengths, self.sequence_length = way.lengths, sequence_length
        some = ragged.some_ids(len(way.lengths))
        if way.num_bytes is None:
            self.pad_multiple = ragged.pad_multiple_for(way.lengths[some])
        else:
            from plimsoll.data.tokens.on_the_fly import bytes_that_sort, pad_multiple_for_bytes  # these import torch

            self._lengths = bytes_that_sort(way.num_bytes, sequence_length)
            self.pad_multiple = pad_multiple_for_bytes(way.num_bytes[some], sequence_length)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, ids: Ints) -> Ints:
        return self._lengths[ids]

    def padded_length(self, longest: int) -> int:
        return min(-(-longest // self.pad_multiple) * self.pad_multiple, self.sequence_length)


def _epoch(plan: Batches) -> Iterator[Ints]:
    cursor = Cursor()
    while cursor.epoch == 0:
        yield plan.ids(cursor)
        cursor = plan.following(cursor)
