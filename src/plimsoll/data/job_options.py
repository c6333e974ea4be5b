"""What a job says of its texts, in the terms of the modules that read, tokenize and cut them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.data.formats import Reading
from plimsoll.data.samples.spans import Spans, cut_texts
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.files.store import Progress, silent
from plimsoll.records.job import Job

if TYPE_CHECKING:
    from plimsoll.data.text.corpus import Corpus
    from plimsoll.data.tokens.store import TokenStore


def reading_of(job: Job) -> Reading:
    """Return what of the files is a text, as a job says it."""
    source = job.data
    return Reading(
        unit=source.unit,
        text=source.text,
        label=source.label,
        escapes=source.escapes,
        quotes=source.quotes,
        header=source.header,
        on_error=source.on_error,
        is_tagged=job.task == "token-classification",
    )


def corpus_and_tokenizer(
    job: Job, cache: Path, progress: Progress = silent, budget_bytes: int | None = None
) -> tuple[Corpus, Tokenizer]:
    """Index the training texts of a job and make its tokenizer; the arguments are those of `plimsoll.data.prepare`.

    Raises:
        BudgetError: if training the tokenizer takes more.
        DataError: if the texts or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    corpus = open_corpus(job.data.sources, reading_of(job), cache.absolute(), progress)
    return corpus, prepare_tokenizer(job.tokenizer, corpus, cache.absolute(), progress, budget_bytes)


def kinds_of_tokens(job: Job) -> dict[str, bool]:
    """Return how `plimsoll.data.tokens.store.tokenize` is to store the texts of a job."""
    return {"is_stream": job.reads_streams, "borders": job.data.borders is not None}


def cut_by_job(store: TokenStore, job: Job, tokenizer: Tokenizer, progress: Progress = silent) -> Spans:
    """Cut texts into the samples of a job.

    Raises:
        DataError: if a text is too long, and is not to be cut.
        OutputError: if the cache cannot be written.
    """
    template = tokenizer.template
    return cut_texts(
        store,
        job.sequence_length,
        long_texts=job.data.long_texts,
        stride=job.data.stride,
        borders=job.data.borders,
        with_end=not (job.is_labelled or template.suffix),  # what is behind a text is learnt as its end
        template=template,
        keeps_end=tokenizer.keeps_end and job.data.long_texts == "truncate",
        progress=progress,
    )


def padding_of(model: str | dict[str, Any], own: int) -> int:
    """Return the token that fills the rows of a batch: that of the checkpoint of a job, or else the tokenizer's own.

    Decoders with a classification head find the last token of a text by it.
    """
    try:
        padding = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return own
    return padding if isinstance(padding, int) and padding >= 0 else own
