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

from plimsoll.data.borders import border_table
from plimsoll.data.corpus import Corpus, open_index
from plimsoll.data.formats import Reading
from plimsoll.data.index import open_corpus
from plimsoll.data.labels import labels_of, names_to_number_by
from plimsoll.data.lanes import Lanes, lanes_of_stream, refuse_no_lane, training_lanes
from plimsoll.data.spans import Spans, cut_texts, num_windows, open_spans, refuse_no_window
from plimsoll.data.tags import tags_of
from plimsoll.data.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.data.tokens import TokenStore, open_tokens, tokenize
from plimsoll.errors import DataError
from plimsoll.records.base import Frozen, Record
from plimsoll.records.job import Job
from plimsoll.records.run import GradientReach
from plimsoll.store import Facts, Progress, kept_facts, read_facts, silent, stored

if TYPE_CHECKING:  # these import torch, which preparing does not need
    from plimsoll.data.augment import TokenAugmentation
    from plimsoll.data.windows import Samples, Subset

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
        names = (texts, self.labels_folder, self.spans_folder, self.packs_folder)
        return tuple(Path(name) for name in names if name is not None)


class Prepared(Record):
    """The data of a job, ready to be opened; ``key`` changes when a sample, a label or the tokenizer does.

    ``special_ids`` and ``mask_id`` are of the tokenizer, for augmentation: the training process does not load it.
    ``vectors_folder`` holds the vectors of the tokens, if the job has any, ``vectors_digest`` is of their bits.
    ``gradient_reach`` is of streams. ``longest_row`` is the most tokens of a row of a training batch, and
    ``held_out_batch`` the samples and tokens of the largest batch of an evaluation, where `with_rows` has looked.
    ``gradient_reach`` is of streams. ``num_left_out_words`` were too rare to be counted when the tokenizer was
    trained, and ``peak_bytes`` is the most private memory that preparing took, where that was watched.
    """

    record_kind: ClassVar[str] = "prepared-data"

    key: str
    train: PreparedText
    validation: PreparedText | None = None
    tokenizer_folder: str
    vocab_size: int
    end_id: int
    special_ids: tuple[int, ...] = ()
    vectors_folder: str | None = None
    vectors_digest: str | None = None
    mask_id: int | None = None
    label_names: tuple[str, ...] = ()
    gradient_reach: GradientReach | None = None
    longest_row: int | None = None
    held_out_batch: tuple[int, int] | None = None
    num_left_out_words: int = 0
    peak_bytes: int | None = None

    @property
    def num_labels(self) -> int | None:
        """How many classes or tags there are; ``None`` for language modelling."""
        return len(self.label_names) or None


