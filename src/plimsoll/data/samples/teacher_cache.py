"""The teacher cache: a teacher's most likely tokens for each position, or its scores of labels, in files.

    with TeacherCacheFiles(folder, ends, num_kept, num_words) as files:  # resumes after an interruption
        files.write(words_BTk, log_p_BTk)
    samples = WithTeacher(samples, open_teacher_cache(folder))  # samples with the fields `WORDS` and `LOG_P`

A row of a file belongs to one position of a sample, or to a whole sample if samples are classified. Rows are in the
order of the data set. The files are memory-mapped, so neither writing nor reading takes private memory. The caller
chooses a folder name that identifies the content. Not handled: samples that change from epoch to epoch.

Shapes: B samples, T tokens, k tokens kept per position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.samples.windows import Samples, Subset
from plimsoll.files.checksums import checked, require_whole
from plimsoll.files.store import Facts, kept_facts, require_space
from plimsoll.records.base import write_atomically

WORDS, LOG_P = "teacher_words", "teacher_log_p"
"""Fields of a batch: the most likely tokens of each position, and the logarithms of their probabilities."""

_ENDS_FILE, _WORDS_FILE, _LOG_P_FILE, _DONE_FILE = "ends.npy", "words.bin", "log_p.bin", "done.json"
_SAMPLES_PER_PASS = 1 << 20


class TeacherRows(NamedTuple):
    """The teacher's rows of all samples. The rows of sample n end at ``ends[n]``.

    ``words`` holds the ids of the kept tokens or labels of each row, or ``None`` if all labels are kept.
    ``log_p`` holds their log-probabilities.
    """

    ends: NDArray[np.int64]
    words: NDArray[Any] | None
    log_p: NDArray[np.float32]

    def span(self, number: int) -> slice:
        """Return the range of the rows of a sample."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))


def ends_of(samples: Samples | Subset, is_by_token: bool) -> NDArray[np.int64]:
    """Return, for each sample, the index after its last row in the files.

    A sample has one row per token if ``is_by_token``, else one row.
    """
    if not is_by_token:
        return np.arange(1, len(samples) + 1)
    return np.cumsum(np.concatenate(list(_lengths(samples))), dtype=np.int64)


def _lengths(samples: Samples | Subset) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, len(samples), _SAMPLES_PER_PASS):
        yield samples.lengths(np.arange(begin, min(begin + _SAMPLES_PER_PASS, len(samples))))


class TeacherCacheFiles:
    """A writer of rows in the order of the samples. ``num_done`` samples are already on disk.

    Args:
        folder: the folder of the files. If an interrupted writer left samples there, writing continues after them.
        ends: the end of the rows of each sample (`ends_of`).
        num_kept: the number of tokens or labels kept per row, k.
        num_words: the size of the vocabulary; ``None`` if all labels are kept, in their order.

    Raises:
        OutputError: if there is not enough disk space for all rows.
    """

    def __init__(self, folder: Path, ends: NDArray[np.int64], num_kept: int, num_words: int | None) -> None:
        self._folder, self._num_kept, self._num_words = folder, num_kept, num_words
        shape = int(ends[-1]), num_kept
        dtypes = {_LOG_P_FILE: np.dtype(np.float32)}
        if num_words is not None:
            dtypes[_WORDS_FILE] = _word_type(num_words)
        is_new = not (folder / _DONE_FILE).is_file()
        if is_new:
            require_space(folder, sum(dtype.itemsize for dtype in dtypes.values()) * shape[0] * shape[1])
            np.save(folder / _ENDS_FILE, ends)
        mode: Any = "w+" if is_new else "r+"
        files = {name: np.memmap(folder / name, dtype, mode, shape=shape) for name, dtype in dtypes.items()}
        self.rows = TeacherRows(ends, files.get(_WORDS_FILE), files[_LOG_P_FILE])
        self.num_done = 0 if is_new else int(json.loads((folder / _DONE_FILE).read_bytes()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep()

    def write(self, words_BTk: torch.Tensor | None, log_p_BTk: torch.Tensor) -> None:
        """Write the teacher's rows of the next samples. Rows beyond the end of a sample are ignored."""
        for number, log_p in enumerate(log_p_BTk):
            span = self.rows.span(self.num_done + number)
            num_rows = span.stop - span.start
            self.rows.log_p[span] = log_p[:num_rows].numpy()
            if self.rows.words is not None and words_BTk is not None:
                self.rows.words[span] = words_BTk[number, :num_rows].numpy()
        self.num_done += len(log_p_BTk)

    def keep(self) -> None:
        """Flush everything written so far to disk, so that another writer can continue from it."""
        self.rows.log_p.flush()  # type: ignore[attr-defined]
        if self.rows.words is not None:
            self.rows.words.flush()  # type: ignore[attr-defined]
        write_atomically(self._folder / _DONE_FILE, json.dumps(self.num_done).encode(), "cache folder")

    def facts(self) -> Facts:
        """Return the metadata to store with the complete files."""
        return {"num_kept": self._num_kept, "num_words": self._num_words}


def _word_type(num_words: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if num_words <= 1 << 16 else np.int32)


def open_teacher_cache(folder: Path) -> TeacherRows:
    """Open the memory-mapped rows that `TeacherCacheFiles` wrote.

    Raises:
        DataError: if the rows are missing or damaged.
    """
    facts = kept_facts(folder, "words of the teacher")
    require_whole(folder / _ENDS_FILE)
    ends = np.load(folder / _ENDS_FILE, mmap_mode="r")
    shape, words = (int(ends[-1]), facts["num_kept"]), None
    if facts["num_words"] is not None:
        words = checked(folder / _WORDS_FILE, _word_type(facts["num_words"]), shape)
    return TeacherRows(ends, words, checked(folder / _LOG_P_FILE, np.float32, shape))


class WithTeacher:
    """A `Dataset` of samples with the teacher's tokens and probabilities.

    Values at padded positions must be ignored.
    """

    def __init__(self, samples: Samples | Subset, rows: TeacherRows) -> None:
        self._samples, self._rows = samples, rows
        self.reads_fast, self.pad_multiple = samples.reads_fast, samples.pad_multiple
        self.sequence_length, self.block_samples = samples.sequence_length, samples.block_samples

    @property
    def num_truncated(self) -> int:
        """The number of samples that were truncated when they were read."""
        return self._samples.num_truncated

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the samples, without the teacher's rows; ``None`` if the samples have no fingerprint."""
        return getattr(self._samples, "fingerprint", None)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample."""
        return self._samples.lengths(ids)

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return the samples ``ids`` with the fields `WORDS` and `LOG_P`, both (B, T, k).

        With one label per sample they are (B, k). `WORDS` is missing if all labels are kept.
        """
        fields = self._samples.batch(ids, epoch)
        is_by_sample = fields["labels"].dim() == 1
        width = 1 if is_by_sample else fields["input_ids"].shape[1]
        log_p = self._gathered(self._rows.log_p, ids, width, np.float32)
        fields[LOG_P] = log_p[:, 0] if is_by_sample else log_p
        if self._rows.words is not None:
            fields[WORDS] = self._gathered(self._rows.words, ids, width, np.int32)
        return fields

    def _gathered(self, rows: NDArray[Any], ids: NDArray[np.int64], width: int, dtype: type) -> torch.Tensor:
        found: NDArray[Any] = np.zeros((len(ids), width, rows.shape[1]), dtype)
        for place, number in enumerate(ids):
            own = rows[self._rows.span(int(number))]
            found[place, : len(own)] = own
        return torch.from_numpy(found)
