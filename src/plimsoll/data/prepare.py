"""Preparation of the data of a job: stores in a cache folder, so that slow work is done once.

`prepare` runs the stages of `plimsoll.data.pipeline` and returns a record of the results. It imports torch only to pack
texts. It takes a few hundred MiB, mostly for the tokenizer. If it runs in a separate process, this memory is freed at
its end. Jobs and processes may share a cache folder. The folder may be deleted while no job runs. Not handled: data on
other machines, and data made during training.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from plimsoll.data import pipeline as stage
from plimsoll.data.pipeline import Pipeline
from plimsoll.data.samples.stream_slots import StreamSlots, refuse_no_slot, slots_of_stream, training_slots
from plimsoll.data.samples.text_windows import num_windows, refuse_no_window
from plimsoll.data.text.held_out import ChosenTexts, Side
from plimsoll.data.tokens.store import Tokens, open_tokens
from plimsoll.data.tokens.tokenizer import Tokenizer, padding_of
from plimsoll.errors import DataError
from plimsoll.files.store import Progress, read_facts, silent
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared, PreparedText
from plimsoll.records.run import GradientReach


def prepare(job: Job, cache: Path, progress: Progress = silent, budget_bytes: int | None = None) -> Prepared:
    """Index the texts of a job, make its tokenizer, and tokenize. Work whose result is in the cache is not repeated.

    Args:
        job: the job; its data, task and tokenizer are used.
        cache: the folder for all files; created if missing.
        progress: called as ``progress(stage, done, total)``. Stages are copy, convert, index, tokenizer, tokens, spans
            and packs.
        budget_bytes: the limit of private memory of this process in bytes; ``None`` for no limit.

    Raises:
        BudgetError: if tokenizer training needs more than the budget.
        DataError: if the texts, their labels or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    pipeline = Pipeline(job, cache, progress, budget_bytes)
    corpus, tokenizer, labels = pipeline.run(stage.TEXTS), pipeline.run(stage.TOKENIZER), pipeline.run(stage.LABELS)
    train, validation = _text(pipeline, "the training text"), None
    num_held_out_texts = num_trained_on = 0
    share = job.data.validation
    if isinstance(share, str):
        other = pipeline.run(stage.VALIDATION_TEXTS)
        assert other is not None, share
        beside = pipeline.replacing({stage.TEXTS: other, stage.TOKENIZER: tokenizer, stage.KNOWN_NAMES: labels.names})
        validation = _text(beside, f"the validation text ({share})")
        num_held_out_texts, num_trained_on = len(other), pipeline.run(stage.REPEATED)
    elif share and not (len(corpus) == 1 and job.reads_streams):
        num_held_out_texts, num_trained_on = pipeline.run(stage.SIDES)[1].num_texts, pipeline.run(stage.REPEATED)
        train, validation = _split(pipeline, train)
    padding = padding_of(job.model, tokenizer.pad_id)
    return Prepared(
        key=_key(_what_tokens_mean(tokenizer, padding, labels.names), train, validation, share),
        train=train,
        validation=validation,
        tokenizer_folder=str(tokenizer.folder),
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        padding_token=padding,
        special_tokens=tokenizer.shown_template,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
        num_left_out_words=tokenizer.num_left_out_words,
        num_held_out_texts=num_held_out_texts,
        holds_out_windows=isinstance(share, float) and share > 0 and num_held_out_texts == 0,
        num_trained_on=num_trained_on,
        label_names=labels.names,
        gradient_reach=reach_of(job, train, validation) if job.data.order == "streams" else None,
    )


def is_whole(prepared: Prepared) -> bool:
    """Return whether the cache still holds all prepared data."""
    folders = [folder for text in (prepared.train, prepared.validation) if text for folder in text.folders]
    folders += [Path(name) for name in (prepared.tokenizer_folder, prepared.vectors_folder) if name]
    return all(read_facts(folder) is not None for folder in folders)


def prepare_again(
    job: Job, known: Prepared, cache: Path, progress: Progress = silent, budget_bytes: int | None = None
) -> Prepared:
    """Prepare the data that is no longer in the cache, and check that its tokens are the same as before.

    ``known`` is the result of the earlier preparation.

    Raises:
        BudgetError: if tokenizer training needs more than the budget.
        DataError: if the texts or the tokenizer are missing or have changed.
        OutputError: if the cache cannot be written.
    """
    lost = f"the tokens of this run (in {Path(known.train.index_folder).parent}) cannot be made again"
    try:
        prepared = prepare(job, cache, progress, budget_bytes)
    except DataError as error:
        raise DataError(f"{lost}: {error}") from None
    if prepared.key != known.key:
        then, now = (f"{text.num_documents} texts of {text.num_bytes} bytes" for text in (known.train, prepared.train))
        raise DataError(
            f"{lost}: the texts, their labels or the tokenizer have changed (then {then}, now {now}): put them back as "
            "they were, or start anew in another --out"
        )
    return prepared


def stream_of(text: PreparedText) -> Tokens:
    """Open the memory-mapped tokens of texts, which are concatenated to a stream."""
    store = open_tokens(Path(str(text.tokens_folder)))
    return store if text.texts_folder is None else ChosenTexts(store, Path(text.texts_folder))