def prepare(job: Job, cache: Path, progress: Progress = silent) -> Prepared:
    """Index the texts of a job, make its tokenizer, and tokenize; what the cache holds already is not done again.

    Args:
        job: its data, task and tokenizer are read.
        cache: where everything is written, and nothing elsewhere; made if missing.
        progress: called as ``progress(stage, done, total)``, stage being copy, convert, index, tokenizer, tokens,
            spans or packs.

    Raises:
        DataError: if the texts, their labels or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    cache = cache.absolute()
    reading = reading_of(job)
    corpus = open_corpus(job.data.sources, reading, cache, progress)
    tokenizer = prepare_tokenizer(job.tokenizer, corpus, cache, progress)
    making = _Making(job, tokenizer, cache, progress)
    names: tuple[str, ...] = ()
    labels = held_out = None
    if job.task == "classification":
        names, labels = labels_of(corpus, names_to_number_by(corpus, job.model))
    elif job.task == "token-classification":
        names = tags_of(corpus)
    train = making.text("the training text", corpus, labels)
    if isinstance(job.data.validation, str):
        other = open_corpus((job.data.validation,), reading, cache, progress)
        if job.task == "token-classification":
            tags_of(other, names)
        labels = labels_of(other, names)[1] if job.task == "classification" else None
        held_out = making.text(f"the validation text ({job.data.validation})", other, labels)
    elif job.data.validation and train.spans_folder is not None and train.has_windows:
        train, held_out = making.split_by_text(train, job.data.validation)
    return Prepared(
        key=_key([tokenizer.key, *names], train, held_out, job.data.validation),
        train=train,
        validation=held_out,
        tokenizer_folder=str(tokenizer.folder),
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
        num_left_out_words=tokenizer.num_left_out_words,
        label_names=names,
        gradient_reach=reach_of(job, train, held_out) if job.data.order == "streams" else None,
    )


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


def is_whole(prepared: Prepared) -> bool:
    """Whether the cache still holds all of it."""
    texts = [text for text in (prepared.train, prepared.validation) if text is not None]
    folders = [folder for text in texts for folder in text.folders]
    folders.append(Path(prepared.tokenizer_folder))
    if prepared.vectors_folder is not None:
        folders.append(Path(prepared.vectors_folder))
    return all(read_facts(folder) is not None for folder in folders)


def prepare_again(job: Job, known: Prepared, cache: Path, progress: Progress = silent) -> Prepared:
    """Prepare what the cache no longer holds, to the same tokens as before.

    Raises:
        DataError: if the texts or the tokenizer are gone, or are no longer what they were.
        OutputError: if the cache cannot be written.
    """
    lost = f"the tokens of this run (in {Path(known.train.index_folder).parent}) cannot be made again"
    try:
        prepared = prepare(job, cache, progress)
    except DataError as error:
        raise DataError(f"{lost}: {error}") from None
    if prepared.key != known.key:
        then, now = (f"{text.num_documents} texts of {text.num_bytes} bytes" for text in (known.train, prepared.train))
        raise DataError(
            f"{lost}: the texts, their labels or the tokenizer have changed (then {then}, now {now}): put them back as "
            "they were, or start anew in another --out"
        )
    return prepared


def with_rows(prepared: Prepared, job: Job) -> Prepared:
    """Look how large the batches of a job become: the record with ``longest_row`` and ``held_out_batch``.

    Raises:
        DataError: if there are no datasets to make batches of (see `open_datasets`).
    """
    training, held_out = open_datasets(prepared, job)
    augment, length = job.data.augment, job.sequence_length
    changes_tokens = augment is not None and augment.token_function is not None
    # A user's function may make samples longer, and with batch_tokens shorter samples are more.
    longest = length if changes_tokens or job.batch_tokens else _longest_row(training, job)
    held_out_batch = None if held_out is None else (min(job.batch_size, len(held_out)), _longest_row(held_out, job))
    return prepared.model_copy(update={"longest_row": longest, "held_out_batch": held_out_batch})


def _longest_row(samples: Samples | Subset, job: Job) -> int:
    """Return how many tokens the longest row of a batch has; of texts that are tokenized as they are read, may have."""
    from plimsoll.data.batching import longest_sample

    if job.data.on_the_fly or not (job.is_labelled or job.data.borders):
        return job.sequence_length
    return samples.padded_length(longest_sample(len(samples), samples.lengths)[1])


def open_datasets(prepared: Prepared, job: Job) -> tuple[Samples | Subset, Samples | Subset | None]:
    """Map the training samples and the validation samples, if the job has any.

    Raises:
        DataError: if the cache no longer holds the data, or it is too short for the job's ``sequence_length``.
    """
    from plimsoll.data.windows import Subset, split

    opening = _Opening(prepared, job)
    if job.data.order == "streams":
        return opening.streams()
    samples = opening.samples(prepared.train, is_training=True)
    if prepared.validation is not None:
        return samples, opening.samples(prepared.validation, is_training=False)
    if not isinstance(job.data.validation, float) or job.data.validation == 0:
        return samples, None
    # The last windows of a stream overlap with one of those before, drawn ones with nearly all of their neighbours.
    is_drawn = job.data.order not in {"blocks", "as_is"} and job.data.stride is None
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
        store = tokenize(corpus, self._tokenizer, self._cache, self._progress)
        facts |= {"tokens_folder": str(store.folder), "num_tokens": len(store.tokens)}
        facts |= {"num_lost_words": store.num_lost_words}
        return PreparedText(**facts | self._samples(name, store))

    def split_by_text(self, text: PreparedText, share: float) -> tuple[PreparedText, PreparedText]:
        """Hold out texts with all their windows."""
        from plimsoll.data.texts import split_by_text

        spans = open_spans(open_tokens(Path(str(text.tokens_folder))), Path(str(text.spans_folder)))
        train, held_out = (
            text.model_copy(update=self._facts_of(part)) for part in split_by_text(spans, share, self._job.seed)
        )
        return train, held_out

    def _samples(self, name: str, store: TokenStore) -> dict[str, Any]:
        data, length, is_labelled = self._job.data, self._job.sequence_length, self._job.is_labelled
        if data.order == "streams":
            num_tokens, num_lanes = len(store.tokens), self._job.batch_size
            refuse_no_lane(num_tokens, num_lanes, length, name)
            return {"num_samples": Lanes(0, num_tokens, num_lanes, length).num_samples}
        if not (is_labelled or data.pack or data.borders):
            refuse_no_window(len(store.tokens), length, name)
            return {"num_samples": num_windows(len(store.tokens), length, data.stride)}
        borders = border_table(self._tokenizer.backend, data.borders) if data.borders else None
        spans = cut_texts(
            store, length, long_texts=data.long_texts, stride=data.stride, borders=borders,
            with_end=not is_labelled, progress=self._progress,
        )  # fmt: skip
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
        from plimsoll.data.packing import pack

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
        from plimsoll.data.packing import PackedDataset, open_packs
        from plimsoll.data.texts import DocumentDataset, TokenLabels
        from plimsoll.data.windows import WindowDataset

        job, end_id = self._job, self._prepared.end_id
        if text.tokens_folder is None:
            return self._on_the_fly(text, is_training)
        store = open_tokens(Path(text.tokens_folder))
        if text.spans_folder is None:
            return WindowDataset(store, job.sequence_length, job.data.stride)
        spans = open_spans(store, Path(text.spans_folder))
        if text.packs_folder is not None:
            return PackedDataset(open_packs(spans, Path(text.packs_folder)), end_id)
        labels = _labels(text) if store.labels is None else TokenLabels(store, self._prepared.label_names)
        return DocumentDataset(spans, labels, end_id, augmentation=self._tokens(is_training))

    def streams(self) -> tuple[Samples, Samples | None]:
        """Map the lanes to train on and those held out."""
        from plimsoll.data.streams import StreamDataset

        train, other = self._prepared.train, self._prepared.validation
        lanes, other_lanes = _lanes_of(self._job, train, other)
        resets = self._job.data.reset is not None
        samples = StreamDataset(open_tokens(Path(str(train.tokens_folder))), lanes, resets)
        if other_lanes is None:
            return samples, None
        held_out = open_tokens(Path(str((other or train).tokens_folder)))
        return samples, StreamDataset(held_out, other_lanes, resets)

    def _on_the_fly(self, text: PreparedText, is_training: bool) -> Samples:
        from plimsoll.data.augment_text import TextAugmentation
        from plimsoll.data.on_the_fly import TextDataset

        job, augment = self._job, self._job.data.augment
        assert job.data.long_texts != "window", "the job was checked when it was read"
        corpus = open_index(Path(text.index_folder))
        return TextDataset(
            corpus.with_blocks() if job.data.order == "blocks" else corpus,
            Path(self._prepared.tokenizer_folder),
            _labels(text),
            job.sequence_length,
            self._prepared.end_id,
            long_texts=job.data.long_texts,
            words=TextAugmentation(augment, job.seed) if is_training and augment and augment.changes_text else None,
            tokens=self._tokens(is_training),
        )

    def _tokens(self, is_training: bool) -> TokenAugmentation | None:
        from plimsoll.data.augment import TokenAugmentation

        job, prepared, augment = self._job, self._prepared, self._job.data.augment
        if not is_training or augment is None or not augment.changes_tokens:
            return None
        return TokenAugmentation(augment, job.seed, prepared.special_ids, prepared.mask_id, job.sequence_length)


def _lanes_of(job: Job, train: PreparedText, held_out: PreparedText | None) -> tuple[Lanes, Lanes | None]:
    """Return the lanes to train on and those to evaluate on, which are of a text of their own or of a share."""
    num_lanes, length, share = job.batch_size, job.sequence_length, job.data.validation
    if held_out is not None:
        lanes = training_lanes(0, train.num_tokens, num_lanes, length)
        return lanes, Lanes(0, held_out.num_tokens, num_lanes, length)
    return lanes_of_stream(train.num_tokens, share if isinstance(share, float) else 0.0, num_lanes, length)


def reach_of(
    job: Job, train: PreparedText, held_out: PreparedText | None, segment_steps: int | None = None
) -> GradientReach:
    """Count how far back gradients of streams reach, also where windows are cut in segments that truncate them."""
    lanes, _ = _lanes_of(job, train, held_out)
    return lanes.reach(open_tokens(Path(str(train.tokens_folder))).ends if job.data.reset else None, segment_steps)


def _labels(text: PreparedText) -> NDArray[Any] | None:
    if text.labels_folder is None:
        return None
    folder = Path(text.labels_folder)
    kept_facts(folder, "labels")
    labels: NDArray[Any] = np.load(folder / _LABELS_FILE, mmap_mode="r")
    return labels


def _key(names: list[str], train: PreparedText, held_out: PreparedText | None, validation: str | float | None) -> str:
    """Hash what says the content of the stores, wherever the cache and the texts are."""
    parts = [[text.corpus_key, *(folder.name for folder in text.folders[1:])] for text in (train, held_out) if text]
    return hashlib.sha256(repr([names, parts, None if held_out else validation]).encode()).hexdigest()[:32]
