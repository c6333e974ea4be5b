"""Facts about a corpus and its samples, for `plimsoll data index`, `tokenize` and `inspect`.

Lengths come from the tokens if these are in the cache. Otherwise about 4 MiB of evenly spaced texts are tokenized. The
padding that each method of making batches causes is computed from lengths alone (`plimsoll.data.samples.modes`), so no
model is needed. Only windows that end at borders also need tokens and the borders in the texts. Not handled: the effect
of a method on the quality of the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.pipeline import REPEATED, SPANS, TEXTS, TOKENIZER, TOKENS, Pipeline
from plimsoll.data.samples.borders import MARKS, BorderKind, cut_at_borders, marked_pieces
from plimsoll.data.samples.labels import labels_of
from plimsoll.data.samples.modes import Texts
from plimsoll.data.samples.tags import Encoded, WordEncoder, entity_note
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.held_out import said_of_repeated
from plimsoll.data.tokens.store import TextEncoder
from plimsoll.data.tokens.tokenizer import Tokenizer, tokenizer_threads
from plimsoll.files.addresses import shown
from plimsoll.files.store import Progress, silent
from plimsoll.records.corpus import CorpusFacts, Filling, Inspection, LabelCount, TagCount, TokenFacts
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
    return _corpus_facts(Pipeline(job, cache, progress))


def tokenize_corpus(job: Job, cache: Path, progress: Progress = silent) -> TokenFacts:
    """Tokenize the training texts of a job, or find their tokens in the cache.

    Raises:
        DataError: if the texts or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    pipeline = Pipeline(job, cache, progress)
    facts, tokenizer = _corpus_facts(pipeline), pipeline.run(TOKENIZER)
    begun = time.perf_counter()
    store = pipeline.run(TOKENS)
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
    """Measure the lengths of the training texts of a job in tokens, and compute the batches that these lengths give.

    Raises:
        DataError: if the texts or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    pipeline = Pipeline(job, cache, progress)
    facts, corpus, tokenizer = _corpus_facts(pipeline), pipeline.run(TEXTS), pipeline.run(TOKENIZER)
    seen = _seen(pipeline, corpus, tokenizer)
    lengths = seen.lengths
    bytes_per_token = seen.total_bytes / max(int(lengths.sum()), 1)
    num_texts = len(corpus)
    num_tokens = round(corpus.num_bytes / bytes_per_token)
    texts = Texts(job, lengths, num_texts / len(lengths), seen.num_bytes, seen.at_borders, tokenizer.template)
    fillings = tuple(texts.fillings())
    places = np.linspace(0, num_texts - 1, min(_NUM_EXAMPLES, num_texts)).astype(np.int64)
    return Inspection(
        corpus=facts,
        task=job.task,
        sequence_length=job.sequence_length,
        special_tokens=tokenizer.shown_template,
        num_borders=seen.num_borders,
        num_seen_texts=len(lengths),
        num_seen_tokens=int(lengths.sum()),
        bytes_per_token=bytes_per_token,
        num_tokens=num_tokens,
        mean_tokens=float(lengths.mean()),
        quantiles=tuple((share, int(np.quantile(lengths, share, method="inverted_cdf"))) for share in _QUANTILES),
        fillings=fillings,
        examples=tuple(" ".join(text.split())[:_EXAMPLE_CHARACTERS] for text in corpus.texts(places)),
        notes=(*_notes(texts, corpus, fillings), *(f"{said}." for said in said_of_repeated(pipeline.run(REPEATED)))),
    )


def _corpus_facts(of: Pipeline) -> CorpusFacts:
    job, begun = of.job, time.perf_counter()
    corpus = of.run(TEXTS)
    seconds = time.perf_counter() - begun
    labels: list[LabelCount] = []
    if job.task == "classification":
        names, numbers = labels_of(corpus)
        counts = np.bincount(numbers, minlength=len(names)).tolist()
        labels = [LabelCount(name=name, num_texts=count) for name, count in zip(names, counts, strict=True)]
    tags = [TagCount(name=name, num_words=count) for name, count in corpus.tag_counts.items()]
    return CorpusFacts(
        sources=tuple(map(shown, job.data.sources)),
        num_files=len(corpus.paths),
        num_texts=len(corpus),
        num_bytes=corpus.num_bytes,
        num_skipped=corpus.num_skipped,
        num_hidden=corpus.num_hidden,
        skipped=corpus.skipped,
        labels=tuple(labels),
        tags=tuple(tags),
        index_folder=str(corpus.folder),
        index_bytes=_size_bytes(corpus.folder),
        seconds=seconds,
    )


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


class _Seen(NamedTuple):
    """The measured texts: all texts, or evenly spaced texts. ``lengths`` are in tokens.

    ``total_bytes`` is the total size of these texts in their files. ``num_bytes`` is the size of each text, or ``None``
    if the job does not need it. If windows end at borders, ``at_borders`` holds the number of tokens of each window,
    and ``num_borders`` is the number of borders; otherwise both are ``None``.
    """

    lengths: NDArray[np.int64]
    total_bytes: int
    num_bytes: NDArray[np.int64] | None
    at_borders: NDArray[np.int64] | None
    num_borders: int | None = None


class _Encoded(NamedTuple):
    """Tokens of texts that were encoded here, with the interface `plimsoll.data.samples.borders.Marked`."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]
    marks: NDArray[np.uint8]


