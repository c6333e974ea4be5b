"""What a corpus is and what becomes of it as samples: what `plimsoll data index`, `tokenize` and `inspect` answer.

Lengths are those of the tokens where these are in the cache, else of about 4 MiB of texts drawn evenly and tokenized on
the spot. The ways to fill batches are computed from the lengths alone, by the code that makes the batches of a training
(`plimsoll.data.batching`, `plimsoll.data.packing`), so no model is needed. NOT covered: what a way does to the quality
of the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.batching import Batches, Buckets, Cursor, batches_of
from plimsoll.data.corpus import Corpus
from plimsoll.data.index import open_corpus
from plimsoll.data.labels import labels_of
from plimsoll.data.prepare import reading_of
from plimsoll.data.ragged import pad_multiple_for
from plimsoll.data.store import Progress, read_facts, silent
from plimsoll.data.tokenizer import Tokenizer, prepare_tokenizer, tokenizer_threads
from plimsoll.data.tokens import open_tokens, tokenize, tokens_folder
from plimsoll.records.corpus import CorpusFacts, Filling, Inspection, LabelCount, TokenFacts
from plimsoll.records.job import Job

_SEEN_BYTES = 4 << 20
_MOST_SEEN_TEXTS = 100_000
_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
_NUM_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 70


def index_corpus(job: Job, cache: Path, progress: Progress = silent) -> CorpusFacts:
    """Index the training texts of a job, or find their index in the cache.

    Raises:
        DataError: if the texts cannot be used.
        OutputError: if the cache cannot be written.
    """
    return _indexed(job, cache, progress)[1]


def tokenize_corpus(job: Job, cache: Path, progress: Progress = silent) -> TokenFacts:
    """Tokenize the training texts of a job, or find their tokens in the cache.

    Raises:
        DataError: if the texts or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    corpus, facts = _indexed(job, cache, progress)
    tokenizer = prepare_tokenizer(job.tokenizer, corpus, cache.absolute(), progress)
    begun = time.perf_counter()
    store = tokenize(corpus, tokenizer, cache.absolute(), progress)
    return TokenFacts(
        corpus=facts,
        tokenizer_folder=str(tokenizer.folder),
        vocab_size=tokenizer.vocab_size,
        tokens_folder=str(store.folder),
        token_type=store.tokens.dtype.name,
        num_tokens=len(store.tokens),
        num_stored_bytes=_size_bytes(store.folder),
        seconds=time.perf_counter() - begun,
    )


