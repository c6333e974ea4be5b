"""From the data of a job to datasets: what is slow is done once and kept in a cache folder, the rest is mapping files.

`prepare` needs no torch and a few hundred MiB, most of it for the tokenizer; run it in a process of its own and that is
given back. `open_datasets` is for the training process: it loads no tokenizer and keeps a few MiB. A cache folder may
be shared by jobs and processes, and deleted when none runs. NOT covered: data elsewhere, or made during training.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.job_options import corpus_and_tokenizer, cut_by_job, kinds_of_tokens, padding_of, reading_of
from plimsoll.data.samples.labels import labels_of, names_to_number_by
from plimsoll.data.samples.spans import Spans, num_windows, open_spans, refuse_no_window
from plimsoll.data.samples.stream_slots import StreamSlots, refuse_no_slot, slots_of_stream, training_slots
from plimsoll.data.samples.tags import tags_of
from plimsoll.data.text.corpus import Corpus, open_index
from plimsoll.data.text.held_out import (
    ChosenTexts,
    IsHeldOut,
    choice_name,
    choose_texts,
    held_out,
    num_held_out,
    num_repeated,
    refuse_same_files,
)
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import Tokens, TokenStore, open_tokens, tokenize
from plimsoll.data.tokens.tokenizer import Tokenizer
from plimsoll.errors import DataError
from plimsoll.files.checksums import require_whole
from plimsoll.files.store import Facts, Progress, kept_facts, read_facts, silent, stored
from plimsoll.records.base import Frozen, Record
from plimsoll.records.job import Job
from plimsoll.records.run import GradientReach

if TYPE_CHECKING:  # these import torch, which preparing does not need
    from plimsoll.data.batches.augment import TokenAugmentation
    from plimsoll.data.samples.windows import Samples, Subset

_LABELS_FILE = "labels.npy"


class PreparedText(Frozen):
    """Texts that are ready to be opened; a folder is ``None`` where there is no need of it.

    ``skipped`` names the first 100 files and rows that were left out, with the reason. Of the texts that are longer
    than a sample, ``num_truncated`` lost ``num_dropped_tokens`` together, which no epoch sees; ``num_cut_inside``
    windows end where no border fitted; ``num_lost_words`` are without a token, and so their tags are without a place.
    Where texts are tokenized on the fly, tokens and truncations are unknown: 0.
    """

    corpus_key: str
    index_folder: str
    tokens_folder: str | None = None
    texts_folder: str | None = None
    labels_folder: str | None = None
    spans_folder: str | None = None
    packs_folder: str | None = None
    num_documents: int
    num_bytes: int
    num_tokens: int = 0
    num_samples: int
    num_skipped: int
    skipped: tuple[str, ...]
    num_long_texts: int = 0
    num_truncated: int = 0
    num_dropped_tokens: int = 0
    num_cut_inside: int = 0
    num_lost_words: int = 0

    @property
    def has_windows(self) -> bool:
        """Whether a text may be several samples, or in several rows."""
        return self.num_long_texts > self.num_truncated

    @property
    def folders(self) -> tuple[Path, ...]:
        """The stores that training reads."""
        texts = self.tokens_folder or self.index_folder
        names = (texts, self.texts_folder, self.labels_folder, self.spans_folder, self.packs_folder)
        return tuple(Path(name) for name in names if name is not None)


class Prepared(Record):
    """The data of a job, ready to be opened; ``key`` changes when a sample, a label or the tokenizer does.

    ``special_ids`` and ``mask_id`` are of the tokenizer, for augmentation: the training process does not load it.
    ``special_tokens`` shows what stands around each text. ``num_held_out_texts`` are held out, of which
    ``num_trained_on`` are among the training texts, too, word for word; or ``holds_out_windows``: windows of the only
    text are held out.
    ``vectors_folder`` holds the vectors of the tokens, if the job has any, ``vectors_digest`` is of their bits.
    ``gradient_reach`` is of streams. ``longest_row`` is the most tokens of a row of a training batch, and
    ``held_out_batch`` the samples and tokens of the largest batch of an evaluation, where `with_rows` has looked.
    ``num_left_out_words`` were too rare to be counted when the tokenizer was
    trained, and ``peak_bytes`` is the most private memory that preparing took, where that was watched.
    """

    record_kind: ClassVar[str] = "prepared-data"

    key: str
    train: PreparedText
    validation: PreparedText | None = None
    tokenizer_folder: str
    vocab_size: int
    end_id: int
    padding_token: int | None = None
    special_tokens: str | None = None
    special_ids: tuple[int, ...] = ()
    vectors_folder: str | None = None
    vectors_digest: str | None = None
    mask_id: int | None = None
    num_held_out_texts: int = 0
    holds_out_windows: bool = False
    num_trained_on: int = 0
    label_names: tuple[str, ...] = ()
    gradient_reach: GradientReach | None = None
    longest_row: int | None = None
    held_out_batch: tuple[int, int] | None = None
    num_left_out_words: int = 0
    peak_bytes: int | None = None

    @property
    def pad_id(self) -> int:
        """The token that fills the rows of a batch."""
        return self.end_id if self.padding_token is None else self.padding_token

    @property
    def num_labels(self) -> int | None:
        """How many classes or tags there are; ``None`` for language modelling."""
        return len(self.label_names) or None


def prepare(job: Job, cache: Path, progress: Progress = silent, budget_bytes: int | None = None) -> Prepared:
    """Index the texts of a job, make its tokenizer, and tokenize; what the cache holds already is not done again.

    Args:
        job: its data, task and tokenizer are read.
        cache: where everything is written, and nothing elsewhere; made if missing.
        progress: called as ``progress(stage, done, total)``, stage being copy, convert, index, tokenizer, tokens,
            spans or packs.
        budget_bytes: what this process may take of private memory; ``None``: what there is.

    Raises:
        BudgetError: if training the tokenizer takes more.
        DataError: if the texts, their labels or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    cache = cache.absolute()
    reading = reading_of(job)
    corpus, tokenizer = corpus_and_tokenizer(job, cache, progress, budget_bytes)
    making = _Making(job, tokenizer, cache, progress)
    names: tuple[str, ...] = ()
    labels = validation = None
    if job.task == "classification":
        names, labels = labels_of(corpus, names_to_number_by(corpus, job.model))
    elif job.task == "token-classification":
        names = tags_of(corpus)
    train = making.text("the training text", corpus, labels)
    num_held_out_texts = num_trained_on = 0
    share = job.data.validation
    if isinstance(share, str):
        other = open_corpus((share,), reading, cache, progress)
        refuse_same_files(corpus, other)
        if job.task == "token-classification":
            tags_of(other, names)
        labels = labels_of(other, names)[1] if job.task == "classification" else None
        validation = making.text(f"the validation text ({share})", other, labels)
        num_held_out_texts, num_trained_on = len(other), num_repeated(corpus, job, other, cache)
    elif share and not (len(corpus) == 1 and job.reads_streams):
        is_held_out = held_out(len(corpus), share, job.seed, job.draws_held_out)
        num_held_out_texts = num_held_out(len(corpus), share)
        num_trained_on = num_repeated(corpus, job, None, cache)
        train, validation = making.split(train, share, is_held_out)
    padding = padding_of(job.model, tokenizer.pad_id)
    return Prepared(
        key=_key(_what_tokens_mean(tokenizer, padding, names), train, validation, share),
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
        label_names=names,
        gradient_reach=reach_of(job, train, validation) if job.data.order == "streams" else None,
    )