def slots_of(job: Job, train: PreparedText, held_out: PreparedText | None) -> tuple[StreamSlots, StreamSlots | None]:
    """Return the stream slots for training and for validation.

    Validation reads ``held_out``, or the share of the training stream that the job holds out. Its slots are ``None`` if
    the job has no validation.
    """
    num_slots, length, share = job.batch_size, job.sequence_length, job.data.validation
    if held_out is not None:
        slots = training_slots(train.num_tokens, num_slots, length)
        return slots, StreamSlots(0, held_out.num_tokens, num_slots, length)
    return slots_of_stream(train.num_tokens, share if isinstance(share, float) else 0.0, num_slots, length)


def reach_of(
    job: Job, train: PreparedText, held_out: PreparedText | None, segment_steps: int | None = None
) -> GradientReach:
    """Compute how many tokens back gradients reach in the training stream.

    If ``segment_steps`` is given, gradients also stop at the beginning of each segment of that many tokens.
    """
    slots, _ = slots_of(job, train, held_out)
    return slots.reach(stream_of(train).ends if job.data.reset else None, segment_steps)


def _text(pipeline: Pipeline, name: str) -> PreparedText:
    """Make the tokens and samples of texts that the job prepares in advance. Errors call the texts ``name``."""
    corpus, labels = pipeline.run(stage.TEXTS), pipeline.run(stage.LABELS)
    facts: dict[str, Any] = {"num_samples": len(corpus)}
    if not pipeline.job.data.on_the_fly:
        store = pipeline.run(stage.TOKENS)
        facts = {"tokens_folder": str(store.folder), "num_tokens": len(store.tokens)}
        facts |= {"num_lost_words": store.num_lost_words} | _samples(pipeline, name)
    return PreparedText(
        corpus_key=corpus.key,
        index_folder=str(corpus.folder),
        labels_folder=None if labels.folder is None else str(labels.folder),
        num_documents=len(corpus),
        num_bytes=corpus.num_bytes,
        num_skipped=corpus.num_skipped,
        skipped=corpus.skipped,
        **facts,
    )


def _split(pipeline: Pipeline, text: PreparedText) -> tuple[PreparedText, PreparedText | None]:
    """Split texts into training and held-out texts.

    The held-out texts are ``None`` if the datasets split samples instead of texts when they are opened.
    """
    if text.tokens_folder is None or not (text.has_windows or pipeline.job.data.pack or pipeline.job.reads_streams):
        return text, None

    def part(side: Side, name: str) -> PreparedText:
        name = f"{name} ({side.num_texts} of {text.num_documents} texts)"
        facts = _samples(pipeline.replacing({stage.SIDE: side}), name)
        return text.model_copy(update=facts | {"num_documents": side.num_texts})

    train, held_out = pipeline.run(stage.SIDES)
    return part(train, "the training text"), part(held_out, "the held-out text")


def _samples(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """Make the samples of the texts that the pipeline selects: all, training or held-out texts.

    Return the fields of `PreparedText` that describe the samples. Errors call the texts ``name``.
    """
    data, length, batch_size = pipeline.job.data, pipeline.job.sequence_length, pipeline.job.batch_size
    if not pipeline.job.reads_streams:
        every, spans = pipeline.run(stage.SPANS), pipeline.run(stage.CHOSEN_SPANS)
        became = ("num_long_texts", "num_truncated", "num_dropped_tokens", "num_cut_inside")
        facts = {"spans_folder": str(spans.folder), "num_samples": len(spans)}
        facts |= {fact: getattr(every, fact) for fact in became}
        if data.pack:
            packs = pipeline.run(stage.PACKS)
            facts |= {"packs_folder": str(packs.folder), "num_samples": len(packs)}
        return facts
    texts = pipeline.run(stage.STREAM)
    num_tokens = len(texts.tokens)
    if data.order == "streams":
        refuse_no_slot(num_tokens, batch_size, length, name)
        num_samples = StreamSlots(0, num_tokens, batch_size, length).num_samples
    else:
        refuse_no_window(num_tokens, length, name)
        num_samples = num_windows(num_tokens, length, data.stride)
    folder = str(texts.folder) if isinstance(texts, ChosenTexts) else None
    return {"num_tokens": num_tokens, "num_samples": num_samples, "texts_folder": folder}


def _what_tokens_mean(tokenizer: Tokenizer, padding: int, names: tuple[str, ...]) -> list[str]:
    """Return the properties of the tokenizer and labels that determine samples besides the stored tokens.

    Without a template, the list is the same as in releases before templates, so that existing keys stay valid.
    """
    facts = [tokenizer.key]
    if tokenizer.template.num_tokens or tokenizer.keeps_end:
        facts += [repr(tuple(tokenizer.template)), str(tokenizer.keeps_end)]
    if padding != tokenizer.end_id:
        facts.append(str(padding))
    return [*facts, *names]


def _key(names: list[str], train: PreparedText, held_out: PreparedText | None, validation: str | float | None) -> str:
    """Return a hash of the content of the stores, which does not depend on the location of the cache or the texts."""
    parts = [[text.corpus_key, *(folder.name for folder in text.folders[1:])] for text in (train, held_out) if text]
    return hashlib.sha256(repr([names, parts, None if held_out else validation]).encode()).hexdigest()[:32]
