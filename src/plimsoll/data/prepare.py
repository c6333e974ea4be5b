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

from plimsoll.data.index import Corpus, Progress, open_corpus, silent
from plimsoll.data.labels import labels_from_folders
from plimsoll.data.store import Facts, read_facts, stored
from plimsoll.data.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.data.tokens import open_tokens, tokenize
from plimsoll.errors import DataError
from plimsoll.records.base import Frozen, Record
from plimsoll.records.job import Job

if TYPE_CHECKING:  # it imports torch, which preparing does not need
    from plimsoll.data.windows import Dataset

_LABELS_FILE = "labels.npy"
_MOST_SKIPPED_SHOWN = 100


class PreparedText(Frozen):
    """Texts that are tokenized. ``skipped`` names the first 100 files that were left out, with the reason."""

    tokens_folder: str
    labels_folder: str | None = None
    num_documents: int
    num_bytes: int
    num_tokens: int
    num_skipped: int
    skipped: tuple[str, ...]


class Prepared(Record):
    """The data of a job, ready to be opened; ``key`` changes when a sample, a label or the tokenizer does."""

    record_kind: ClassVar[str] = "prepared-data"

    key: str
    train: PreparedText
    validation: PreparedText | None = None
    tokenizer_folder: str
    vocab_size: int
    end_id: int
    label_names: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int | None:
        """How many classes there are; ``None`` for language modelling."""
        return len(self.label_names) or None


def prepare(job: Job, cache: Path, progress: Progress = silent) -> Prepared:
    """Index the texts of a job, make its tokenizer, and tokenize; what the cache holds already is not done again.

    Args:
        job: its data, task and tokenizer are read.
        cache: where everything is written, and nothing elsewhere; made if missing.
        progress: called as ``progress(stage, done, total)`` in bytes, stage being index, tokenizer or tokens.

    Raises:
        DataError: if the texts, their labels or the tokenizer cannot be used.
        OutputError: if the cache cannot be written.
    """
    cache = cache.absolute()
    sources = (job.data.train,) if isinstance(job.data.train, str) else job.data.train
    corpus = open_corpus(sources, job.data.unit, cache, progress)
    tokenizer = prepare_tokenizer(job.tokenizer, corpus, cache, progress)
    names: tuple[str, ...] = ()
    labels = held_out = None
    if job.task == "classification":
        names, labels = labels_from_folders(corpus)
    train = _prepared_text(corpus, labels, tokenizer, cache, progress)
    if isinstance(job.data.validation, str):
        other = open_corpus((job.data.validation,), job.data.unit, cache, progress)
        other_labels = labels_from_folders(other, names)[1] if names else None
        held_out = _prepared_text(other, other_labels, tokenizer, cache, progress)
    return Prepared(
        key=_key(names, train, held_out, job.data.validation),
        train=train,
        validation=held_out,
        tokenizer_folder=str(tokenizer.folder),
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        label_names=names,
    )


def is_whole(prepared: Prepared) -> bool:
    """Whether the cache still holds all of it."""
    texts = [text for text in (prepared.train, prepared.validation) if text is not None]
    folders = [folder for text in texts for folder in (text.tokens_folder, text.labels_folder) if folder is not None]
    return all(read_facts(Path(folder)) is not None for folder in (prepared.tokenizer_folder, *folders))


def prepare_again(job: Job, known: Prepared, cache: Path, progress: Progress = silent) -> Prepared:
    """Prepare what the cache no longer holds, to the same tokens as before.

    Raises:
        DataError: if the texts or the tokenizer are gone, or are no longer what they were.
        OutputError: if the cache cannot be written.
    """
    lost = f"the tokens of this run (in {Path(known.train.tokens_folder).parent}) cannot be made again"
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


def open_datasets(prepared: Prepared, job: Job) -> tuple[Dataset, Dataset | None]:
    """Map the training samples and the validation samples, if the job has any.

    Raises:
        DataError: if the cache no longer holds the data, or it is too short for the job's ``sequence_length``.
    """
    from plimsoll.data.windows import Subset, split

    samples = _open(prepared.train, prepared, job)
    if prepared.validation is not None:
        return samples, _open(prepared.validation, prepared, job)
    if not isinstance(job.data.validation, float) or job.data.validation == 0:
        return samples, None
    train_ids, validation_ids = split(len(samples), job.data.validation, job.seed)
    return Subset(samples, train_ids), Subset(samples, validation_ids)


def _prepared_text(
    corpus: Corpus, labels: NDArray[Any] | None, tokenizer: Tokenizer, cache: Path, progress: Progress
) -> PreparedText:
    store = tokenize(corpus, tokenizer, cache, progress)
    return PreparedText(
        tokens_folder=str(store.folder),
        labels_folder=None if labels is None else str(_store_labels(labels, cache)),
        num_documents=len(corpus),
        num_bytes=corpus.num_bytes,
        num_tokens=len(store.tokens),
        num_skipped=len(corpus.skipped),
        skipped=corpus.skipped[:_MOST_SKIPPED_SHOWN],
    )


def _store_labels(labels: NDArray[Any], cache: Path) -> Path:
    def write(folder: Path) -> Facts:
        np.save(folder / _LABELS_FILE, labels)
        return {}

    folder = cache / f"labels-{hashlib.sha256(labels.data).hexdigest()[:16]}"
    stored(folder, write)
    return folder


def _open(text: PreparedText, prepared: Prepared, job: Job) -> Dataset:
    from plimsoll.data.windows import DocumentDataset, WindowDataset

    store = open_tokens(Path(text.tokens_folder))
    if text.labels_folder is None:
        return WindowDataset(store, job.sequence_length)
    folder = Path(text.labels_folder)
    if read_facts(folder) is None:
        raise DataError(f"the labels {folder} are gone from the cache, or torn: prepare them again, as --resume does")
    labels = np.load(folder / _LABELS_FILE, mmap_mode="r")
    return DocumentDataset(store, labels, job.sequence_length, prepared.end_id)


def _key(
    names: tuple[str, ...], train: PreparedText, held_out: PreparedText | None, validation: str | float | None
) -> str:
    """Hash the names of the stores, which say their content, wherever the cache and the texts are."""
    folders = [folder for text in (train, held_out) if text for folder in (text.tokens_folder, text.labels_folder)]
    parts = [names, [folder and Path(folder).name for folder in folders], None if held_out else validation]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