def _seen(of: Pipeline, corpus: Corpus, tokenizer: Tokenizer) -> _Seen:
    job = of.job
    borders = job.data.borders if job.data.long_texts == "window" else None
    if not of.is_there(TOKENS):
        return _drawn(job, corpus, tokenizer, borders, of.progress)
    store, at_borders, num_borders = of.run(TOKENS), None, None
    if borders is not None:  # written to the cache, so that a training run finds them
        spans = of.run(SPANS)
        at_borders = spans.lengths(np.arange(len(spans)))
        num_borders = int(np.count_nonzero(store.marks[:] & np.uint8(MARKS[borders])))
    num_bytes = corpus.byte_lengths(np.arange(len(corpus))) if job.data.on_the_fly else None
    template = tokenizer.template
    num_inside = len(template.prefix) + max(len(template.suffix) - 1, 0) if job.reads_streams else 0
    lengths = np.diff(store.ends, prepend=-1) - 1 - num_inside
    return _Seen(lengths, corpus.num_bytes, num_bytes, at_borders, num_borders)


def _drawn(job: Job, corpus: Corpus, tokenizer: Tokenizer, borders: BorderKind | None, progress: Progress) -> _Seen:
    """Tokenize all texts, or evenly spaced texts of a large corpus, and measure them."""
    share = min(1.0, _SEEN_BYTES / corpus.num_bytes, _MOST_SEEN_TEXTS / len(corpus))
    ids = np.unique(np.linspace(0, len(corpus) - 1, max(int(len(corpus) * share), 1)).astype(np.int64))
    encoder, lengths, parts = TextEncoder(tokenizer.backend), list[int](), list[Encoded]()
    for begin in range(0, len(ids), 1024):
        texts = corpus.texts(ids[begin : begin + 1024])
        with tokenizer_threads():
            if corpus.tag_counts:
                lengths += _lengths_by_words(tokenizer, texts)
            else:
                pieces = list(marked_pieces(((text, True) for text in texts), borders is not None))
                encoded = encoder.encode(pieces, with_marks=borders is not None)
                lengths += encoded.lengths.tolist()
                parts += [encoded] if borders is not None else []
        progress("lengths", begin + len(texts), len(ids))
    num_bytes = corpus.byte_lengths(ids)
    found = np.array(lengths, np.int64), int(num_bytes.sum()), num_bytes
    return _Seen(*found, *((None, None) if borders is None else _at_borders(job, tokenizer, borders, parts)))


def _at_borders(
    job: Job, tokenizer: Tokenizer, kind: BorderKind, parts: list[Encoded]
) -> tuple[NDArray[np.int64], int]:
    """Return the lengths of the windows of texts in tokens, and the number of borders in the texts."""
    lengths = np.concatenate([part.lengths for part in parts])
    stops = np.cumsum(lengths)
    tokens = np.insert(np.concatenate([part.tokens for part in parts]), stops, tokenizer.end_id)
    marks = np.insert(np.concatenate([part.marks for part in parts if part.marks is not None]), stops, 0)
    template = tokenizer.template
    store = _Encoded(tokens, np.cumsum(lengths + 1) - 1, marks)
    with_end, room = not (job.is_labelled or template.suffix), template.room(job.sequence_length)
    tables = cut_at_borders(store, kind, room, with_end, keeps_empty=template.num_tokens > 0)
    at_borders = np.concatenate([lengths_N for (_, lengths_N), _ in tables]) + template.num_tokens
    return at_borders, int(np.count_nonzero(marks & np.uint8(MARKS[kind])))


def _lengths_by_words(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Return the number of tokens of each text, with the words between spaces encoded one by one."""
    words = [text.split(" ") for text in texts]
    _, lengths_W = WordEncoder(tokenizer.backend).encode(words)
    sums = np.concatenate(([0], np.cumsum(lengths_W)))
    lengths: list[int] = np.diff(sums[np.cumsum([0, *map(len, words)])]).tolist()
    return lengths


def _notes(texts: Texts, corpus: Corpus, fillings: tuple[Filling, ...]) -> Iterator[str]:
    job, num_seen = texts.job, len(texts.lengths)
    if num_seen < len(corpus):
        yield f"Lengths are of {num_seen:,} texts drawn evenly; `plimsoll data tokenize` makes them exact."
    if note := entity_note(list(corpus.tag_counts)):
        yield f"{note[0].upper()}{note[1:]}."
    is_refused = job.data.long_texts == "stop" and texts.num_long > 0
    num_long = int(np.count_nonzero(texts.whole > job.sequence_length))
    if num_long and (job.is_labelled or is_refused):
        remedy = ", so training would stop: set data.long_texts=truncate, or a larger sequence_length"
        yield (
            f"{num_long:,} of {num_seen:,} texts are longer than sequence_length = {job.sequence_length}: "
            f"data.long_texts = {job.data.long_texts}{remedy if is_refused else ''}."
        )
    if not is_refused and not any(filling.is_this_job for filling in fillings):
        is_drawn = num_seen < len(corpus)
        remedy = "`plimsoll data tokenize` first" if is_drawn else "give more text, or set a smaller batch_size"
        yield (
            f"The {'drawn ' if is_drawn else ''}texts do not fill one batch of batch_size = {job.batch_size}, so no "
            f"line is marked as this job: {remedy}."
        )