def _what_tokens_mean(tokenizer: Tokenizer, padding: int, names: tuple[str, ...]) -> list[str]:
    """List what decides samples beside the stores; data of before there were templates have the keys that they had."""
    facts = [tokenizer.key]
    if tokenizer.template.num_tokens or tokenizer.keeps_end:
        facts += [repr(tuple(tokenizer.template)), str(tokenizer.keeps_end)]
    if padding != tokenizer.end_id:
        facts.append(str(padding))
    return [*facts, *names]


def is_whole(prepared: Prepared) -> bool:
    """Whether the cache still holds all of it."""
    texts = [text for text in (prepared.train, prepared.validation) if text is not None]
    folders = [folder for text in texts for folder in text.folders]
    folders.append(Path(prepared.tokenizer_folder))
    if prepared.vectors_folder is not None:
        folders.append(Path(prepared.vectors_folder))
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


def open_datasets(prepared: Prepared, job: Job) -> tuple[Samples | Subset, Samples | Subset | None]:
    """Map the training samples and the validation samples, if the job has any.

    Raises:
        DataError: if the cache no longer holds the data, or it is too short for the job's ``sequence_length``.
    """
    from plimsoll.data.samples.windows import Subset, split

    opening = _Opening(prepared, job)
    if job.data.order == "streams":
        return opening.streams()
    samples = opening.samples(prepared.train, is_training=True)
    if prepared.validation is not None:
        return samples, opening.samples(prepared.validation, is_training=False)
    if not isinstance(job.data.validation, float) or job.data.validation == 0:
        return samples, None
    # Of one text the last windows overlap with one of those before, drawn ones with nearly all of their neighbours.
    is_drawn = job.draws_held_out and not (job.reads_streams and job.data.stride)
    train_ids, validation_ids = split(len(samples), job.data.validation, job.seed, is_drawn)
    untouched = opening.samples(prepared.train, is_training=False)
    return Subset(samples, train_ids), Subset(untouched, validation_ids)


