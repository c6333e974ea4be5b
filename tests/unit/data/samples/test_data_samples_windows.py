"""Samples cut from tokens, with every number by hand; splits have no token in common."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.samples.windows import IGNORED_LABEL, Subset, WindowDataset, split
from plimsoll.errors import DataError
from token_stores import store_of


def test_windows_cut_the_texts_laid_end_to_end(tmp_path: Path):
    dataset = WindowDataset(store_of(tmp_path, [[1, 2, 3, 4], [5], [6, 7, 8]]), 3)  # as tokens: 1 2 3 4 0 5 0 6 7 8 0
    assert (len(dataset), dataset.num_dropped_tokens) == (3, 2)
    assert [dataset[number]["input_ids"].tolist() for number in range(3)] == [[1, 2, 3], [4, 0, 5], [0, 6, 7]]
    batch = dataset.batch(np.array([2, 0]))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[0, 6, 7], [1, 2, 3]]
    assert batch["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[3]


def test_windows_may_be_written_to_without_touching_the_store(tmp_path: Path):
    store = store_of(tmp_path, [[1, 2, 3]])
    WindowDataset(store, 2).batch(np.array([0]))["input_ids"].zero_()
    assert store.tokens.tolist() == [1, 2, 3, 0]


def test_text_shorter_than_a_window_is_refused_in_numbers(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"has 4 tokens, but one sample is sequence_length = 5: .*--set sequence_length=2"
    ):
        WindowDataset(store_of(tmp_path, [[1, 2, 3]]), 5)


@given(num_tokens=st.integers(1, 60), length=st.integers(2, 9), data=st.data())
def test_overlapping_windows_predict_each_token_once(num_tokens: int, length: int, data: st.DataObject):
    stride = data.draw(st.integers(1, length - 1))
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(Path(folder), [list(range(1, num_tokens + length))])  # each token equals its position
        dataset = WindowDataset(store, length, stride)
        batch = dataset.batch(np.arange(len(dataset)))
    inputs, labels = batch["input_ids"], batch["labels"]
    assert ((labels == inputs) | (labels == IGNORED_LABEL)).all()
    predicted = labels[:, 1:]  # the model shifts them
    predicted = predicted[predicted != IGNORED_LABEL].tolist()
    in_windows = store.tokens[: len(store.tokens) - dataset.num_dropped_tokens].tolist()
    assert predicted == in_windows[1:]
    assert 0 <= dataset.num_dropped_tokens < stride
    assert (inputs[1:, 0] - inputs[:-1, 0] == stride).all()


def test_no_overlap_is_the_default(tmp_path: Path):
    store = store_of(tmp_path, [list(range(1, 30))])
    plain, strided = WindowDataset(store, 7), WindowDataset(store, 7, 7)
    ids = np.arange(len(plain))
    assert torch.equal(plain.batch(ids)["labels"], strided.batch(ids)["labels"])
    assert (strided.lengths(ids) == 7).all()


@pytest.mark.parametrize("stride", [0, -1, 8])
def test_a_stride_that_would_lose_tokens_is_refused(tmp_path: Path, stride: int):
    with pytest.raises(DataError, match=f"stride = {stride} would lose tokens.*: give from 1 to sequence_length = 7"):
        WindowDataset(store_of(tmp_path, [list(range(1, 30))]), 7, stride)


def test_windows_are_an_ordinary_dataset(tmp_path: Path):
    dataset = WindowDataset(store_of(tmp_path, [list(range(1, 100))]), 10, 8)
    assert len(pickle.dumps(dataset)) < 1000
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[3]["labels"], dataset[3]["labels"])
    assert dataset.collate(dataset.__getitems__([2, -1]))["labels"].tolist() == (
        dataset.batch(np.array([2, len(dataset) - 1]))["labels"].tolist()
    )
    subset = Subset(dataset, np.array([5, 1, 3, 4]))
    loader = torch.utils.data.DataLoader(subset, 3, shuffle=True, collate_fn=subset.collate, num_workers=2)
    begins = [begin for batch in loader for begin in batch["input_ids"][:, 0].tolist()]
    assert sorted(begins) == [9, 25, 33, 41]


@pytest.mark.parametrize(
    ("num_samples", "share", "num_held_out"), [(100, 0.1, 10), (10, 0.01, 1), (2, 0.99, 1), (7, 0, 0)]
)
def test_a_split_shares_no_sample_and_loses_none(num_samples: int, share: float, num_held_out: int):
    train, validation = split(num_samples, share, seed=3)
    assert (len(train), len(validation)) == (num_samples - num_held_out, num_held_out)
    drawn = [train[np.arange(len(train))].tolist(), validation[np.arange(len(validation))].tolist()]
    assert sorted(drawn[0] + drawn[1]) == list(range(num_samples))
    again = split(num_samples, share, seed=3)[1]
    assert again[np.arange(num_held_out)].tolist() == drawn[1]


def test_another_seed_holds_out_other_samples():
    drawn = {tuple(split(1000, 0.01, seed)[1][np.arange(10)].tolist()) for seed in range(20)}
    assert len(drawn) == 20


def test_a_split_of_a_billion_samples_is_no_list():
    train, validation = split(10**9, 0.02, seed=0)
    assert (len(train), len(validation)) == (980_000_000, 20_000_000)
    assert len(pickle.dumps(train)) < 1000
    assert len(train[np.array([0, 979_999_999])]) == 2


def test_a_share_of_one_sample_cannot_be_held_out():
    with pytest.raises(DataError, match=r"a share of 0\.1 of 1 sample: give more text"):
        split(1, 0.1, 0)


def test_a_subset_is_a_dataset_of_its_own(tmp_path: Path):
    dataset = WindowDataset(store_of(tmp_path, [list(range(1, 100))]), 10)
    subset = Subset(dataset, np.array([7, 2]))
    assert len(subset) == 2
    assert subset.batch(np.array([1, 0]))["input_ids"][:, 0].tolist() == [21, 71]
    assert [sample["input_ids"][0].item() for sample in (subset[0], subset[-1])] == [71, 21]
    assert subset.lengths(np.array([1])).tolist() == [10]
    with pytest.raises(IndexError):
        subset[2]
