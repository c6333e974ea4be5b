"""The speed of reading, tokenizing and loading a corpus, and the memory of its processes, for `plimsoll data bench`.

Each stage runs for about two seconds with a warm page cache, so it measures the machine without its disk. Batches are
loaded with the settings and workers of the job. If loading fails, or much text would have to be tokenized first,
loading is not measured, and a note gives the reason. Padding does not count as tokens; rows of packed texts have almost
no padding and count as full. Does NOT measure the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import torch

from plimsoll.data.batches.order import Order
from plimsoll.data.datasets import open_datasets
from plimsoll.data.inspect import index_corpus
from plimsoll.data.pipeline import TEXTS, TOKENIZER, TOKENS, Pipeline
from plimsoll.data.prepare import prepare
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.tokens.tokenizer import tokenizer_threads
from plimsoll.device.process import private_bytes
from plimsoll.errors import DataError
from plimsoll.files.store import Progress, silent
from plimsoll.models.assemble import loader_of
from plimsoll.records.corpus import FeedRates, Rate
from plimsoll.records.job import Job
from plimsoll.records.units import format_bytes

_SECONDS = 2.0
_BATCH_TEXTS = 1024
_SMALL_BYTES = 64 << 20
_BATCHES_BETWEEN_CLOCKS = 16


def time_corpus(job: Job, cache: Path, progress: Progress = silent) -> FeedRates:
    """Measure the speed of each stage of the input pipeline of a job.

    Args:
        job: the job.
        cache: folder for tokens.
        progress: a function that is called with the progress of indexing and tokenizing.

    Raises:
        DataError: if the texts or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    facts, pipeline = index_corpus(job, cache, progress), Pipeline(job, cache, progress)
    corpus, tokenizer = pipeline.run(TEXTS), pipeline.run(TOKENIZER)

    def encode(texts: list[str]) -> int:
        with tokenizer_threads():
            tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(text.encode()) for text in texts)

    rates = [
        _rate("read", "in order", "texts", (len(texts) for texts in _in_order(corpus))),
        _rate("read", f"shuffled, {_BATCH_TEXTS} at a time", "texts", (len(texts) for texts in _shuffled(corpus))),
        _rate("tokenize", "all cores", "bytes", (encode(texts) for texts in _in_order(corpus))),
    ]
    is_ready = job.data.on_the_fly or pipeline.is_there(TOKENS)
    try:
        if is_ready or corpus.num_bytes <= _SMALL_BYTES:
            return FeedRates(corpus=facts, rates=(*rates, *_fed(job, cache, progress)))
        why = f"{format_bytes(corpus.num_bytes)} of text are not tokenized: run `plimsoll data tokenize` first"
    except DataError as error:  # the rates measured before are still useful
        why = str(error)
    return FeedRates(corpus=facts, rates=tuple(rates), notes=(f"Not fed: {why}",))


def _rate(stage: str, detail: str, unit: str, done: Iterator[int]) -> Rate:
    begun, number = time.perf_counter(), 0
    for some in done:
        number += some
        if time.perf_counter() - begun > _SECONDS:
            break
    return Rate(stage=stage, detail=detail, per_second=number / (time.perf_counter() - begun), unit=unit)


def _in_order(corpus: Corpus) -> Iterator[list[str]]:
    return _batches(corpus, lambda _, start, stop: np.arange(start, stop))


def _shuffled(corpus: Corpus) -> Iterator[list[str]]:
    return _batches(corpus, Order(len(corpus), seed=0).ids)


def _batches(corpus: Corpus, ids: Callable[[int, int, int], np.ndarray]) -> Iterator[list[str]]:
    for epoch in count():
        for start in range(0, len(corpus), _BATCH_TEXTS):
            yield corpus.texts(ids(epoch, start, min(start + _BATCH_TEXTS, len(corpus))))


def _fed(job: Job, cache: Path, progress: Progress) -> list[Rate]:
    """Return the speed of the job's data loader, once in samples and once in tokens per second."""
    samples, _ = open_datasets(prepare(job, cache, progress), job)
    loader = loader_of(job, samples)
    process = psutil.Process()
    most_bytes = num_samples = num_tokens = 0
    try:
        loader.peek()  # starts the workers
        begun = time.perf_counter()
        for number in count():
            batch = loader.peek()
            loader.advance()
            num_samples += len(batch.sample_ids)
            num_tokens += _num_tokens(batch.fields)
            if number % _BATCHES_BETWEEN_CLOCKS == 0:
                family = [process, *process.children(recursive=True)]
                most_bytes = max(most_bytes, sum(private_bytes(one.pid) for one in family))
                if time.perf_counter() - begun > _SECONDS:
                    break
        seconds = time.perf_counter() - begun
    finally:
        loader.close()
    detail = f"{job.data.order}, workers {job.data.workers}"
    return [
        Rate(stage="feed", detail=detail, per_second=num_samples / seconds, unit="samples", private_bytes=most_bytes),
        Rate(stage="feed", detail=detail, per_second=num_tokens / seconds, unit="tokens", private_bytes=most_bytes),
    ]


def _num_tokens(fields: dict[str, torch.Tensor]) -> int:
    return int(fields["attention_mask"].sum()) if "attention_mask" in fields else fields["input_ids"].numel()