def inspect_corpus(job: Job, cache: Path, progress: Progress = silent) -> Inspection:
    """Look at the lengths of the training texts of a job and at what batches they make.

    Raises:
        DataError: if the texts or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    corpus, facts = _indexed(job, cache, progress)
    tokenizer = prepare_tokenizer(job.tokenizer, corpus, cache.absolute(), progress)
    lengths, num_seen_bytes = _lengths(corpus, tokenizer, cache.absolute(), progress)
    bytes_per_token = num_seen_bytes / max(int(lengths.sum()), 1)
    num_texts = len(corpus)
    num_tokens = round(corpus.num_bytes / bytes_per_token)
    places = np.linspace(0, num_texts - 1, min(_NUM_EXAMPLES, num_texts)).astype(np.int64)
    return Inspection(
        corpus=facts,
        task=job.task,
        sequence_length=job.sequence_length,
        num_seen_texts=len(lengths),
        num_seen_tokens=int(lengths.sum()),
        bytes_per_token=bytes_per_token,
        num_tokens=num_tokens,
        mean_tokens=float(lengths.mean()),
        quantiles=tuple((share, int(np.quantile(lengths, share, method="inverted_cdf"))) for share in _QUANTILES),
        fillings=tuple(_Texts(job, lengths, num_texts / len(lengths)).fillings()),
        examples=tuple(" ".join(text.split())[:_EXAMPLE_CHARACTERS] for text in corpus.texts(places)),
        notes=tuple(_notes(job, corpus, lengths)),
    )


def _indexed(job: Job, cache: Path, progress: Progress) -> tuple[Corpus, CorpusFacts]:
    begun = time.perf_counter()
    corpus = open_corpus(job.data.sources, reading_of(job.data), cache.absolute(), progress)
    seconds = time.perf_counter() - begun
    labels: list[LabelCount] = []
    if job.task == "classification":
        names, numbers = labels_of(corpus)
        counts = np.bincount(numbers, minlength=len(names)).tolist()
        labels = [LabelCount(name=name, num_texts=count) for name, count in zip(names, counts, strict=True)]
    facts = CorpusFacts(
        sources=tuple(map(str, job.data.sources)),
        num_files=len(corpus.paths),
        num_texts=len(corpus),
        num_bytes=corpus.num_bytes,
        num_skipped=corpus.num_skipped,
        skipped=corpus.skipped,
        labels=tuple(labels),
        index_folder=str(corpus.folder),
        index_bytes=_size_bytes(corpus.folder),
        seconds=seconds,
    )
    return corpus, facts


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _lengths(corpus: Corpus, tokenizer: Tokenizer, cache: Path, progress: Progress) -> tuple[NDArray[np.int64], int]:
    """Return the tokens of all texts or of some, and the bytes of these in their files."""
    folder = tokens_folder(corpus, tokenizer, cache)
    if read_facts(folder) is not None:
        ends = open_tokens(folder).ends
        return np.diff(ends, prepend=-1) - 1, corpus.num_bytes
    share = min(1.0, _SEEN_BYTES / corpus.num_bytes, _MOST_SEEN_TEXTS / len(corpus))
    ids = np.unique(np.linspace(0, len(corpus) - 1, max(int(len(corpus) * share), 1)).astype(np.int64))
    lengths, num_bytes = [], 0
    for begin in range(0, len(ids), 1024):
        some = ids[begin : begin + 1024]
        texts = corpus.texts(some)
        num_bytes += int(corpus.byte_lengths(some).sum())
        with tokenizer_threads():
            encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        lengths += [len(encoding) for encoding in encodings]
        progress("lengths", begin + len(some), len(ids))
    return np.array(lengths, np.int64), num_bytes


class _Lengths:
    """Samples of which nothing is known but their lengths, padded as `plimsoll.data.texts.DocumentDataset` does."""

    def __init__(self, lengths: NDArray[np.int64], sequence_length: int) -> None:
        self.pad_multiple = pad_multiple_for(lengths)
        self._lengths, self.sequence_length = lengths, sequence_length

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._lengths[ids]


class _Texts(NamedTuple):
    """The lengths of some texts, each of which stands for ``scale`` of the corpus, and what a job makes of them."""

    job: Job
    lengths: NDArray[np.int64]
    scale: float

    @property
    def num_long(self) -> int:
        """How many are longer than a sample."""
        return round(int(np.count_nonzero(self.lengths > self.job.sequence_length)) * self.scale)

    def fillings(self) -> Iterator[Filling]:
        """Compare the ways to make batches of them."""
        job, longest = self.job, self.job.sequence_length
        windows, truncated = _windows(self.lengths, longest), np.clip(self.lengths, 1, longest)
        num_beyond = round(int(np.maximum(self.lengths - longest, 0).sum()) * self.scale)
        if job.task != "classification":
            yield self._stream()
            yield self._packed(np.minimum(windows + 1, longest))
        truncates = job.data.long_texts == "truncate"
        kinds = [("windows of texts", windows, 0), ("truncated texts", truncated, num_beyond)]
        for name, samples, num_dropped in kinds if self.num_long else [("texts", truncated, 0)]:
            is_this = self._are_texts and (truncates == bool(num_dropped) or not self.num_long)
            yield self._padded(f"{name}, all of {longest}", samples, num_dropped)
            if len(samples) < job.batch_size:
                continue
            for order, batches in (("shuffle", job.batch_size), ("by_length", self._buckets)):
                plan = batches_of(_Lengths(samples, longest), batches, job.seed)
                filling = self._planned(f"{name}, {order}", plan, samples, num_dropped)
                yield filling.model_copy(update={"is_this_job": is_this and job.data.order == order})

    @property
    def _are_texts(self) -> bool:
        return self.job.task == "classification" or self.job.data.has_padding

    @property
    def _buckets(self) -> Buckets:
        tokens = self.job.batch_tokens
        return Buckets(max_tokens=tokens) if tokens else Buckets(batch_size=self.job.batch_size)

    def _stream(self) -> Filling:
        longest, size = self.job.sequence_length, self.job.batch_size
        num_tokens = round(int((self.lengths + 1).sum()) * self.scale)
        return Filling(
            name=f"windows of {longest}", num_samples=num_tokens // longest, batch_samples=size, padding_share=0.0,
            useful_tokens=size * longest, num_dropped_tokens=num_tokens % longest,
            is_this_job=not (self.job.data.pack or self._are_texts),
        )  # fmt: skip

    def _packed(self, samples: NDArray[np.int64]) -> Filling:
        from plimsoll.data.packing import best_fit  # it imports torch, which nothing else here needs

        longest = self.job.sequence_length
        num_rows = len(best_fit(samples, longest)[1])
        filling = self._padded("packed texts", samples, 0, num_rows)
        return filling.model_copy(update={"is_this_job": self.job.data.pack})

    def _padded(self, name: str, samples: NDArray[np.int64], num_dropped: int, num_rows: int | None = None) -> Filling:
        """Every row is of the greatest length; without ``num_rows`` each sample is one."""
        longest, size = self.job.sequence_length, self.job.batch_size
        full = int(samples.sum()) / ((num_rows or len(samples)) * longest)
        return Filling(
            name=name, num_samples=round((num_rows or len(samples)) * self.scale), batch_samples=size,
            padding_share=1 - full, useful_tokens=size * longest * full, num_long_texts=self.num_long,
            num_dropped_tokens=num_dropped,
        )  # fmt: skip

    def _planned(self, name: str, plan: Batches, samples: NDArray[np.int64], num_dropped: int) -> Filling:
        """Go over the batches of an epoch and count what of them is padding."""
        multiple, num_batches, num_elements = pad_multiple_for(samples), 0, 0
        cursor = Cursor()
        while cursor.epoch == 0:
            ids = plan.ids(cursor)
            width = -(-int(samples[ids].max()) // multiple) * multiple
            num_elements += len(ids) * min(width, self.job.sequence_length)
            num_batches += 1
            cursor = plan.following(cursor)
        num_useful = int(samples.sum())
        return Filling(
            name=name, num_samples=round(len(samples) * self.scale), batch_samples=len(samples) / num_batches,
            padding_share=1 - num_useful / num_elements, useful_tokens=num_useful / num_batches,
            num_long_texts=self.num_long, num_dropped_tokens=num_dropped,
        )  # fmt: skip


def _windows(lengths: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """Return the lengths of the windows that texts are cut into."""
    nums = np.maximum(-(-lengths // longest), 1)
    windows = np.full(int(nums.sum()), longest, np.int64)
    windows[np.cumsum(nums) - 1] = np.maximum(lengths - (nums - 1) * longest, 1)
    return windows


def _notes(job: Job, corpus: Corpus, lengths: NDArray[np.int64]) -> Iterator[str]:
    if len(lengths) < len(corpus):
        yield f"Lengths are of {len(lengths):,} texts drawn evenly; `plimsoll data tokenize` makes them exact."
    num_long = int(np.count_nonzero(lengths > job.sequence_length))
    if num_long and job.task == "classification":
        yield (
            f"{num_long:,} of {len(lengths):,} texts are longer than sequence_length = {job.sequence_length}: "
            f"data.long_texts = {job.data.long_texts}."
        )
