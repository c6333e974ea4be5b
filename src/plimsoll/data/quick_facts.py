"""The facts about a job's texts that a model and its batches depend on, from prepared data or from a quick sketch.

`texts_of` reads prepared data, so that a plan is exact for the training run. `sketch_texts` takes seconds and serves
predictions before data are prepared.

The sketch has the vocabulary size of an existing tokenizer. A tokenizer that must still be trained is trained, if the
texts are on this machine and have at most 1 MiB. Otherwise the requested size is assumed, although repetitive text
gives a smaller one. Labels are the folders that hold a file, including empty files. If labels are in a column, the
first MiB of up to 16 files per source is read, so a rare class may be missed. Files that need a conversion are
converted into a temporary folder. Texts for language modelling that are not on this machine are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from plimsoll.data.formats import Reading
from plimsoll.data.pipeline import TEXTS, TOKENIZER, Pipeline, reading_of
from plimsoll.data.text.convert import is_converted
from plimsoll.data.text.index import open_corpus
from plimsoll.data.text.sources import SourceFile, find_files
from plimsoll.data.tokens import byte_pairs
from plimsoll.data.tokens.given_tokenizer import load_tokenizer
from plimsoll.data.tokens.tokenizer import FEW_BYTES, padding_of
from plimsoll.errors import DataError
from plimsoll.files.addresses import file_name, head, is_remote
from plimsoll.records.job import HUB_PREFIX, Job
from plimsoll.records.prepared import Prepared

_HEAD_BYTES, _MOST_HEADS = 1 << 20, 16
_CUT_ANYWHERE = (".jsonl", ".ndjson", ".csv", ".tsv")  # the head of such a file is valid, except for its last row


class TextSketch(NamedTuple):
    """The known facts about the texts of a job.

    Attributes:
        vocab_size: the number of tokens of the tokenizer.
        num_labels: the number of classes or tags; ``None`` for language modelling.
        end_id: the id of the token that ends a text.
        pad_id: the id of the padding token.
        longest: the number of tokens of the longest row of a training batch; ``None`` if it is unknown (at most
            ``sequence_length``).
        held_out: the number of rows of the largest validation batch, and of tokens in its longest row; ``None`` if
            there is no validation batch, or its size is unknown.
        tokenizer_bytes: the maximum memory of tokenizer training in bytes; ``None`` if no tokenizer is trained, or
            its training needs negligible memory.
        guessed: ``vocabulary`` or ``labels``, if they may differ when all texts are read.
    """

    vocab_size: int
    num_labels: int | None
    end_id: int
    pad_id: int = 0
    longest: int | None = None
    held_out: tuple[int, int] | None = None
    tokenizer_bytes: int | None = None
    guessed: frozenset[str] = frozenset()

    @property
    def of_model(self) -> tuple[int, int | None, int, int]:
        """The arguments for building a model: ``vocab_size``, ``num_labels``, ``end_id`` and ``pad_id``."""
        return self.vocab_size, self.num_labels, self.end_id, self.pad_id


def texts_of(prepared: Prepared) -> TextSketch:
    """Return the facts about prepared texts. All of them are exact: `TextSketch.guessed` is empty."""
    sizes = prepared.vocab_size, prepared.num_labels, prepared.end_id, prepared.pad_id
    return TextSketch(*sizes, longest=prepared.longest_row, held_out=prepared.held_out_batch)


def sketch_texts(job: Job) -> TextSketch:
    """Return the facts that the tokenizer, the file names and, for labels in a column, the heads of files show.

    Raises:
        DataError: if the tokenizer cannot be loaded, or labels are needed but no files are found.
    """
    vocab_size, end_id, own_pad_id = job.tokenizer.vocab_size, 0, 0
    tokenizer_bytes, guessed = None, frozenset[str]()
    if job.tokenizer.path is None:
        trained = _trained_vocab_size(job)
        vocab_size, guessed = trained.vocab_size, frozenset({"vocabulary"} if trained.is_guess else ())
        tokenizer_bytes = trained.most_bytes if job.tokenizer.train == "bpe" else None
    if job.tokenizer.path is not None:
        loaded = load_tokenizer(Path(job.tokenizer.path))
        vocab_size = 1 + max(loaded.backend.get_vocab(with_added_tokens=True).values())
        end_id = loaded.backend.token_to_id(loaded.end_token) or 0
        own_pad_id = end_id if loaded.pad_token is None else loaded.backend.token_to_id(loaded.pad_token) or 0
    pad_id = padding_of(job.model, own_pad_id)
    if not job.is_labelled:
        return TextSketch(vocab_size, None, end_id, pad_id, tokenizer_bytes=tokenizer_bytes, guessed=guessed)
    if job.data.label is not None or job.task == "token-classification":
        guessed |= {"labels"}
    num_labels = max(labels_seen(job), 2)
    return TextSketch(vocab_size, num_labels, end_id, pad_id, tokenizer_bytes=tokenizer_bytes, guessed=guessed)


def labels_seen(job: Job, *, by_heads: bool = False) -> int:
    """Count the labels of the texts of a job, as far as file names or the heads of files show them.

    Args:
        job: the job.
        by_heads: whether to skip files that must be read as a whole, such as a JSON array or an archive.

    Raises:
        DataError: if no files are found, or their heads cannot be read with the settings of the job.
    """
    if not job.is_labelled:
        return 0
    if job.data.label is not None or job.task == "token-classification":
        return len(_labels_of_heads(job, by_heads))
    # the same names as in `labels_from_folders`
    return len({Path(file.path).parent.name for file in _found(job.data.sources, reading_of(job))})


def require_files(job: Job) -> None:
    """Check that each data source of a job on this machine has at least one file.

    Raises:
        DataError: if a source has no file.
    """
    validation = job.data.validation
    for sources in (job.data.sources, (validation,) if isinstance(validation, str) else ()):
        _found(tuple(source for source in sources if not _is_elsewhere(source)), reading_of(job))


class _Trained(NamedTuple):
    """The vocabulary size of a tokenizer to be trained, whether it is a guess, and the maximum memory of training."""

    vocab_size: int
    is_guess: bool
    most_bytes: int


def _trained_vocab_size(job: Job) -> _Trained:
    asked, sources = job.tokenizer.vocab_size, job.data.sources
    most_distinct_bytes = byte_pairs.most_distinct_bytes(asked)
    guess = _Trained(asked, True, byte_pairs.whole_bytes(most_distinct_bytes))
    if any(map(_is_elsewhere, sources)):
        return guess
    with suppress(DataError), TemporaryDirectory(prefix="plimsoll-") as name:  # preparation reports the error
        if sum(file.num_bytes for file in _found(sources, reading_of(job))) <= FEW_BYTES:
            pipeline = Pipeline(job, Path(name))
            most_bytes = byte_pairs.whole_bytes(min(pipeline.run(TEXTS).num_bytes, most_distinct_bytes))
            return _Trained(pipeline.run(TOKENIZER).vocab_size, False, most_bytes)
    return guess


def _is_elsewhere(source: str) -> bool:
    return is_remote(source) or source.startswith(HUB_PREFIX)


def _labels_of_heads(job: Job, by_heads: bool) -> Sequence[str]:
    """Return the classes in the label column, or the tags of words, in the heads of the files."""
    reading = replace(reading_of(job), on_error="skip")
    with TemporaryDirectory(prefix="plimsoll-") as name:
        folder = Path(name)
        heads: list[str] = []
        for given in job.data.sources:
            files = _found((given,), reading) if _is_cut_anywhere(given, reading) else []
            for file in files[:: -(-len(files) // _MOST_HEADS) or 1]:
                begin = folder / str(len(heads)) / file_name(file.path)
                begin.parent.mkdir()
                begin.write_bytes(_head_of(file))
                heads.append(str(begin))
            if not files and not by_heads:
                heads.append(given)
        if not heads:
            return ()
        corpus = open_corpus(heads, reading, folder / "cache")
        return tuple(corpus.tag_counts) if reading.is_tagged else corpus.label_names


def _found(sources: tuple[str, ...], reading: Reading) -> list[SourceFile]:
    return find_files(sources, skips=reading.on_error == "skip").files


def _head_of(file: SourceFile) -> bytes:
    if is_remote(file.path):
        return head(file.path, min(_HEAD_BYTES, file.num_bytes))
    with open(file.path, "rb") as whole:
        return whole.read(_HEAD_BYTES)


def _is_cut_anywhere(given: str, reading: Reading) -> bool:
    """Return whether the first bytes of each file of a source can be read alone. ``False`` for a folder."""
    name = file_name(given)
    if reading.is_tagged:  # any file that is not a table has one line per word
        return Path(name).suffix != "" and not given.startswith(HUB_PREFIX) and not is_converted(name)
    return Path(name).suffix.lower() in _CUT_ANYWHERE
