"""What a model must know of a job's texts, without reading them: for a prediction, which answers in seconds.

The size of the vocabulary is that of a tokenizer that exists, or the one asked for where it is still to be trained (too
little text gives a smaller one). Labels are the folders that hold a file, empty files included. The texts of language
modelling need not be on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from plimsoll.data.sources import find_files
from plimsoll.data.tokenizer import load_tokenizer
from plimsoll.records.job import Job


class TextSketch(NamedTuple):
    """``num_labels`` is ``None`` for language modelling."""

    vocab_size: int
    num_labels: int | None
    end_id: int


def sketch_texts(job: Job) -> TextSketch:
    """Look at the tokenizer and the names of the files, not into them.

    Raises:
        DataError: if the tokenizer cannot be loaded, or there are no files to take the labels from.
    """
    vocab_size, end_id = job.tokenizer.vocab_size, 0
    if job.tokenizer.path is not None:
        backend, end_token = load_tokenizer(Path(job.tokenizer.path))
        vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        end_id = backend.token_to_id(end_token) or 0
    if job.task != "classification":
        return TextSketch(vocab_size, None, end_id)
    sources = (job.data.train,) if isinstance(job.data.train, str) else job.data.train
    folders = {Path(file.path).parent.name for file in find_files(sources)}  # as `labels_from_folders` names them
    return TextSketch(vocab_size, max(len(folders), 2), end_id)
