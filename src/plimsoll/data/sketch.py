"""What a model must know of a job's texts, without reading all of them: for a prediction, which answers in seconds.

The size of the vocabulary is that of a tokenizer that exists, or the one asked for where it is still to be trained (too
little text gives a smaller one). Labels are the folders that hold a file, empty files included; or those in a column of
the first MiB of up to 16 files, so that a rare class beyond is missed (what must be converted, is, into a folder that
is removed). The texts of language modelling need not be on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from plimsoll.addresses import file_name, head, is_remote
from plimsoll.data.convert import is_converted
from plimsoll.data.formats import Reading
from plimsoll.data.given_tokenizer import load_tokenizer
from plimsoll.data.index import open_corpus
from plimsoll.data.of_job import padding_of, reading_of
from plimsoll.data.sources import SourceFile, find_files
from plimsoll.records.job import HUB_PREFIX, Job

_HEAD_BYTES, _MOST_HEADS = 1 << 20, 16
_CUT_ANYWHERE = (".jsonl", ".ndjson", ".csv", ".tsv")  # the begin of such a file is one, but for its last row


class TextSketch(NamedTuple):
    """``num_labels`` is ``None`` for language modelling."""

    vocab_size: int
    num_labels: int | None
    end_id: int
    pad_id: int = 0


def sketch_texts(job: Job) -> TextSketch:
    """Look at the tokenizer and the names of the files, and into them for labels that are in a column.

    Raises:
        DataError: if the tokenizer cannot be loaded, or there are no files to take the labels from.
    """
    vocab_size, end_id, own_pad_id = job.tokenizer.vocab_size, 0, 0
    if job.tokenizer.path is not None:
        loaded = load_tokenizer(Path(job.tokenizer.path))
        vocab_size = 1 + max(loaded.backend.get_vocab(with_added_tokens=True).values())
        end_id = loaded.backend.token_to_id(loaded.end_token) or 0
        own_pad_id = end_id if loaded.pad_token is None else loaded.backend.token_to_id(loaded.pad_token) or 0
    pad_id = padding_of(job.model, own_pad_id)
    if not job.is_labelled:
        return TextSketch(vocab_size, None, end_id, pad_id)
    if job.data.label is not None or job.task == "token-classification":
        num_labels = len(_labels_of_heads(job))
    else:  # as `labels_from_folders` names them
        num_labels = len({Path(file.path).parent.name for file in find_files(job.data.sources)})
    return TextSketch(vocab_size, max(num_labels, 2), end_id, pad_id)


def _labels_of_heads(job: Job) -> Sequence[str]:
    """Return the classes in the column of labels, or the tags of words, as far as the heads of the files show them."""
    reading = replace(reading_of(job), on_error="skip")
    with TemporaryDirectory(prefix="plimsoll-") as name:
        folder = Path(name)
        heads: list[str] = []
        for given in job.data.sources:
            files = find_files((given,)) if _is_cut_anywhere(given, reading) else []
            for file in files[:: -(-len(files) // _MOST_HEADS) or 1]:
                begin = folder / str(len(heads)) / file_name(file.path)
                begin.parent.mkdir()
                begin.write_bytes(_head_of(file))
                heads.append(str(begin))
            if not files:
                heads.append(given)
        corpus = open_corpus(heads, reading, folder / "cache")
        return tuple(corpus.tag_counts) if reading.is_tagged else corpus.label_names


def _head_of(file: SourceFile) -> bytes:
    if is_remote(file.path):
        return head(file.path, min(_HEAD_BYTES, file.num_bytes))
    with open(file.path, "rb") as whole:
        return whole.read(_HEAD_BYTES)


def _is_cut_anywhere(given: str, reading: Reading) -> bool:
    """Return whether the begin of each of these files is such a file too; a folder may hold any."""
    name = file_name(given)
    if reading.is_tagged:  # what is no table has a line for each word, whatever its name is
        return Path(name).suffix != "" and not given.startswith(HUB_PREFIX) and not is_converted(name)
    return Path(name).suffix.lower() in _CUT_ANYWHERE
