"""Samples from tokens, with every number by hand; splits that share nothing."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.data.store import stored
from plimsoll.data.tokens import TokenStore, open_tokens
from plimsoll.data.windows import DocumentDataset, Subset, WindowDataset, split
from plimsoll.errors import DataError


def store_of(folder: Path, texts: list[list[int]]) -> TokenStore:
    """The texts as `tokenize` stores them, the end token being 0."""

    def write(place: Path) -> dict[str, str]:
        np.array([token for text in texts for token in [*text, 0]], np.uint16).tofile(place / "tokens.bin")
        (np.cumsum([len(text) + 1 for text in texts]) - 1).astype(np.int64).tofile(place / "ends.bin")
        return {"dtype": "uint16"}

    stored(folder / "tokens", write)
    return open_tokens(folder / "tokens")


def test_windows_cut_the_texts_laid_end_to_end(tmp_path: Path):
    dataset = WindowDataset(store_of(tmp_path, [[1, 2, 3, 4], [5], [6, 7, 8]]), 3)  # 1 2 3 4 0 5 0 6 7 8 0
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


def test_documents_are_padded_to_the_longest_of_the_batch(tmp_path: Path):
    store = store_of(tmp_path, [[1, 2, 3, 4, 5], [6], [], [7, 8]])
    dataset = DocumentDataset(store, np.array([1, 0, 2, 1], np.uint8), 4, pad_id=9)
    assert (len(dataset), dataset.num_truncated) == (4, 1)
    batch = dataset.batch(np.array([3, 1, 2]))
    assert batch["input_ids"].tolist() == [[7, 8], [6, 9], [0, 9]]  # the empty text is its end token
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert batch["labels"].tolist() == [1, 0, 2]
    assert {field.dtype for field in batch.values()} == {torch.int64}
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3, 4]
    assert dataset[-1]["labels"].item() == 1


def test_datasets_are_pickled_as_the_names_of_their_files(tmp_path: Path):
    store = store_of(tmp_path, [list(range(1000))] * 10)
    dataset = DocumentDataset(store, np.zeros(10, np.uint8), 4, pad_id=9)
    assert len(pickle.dumps(dataset)) < 1000
    assert pickle.loads(pickle.dumps(dataset))[1]["input_ids"].tolist() == [0, 1, 2, 3]


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