class _Making:
    """What is made of each corpus of a job, in the cache."""

    def __init__(self, job: Job, tokenizer: Tokenizer, cache: Path, progress: Progress) -> None:
        self._job, self._tokenizer, self._cache, self._progress = job, tokenizer, cache, progress

    def text(self, name: str, corpus: Corpus, labels: NDArray[Any] | None) -> PreparedText:
        """Tokenize a corpus and cut it into samples, as far as the job wants that done once; ``name`` is for errors."""
        facts: dict[str, Any] = {
            "corpus_key": corpus.key,
            "index_folder": str(corpus.folder),
            "labels_folder": None if labels is None else str(_store_labels(labels, self._cache)),
            "num_documents": len(corpus),
            "num_bytes": corpus.num_bytes,
            "num_samples": len(corpus),
            "num_skipped": corpus.num_skipped,
            "skipped": corpus.skipped,
        }
        if self._job.data.on_the_fly:
            return PreparedText(**facts)
        store = tokenize(corpus, self._tokenizer, self._cache, self._progress, **kinds_of_tokens(self._job))
        facts |= {"tokens_folder": str(store.folder), "num_tokens": len(store.tokens)}
        facts |= {"num_lost_words": store.num_lost_words}
        return PreparedText(**facts | self._samples(name, store))

    def split(
        self, text: PreparedText, share: float, is_held_out: IsHeldOut
    ) -> tuple[PreparedText, PreparedText | None]:
        """Hold out texts with all their windows; ``None``: each is one sample, and these are split as they are read."""
        job = self._job
        if text.tokens_folder is None or not (text.has_windows or job.data.pack or job.reads_streams):
            return text, None
        store, num_texts = open_tokens(Path(text.tokens_folder)), text.num_documents
        num_held_out_texts = num_held_out(num_texts, share)
        nums = num_texts - num_held_out_texts, num_held_out_texts
        if job.reads_streams:
            name = choice_name(num_texts, share, job.seed, job.draws_held_out)
            parts = (
                self._stream(
                    f"the text that is left ({nums[0]} of {num_texts} texts)",
                    choose_texts(store, f"train-{name}", lambda texts: ~is_held_out(texts)),
                ),
                self._stream(
                    f"what is held out ({nums[1]} of {num_texts} texts)",
                    choose_texts(store, f"validation-{name}", is_held_out),
                ),
            )
        else:
            from plimsoll.data.samples.texts import split_by_text

            spans = open_spans(store, Path(str(text.spans_folder)))
            train_spans, other_spans = split_by_text(spans, share, job.seed, job.draws_held_out)
            parts = self._facts_of(train_spans), self._facts_of(other_spans)
        train, validation = (
            text.model_copy(update=facts | {"num_documents": num}) for facts, num in zip(parts, nums, strict=True)
        )
        return train, validation

    def _stream(self, name: str, texts: Tokens) -> dict[str, Any]:
        """Count the windows of texts laid end to end."""
        data, length, num_tokens = self._job.data, self._job.sequence_length, len(texts.tokens)
        facts: dict[str, Any] = {"num_tokens": num_tokens}
        if isinstance(texts, ChosenTexts):
            facts["texts_folder"] = str(texts.folder)
        if data.order == "streams":
            refuse_no_slot(num_tokens, self._job.batch_size, length, name)
            return facts | {"num_samples": StreamSlots(0, num_tokens, self._job.batch_size, length).num_samples}
        refuse_no_window(num_tokens, length, name)
        return facts | {"num_samples": num_windows(num_tokens, length, data.stride)}

    def _samples(self, name: str, store: TokenStore) -> dict[str, Any]:
        if self._job.reads_streams:
            return self._stream(name, store)
        spans = cut_by_job(store, self._job, self._tokenizer, self._progress)
        return self._facts_of(spans) | {
            "num_long_texts": spans.num_long_texts,
            "num_truncated": spans.num_truncated,
            "num_dropped_tokens": spans.num_dropped_tokens,
            "num_cut_inside": spans.num_cut_inside,
        }

    def _facts_of(self, spans: Spans) -> dict[str, Any]:
        facts = {"spans_folder": str(spans.folder), "num_samples": len(spans)}
        if not self._job.data.pack:
            return facts
        from plimsoll.data.samples.packing import pack

        packs = pack(spans, progress=self._progress)
        return facts | {"packs_folder": str(packs.folder), "num_samples": len(packs)}


