"""Fingerprints that distinguish data sets of equal length, computed only if reading them has no side effect."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from plimsoll.data.formats import Reading
from plimsoll.data.samples.fingerprint import mark_of
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.samples.texts import DocumentDataset
from plimsoll.data.samples.windows import Subset, WindowDataset, split
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import tokenize
from plimsoll.data.tokens.tokenizer import prepare_tokenizer
from plimsoll.records.job import TokenizerSource


class Named:
    fingerprint = "abc"

    def __len__(self) -> int:
        return 3


class Drawn(Named):
    fingerprint = None

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        raise AssertionError("it may draw what it gives, and is not to be read")


class Batched(Drawn):
    def __init__(self, first: int) -> None:
        self.first = first

    def batch(self, ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(ids + self.first), "half": torch.zeros(len(ids), dtype=torch.bfloat16)}


@pytest.mark.parametrize("make", [Batched, lambda first: TensorDataset(torch.arange(first, first + 9))])
def test_content_is_told_by_some_samples(make):
    assert mark_of(make(1), 0) == mark_of(make(1), 0) != mark_of(make(2), 0)


class Changed(Batched):
    """A thousand samples, some of which are changed."""

    def __init__(self, changed: range = range(0), width: int = 8) -> None:
        self._changed, self._width, self.num_read = np.array(changed, np.int64), width, 0

    def __len__(self) -> int:
        return 1000

    def batch(self, ids: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        self.num_read += len(ids)
        values = ids + 5000 * np.isin(ids, self._changed)
        return {"x": torch.from_numpy(np.repeat(values[:, None], self._width, 1))}


@pytest.mark.parametrize("changed", [range(300, 400), range(1), range(501, 502), range(999, 1000), range(250, 500)])
def test_any_change_of_few_and_small_samples_is_noticed(changed: range):
    assert mark_of(Changed(), 0) != mark_of(Changed(changed), 0)


def test_of_many_or_large_samples_some_from_all_over_are_looked_at():
    large = Changed(width=1 << 16)  # 512 KiB per sample
    mark_of(large, 0)
    assert large.num_read == 32
    assert mark_of(Changed(width=1 << 16), 0) != mark_of(Changed(range(400, 800), 1 << 16), 0)
    many = TensorDataset(torch.zeros(100_000))
    assert mark_of(many, 0) == mark_of(TensorDataset(torch.zeros(100_000)), 0)
    for first in range(0, 100_000, 9973):  # a hundred neighbouring samples at any position
        changed = torch.zeros(100_000)
        changed[first : first + 100] = 1
        assert mark_of(TensorDataset(changed), 0) != mark_of(many, 0)


def test_samples_of_a_store_are_told_by_its_name_and_not_read(tmp_path: Path):
    def samples(length: int, label: int) -> DocumentDataset:
        return DocumentDataset(cut_texts(store, length), np.array([0, label], np.uint8), 0, 8)

    path = tmp_path / "a.txt"
    path.write_text("one two three four\nfive six seven eight\n")
    corpus = open_corpus([path], Reading("line"), tmp_path / "cache")
    tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=300), corpus, tmp_path / "cache")
    store = tokenize(corpus, tokenizer, tmp_path / "cache")
    marks = [mark_of(samples(*asked), 4) for asked in ((16, 0), (16, 1), (8, 0))]
    marks += [mark_of(WindowDataset(store, length), 4) for length in (4, 5)]
    windows = WindowDataset(store, 4)
    marks += [mark_of(Subset(windows, chosen), 4) for chosen in split(len(windows), 0.5, 1)]
    marks += [mark_of(Subset(windows, np.array(chosen)), 4) for chosen in ([0, 1], [0, 2])]
    assert None not in marks
    assert len(set(marks)) == len(marks)
    assert mark_of(samples(16, 1), 0) == marks[1]


def test_a_name_of_its_own_is_taken_and_what_may_not_be_read_is_not():
    assert mark_of(Named(), 2) is not None
    assert mark_of(Drawn(), 0) is None
    assert mark_of(Batched(1), 2) is None
