"""The teacher cache: written in the order of the samples, also after an interruption, and read with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.data.samples.teacher_cache import (
    LOG_P,
    WORDS,
    TeacherCacheFiles,
    WithTeacher,
    ends_of,
    open_teacher_cache,
)
from plimsoll.errors import DataError, OutputError
from plimsoll.files.checksums import Checked
from plimsoll.files.store import stored

LENGTHS = np.array([3, 1, 4])


class Samples:
    """Three samples of unequal length, with teacher outputs per token or per sample."""

    reads_fast, pad_multiple, sequence_length, block_samples, num_truncated = True, 1, 4, 2, 0

    def __init__(self, is_by_sample: bool = False) -> None:
        self._is_by_sample = is_by_sample

    def __len__(self) -> int:
        return len(LENGTHS)

    def lengths(self, ids):
        return LENGTHS[ids]

    def batch(self, ids, epoch=0):
        width = int(LENGTHS[ids].max())
        labels = torch.zeros((len(ids),) if self._is_by_sample else (len(ids), width), dtype=torch.long)
        return {"input_ids": torch.zeros((len(ids), width), dtype=torch.long), "labels": labels}


def said(first: int, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the teacher's words and scores: for sample n, token t and place k, 100 n + 10 t + k and its negative."""
    sample, token, place = torch.meshgrid(
        torch.arange(first, first + num_samples), torch.arange(4), torch.arange(2), indexing="ij"
    )
    words = (100 * sample + 10 * token + place).int()
    return words, -words.float()


def write(folder: Path, *parts: int) -> Path:
    ends = ends_of(Samples(), is_by_token=True)

    def fill(place: Path) -> dict[str, object]:
        for num_samples in parts:
            with TeacherCacheFiles(place, ends, 2, 1000) as files:
                files.write(*said(files.num_done, num_samples))
        return files.facts()

    stored(folder, fill, goes_on=True)
    return folder


@pytest.mark.parametrize("parts", [(3,), (1, 2), (2, 1)])
def test_samples_have_what_was_said_of_them_in_any_order(tmp_path, parts):
    """Samples in any order have the teacher's outputs, also if the writer was interrupted between two samples."""
    with_teacher = WithTeacher(Samples(), open_teacher_cache(write(tmp_path / "teacher", *parts)))
    batch = with_teacher.batch(np.array([2, 1]))
    assert batch[WORDS].dtype == torch.int32
    assert torch.equal(batch[WORDS][0], said(2, 1)[0][0])
    assert torch.equal(batch[WORDS][1, :1], said(1, 1)[0][0, :1])
    assert not batch[WORDS][1, 1:].any()  # padding
    assert torch.equal(batch[LOG_P], -batch[WORDS].float())
    assert (len(with_teacher), with_teacher.lengths(np.array([0])).tolist(), with_teacher.sequence_length) == (
        3,
        [3],
        4,
    )
    assert with_teacher.batch(np.array([0, 1]))[WORDS].shape == (2, 3, 2)


def test_files_take_no_private_memory(tmp_path):
    rows = open_teacher_cache(write(tmp_path / "teacher", 3))
    assert isinstance(rows.words, Checked)  # like every mapped file of a store
    assert isinstance(rows.log_p, Checked)
    assert isinstance(rows.words.base, np.memmap)
    assert isinstance(rows.log_p.base, np.memmap)
    assert (rows.words.dtype, rows.words.base.mode) == (np.uint16, "r")


def test_samples_that_are_judged_as_a_whole_have_a_row_each(tmp_path):
    samples = Samples(is_by_sample=True)
    ends = ends_of(samples, is_by_token=False)

    def fill(place: Path) -> dict[str, object]:
        with TeacherCacheFiles(place, ends, 2, None) as files:
            files.write(None, torch.arange(6).view(3, 1, 2).float())
        return files.facts()

    stored(tmp_path / "teacher", fill, goes_on=True)
    batch = WithTeacher(samples, open_teacher_cache(tmp_path / "teacher")).batch(np.array([2, 0]))
    assert batch[LOG_P].tolist() == [[4, 5], [0, 1]]
    assert WORDS not in batch


def test_many_words_have_larger_numbers(tmp_path):
    ends = np.array([4])
    with TeacherCacheFiles(tmp_path, ends, 1, 1 << 17) as files:
        files.write(torch.full((1, 4, 1), 100_000, dtype=torch.int32), torch.zeros(1, 4, 1))
    assert files.rows.words is not None
    assert files.rows.words.tolist() == [[100_000]] * 4


def test_what_is_gone_is_said(tmp_path):
    with pytest.raises(DataError, match="the words of the teacher .* are missing"):
        open_teacher_cache(tmp_path / "teacher")


def test_a_disk_without_room_is_said_before(tmp_path):
    with pytest.raises(OutputError, match="the cache needs about"):
        TeacherCacheFiles(tmp_path, np.array([1 << 50]), 64, 1000)
    assert not (tmp_path / "log_p.bin").exists()