def _store_labels(labels: NDArray[Any], cache: Path) -> Path:
    def write(folder: Path) -> Facts:
        np.save(folder / _LABELS_FILE, labels)
        return {}

    folder = cache / f"labels-{hashlib.sha256(np.ascontiguousarray(labels).data).hexdigest()[:16]}"
    stored(folder, write)
    return folder


class _Opening:
    """Datasets of what is prepared."""

    def __init__(self, prepared: Prepared, job: Job) -> None:
        self._prepared, self._job = prepared, job

    def samples(self, text: PreparedText, is_training: bool) -> Samples:
        """Map the samples of some texts; what augments them does so in training only."""
        from plimsoll.data.samples.packing import PackedDataset, open_packs
        from plimsoll.data.samples.texts import DocumentDataset, TokenLabels
        from plimsoll.data.samples.windows import WindowDataset

        job, pad_id = self._job, self._prepared.pad_id
        if text.tokens_folder is None:
            return self._on_the_fly(text, is_training)
        store = open_tokens(Path(text.tokens_folder))
        if text.spans_folder is None:
            return WindowDataset(_stream_of(text), job.sequence_length, job.data.stride)
        spans = open_spans(store, Path(text.spans_folder))
        if text.packs_folder is not None:
            return PackedDataset(open_packs(spans, Path(text.packs_folder)), pad_id)
        labels = _labels(text) if store.labels is None else TokenLabels(store, self._prepared.label_names)
        return DocumentDataset(spans, labels, pad_id, augmentation=self._tokens(is_training))

    def streams(self) -> tuple[Samples, Samples | None]:
        """Map the stream slots to train on and those held out."""
        from plimsoll.data.samples.streams import StreamDataset

        train, other = self._prepared.train, self._prepared.validation
        slots, other_slots = _slots_of(self._job, train, other)
        resets = self._job.data.reset is not None
        samples = StreamDataset(_stream_of(train), slots, resets)
        if other_slots is None:
            return samples, None
        return samples, StreamDataset(_stream_of(other or train), other_slots, resets)

    def _on_the_fly(self, text: PreparedText, is_training: bool) -> Samples:
        from plimsoll.data.batches.augment_text import TextAugmentation
        from plimsoll.data.tokens.on_the_fly import TextDataset

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
        from plimsoll.data.batches.augment import TokenAugmentation

        job, prepared, augment = self._job, self._prepared, self._job.data.augment
        if not is_training or augment is None or not augment.changes_tokens:
            return None
        return TokenAugmentation(augment, job.seed, prepared.special_ids, prepared.mask_id, job.sequence_length)


def _stream_of(text: PreparedText) -> Tokens:
    """Map texts that are laid end to end."""
    store = open_tokens(Path(str(text.tokens_folder)))
    return store if text.texts_folder is None else ChosenTexts(store, Path(text.texts_folder))


def _slots_of(job: Job, train: PreparedText, held_out: PreparedText | None) -> tuple[StreamSlots, StreamSlots | None]:
    """Return the stream slots to train on and those to evaluate on, which are of a text of their own or of a share."""
    num_slots, length, share = job.batch_size, job.sequence_length, job.data.validation
    if held_out is not None:
        slots = training_slots(0, train.num_tokens, num_slots, length)
        return slots, StreamSlots(0, held_out.num_tokens, num_slots, length)
    return slots_of_stream(train.num_tokens, share if isinstance(share, float) else 0.0, num_slots, length)


def reach_of(
    job: Job, train: PreparedText, held_out: PreparedText | None, segment_steps: int | None = None
) -> GradientReach:
    """Count how far back gradients of streams reach, also where windows are cut in segments that truncate them."""
    slots, _ = _slots_of(job, train, held_out)
    return slots.reach(_stream_of(train).ends if job.data.reset else None, segment_steps)


def _labels(text: PreparedText) -> NDArray[Any] | None:
    if text.labels_folder is None:
        return None
    folder = Path(text.labels_folder)
    kept_facts(folder, "labels")
    require_whole(folder)
    labels: NDArray[Any] = np.load(folder / _LABELS_FILE, mmap_mode="r")
    return labels


def _key(names: list[str], train: PreparedText, held_out: PreparedText | None, validation: str | float | None) -> str:
    """Hash what says the content of the stores, wherever the cache and the texts are."""
    parts = [[text.corpus_key, *(folder.name for folder in text.folders[1:])] for text in (train, held_out) if text]
    return hashlib.sha256(repr([names, parts, None if held_out else validation]).encode()).hexdigest()[:32]
