"""From the data of a job to stores in a cache folder: what is slow is done once, the rest is mapping files.

`prepare` runs the stages of `plimsoll.data.pipeline` and says in a record what came of them. It needs no torch but to
pack and a few hundred MiB, most of it for the tokenizer; run it in a process of its own and that is given back. A cache
folder may be shared by jobs and processes, and deleted when none runs. NOT covered: data elsewhere, or made during
training.
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
    """Index the texts of a job, make its tokenizer, and tokenize; what the cache holds already is not done again.

    Args:
        job: its data, task and tokenizer are read.
        cache: where everything is written, and nothing elsewhere; made if missing.
        progress: called as ``progress(stage, done, total)``, stage being copy, convert, index, tokenizer, tokens,
            spans or packs.
        budget_bytes: the private memory that this process may take; ``None``: no budget.

    Raises:
        BudgetError: if training the tokenizer takes more.
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
    """Whether the cache still holds all of it."""
    folders = [folder for text in (prepared.train, prepared.validation) if text for folder in text.folders]
    folders += [Path(name) for name in (prepared.tokenizer_folder, prepared.vectors_folder) if name]
    return all(read_facts(folder) is not None for folder in folders)


def prepare_again(
    job: Job, known: Prepared, cache: Path, progress: Progress = silent, budget_bytes: int | None = None
) -> Prepared:
    """Prepare what the cache no longer holds, to the same tokens as before.

    Raises:
        BudgetError: if training the tokenizer takes more than the budget.
        DataError: if the texts or the tokenizer are gone, or are no longer what they were.
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
    """Map texts that are laid end to end."""
    store = open_tokens(Path(str(text.tokens_folder)))
    return store if text.texts_folder is None else ChosenTexts(store, Path(text.texts_folder))


def slots_of(job: Job, train: PreparedText, held_out: PreparedText | None) -> tuple[StreamSlots, StreamSlots | None]:
    """Return the stream slots to train on and those to evaluate on, which are of a text of their own or of a share."""
    num_slots, length, share = job.batch_size, job.sequence_length, job.data.validation
    if held_out is not None:
        slots = training_slots(train.num_tokens, num_slots, length)
        return slots, StreamSlots(0, held_out.num_tokens, num_slots, length)
    return slots_of_stream(train.num_tokens, share if isinstance(share, float) else 0.0, num_slots, length)


def reach_of(
    job: Job, train: PreparedText, held_out: PreparedText | None, segment_steps: int | None = None
) -> GradientReach:
    """Count how far back gradients of streams reach, also where windows are cut in segments that truncate them."""
    slots, _ = slots_of(job, train, held_out)
    return slots.reach(stream_of(train).ends if job.data.reset else None, segment_steps)


def _text(pipeline: Pipeline, name: str) -> PreparedText:
    """Make tokens and samples of texts, as far as the job wants that done once; ``name`` is for errors."""
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
    """Hold out texts with all their windows; ``None``: each is one sample, and these are split as they are read."""
    if text.tokens_folder is None or not (text.has_windows or pipeline.job.data.pack or pipeline.job.reads_streams):
        return text, None

    def part(side: Side, name: str) -> PreparedText:
        name = f"{name} ({side.num_texts} of {text.num_documents} texts)"
        facts = _samples(pipeline.replacing({stage.SIDE: side}), name)
        return text.model_copy(update=facts | {"num_documents": side.num_texts})

    train, held_out = pipeline.run(stage.SIDES)
    return part(train, "the text that is left"), part(held_out, "what is held out")


def _samples(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """Make and count the samples of texts, or of those of a side."""
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
    """List what decides samples beside the stores; data of before there were templates have the keys that they had."""
    facts = [tokenizer.key]
    if tokenizer.template.num_tokens or tokenizer.keeps_end:
        facts += [repr(tuple(tokenizer.template)), str(tokenizer.keeps_end)]
    if padding != tokenizer.end_id:
        facts.append(str(padding))
    return [*facts, *names]


def _key(names: list[str], train: PreparedText, held_out: PreparedText | None, validation: str | float | None) -> str:
    """Hash what says the content of the stores, wherever the cache and the texts are."""
    parts = [[text.corpus_key, *(folder.name for folder in text.folders[1:])] for text in (train, held_out) if text]
    return hashlib.sha256(repr([names, parts, None if held_out else validation]).encode()).hexdigest()[:32]
