"""The windows of streams as a dataset: consecutive batches are contiguous, and mark the beginnings of texts."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.data.batches.batching import Buckets
from plimsoll.data.batches.loader import Loader
from plimsoll.data.batches.order import BlockShuffle
from plimsoll.data.samples.stream_slots import StreamSlots
from plimsoll.data.samples.streams import StreamDataset
from plimsoll.data.samples.windows import IGNORED_LABEL
from plimsoll.errors import DataError
from token_stores import store_of

TEXTS = [[1, 2, 3, 4], [5], [6, 7, 8]]  # as tokens: 1 2 3 4 0 5 0 6 7 8 0


def dataset_of(folder: Path, resets: bool = False) -> StreamDataset:
    return StreamDataset(store_of(folder, TEXTS), StreamSlots(0, 11, 2, 4), resets)


def test_a_batch_has_the_next_window_of_each_stream_slot(tmp_path: Path):
    dataset = dataset_of(tmp_path)
    first, second = dataset.batch(np.array([0, 1])), dataset.batch(np.array([2, 3]))
    assert first["input_ids"].tolist() == [[1, 2, 3, 4], [5, 0, 6, 7]]
    assert second["input_ids"].tolist() == [[4, 0, 5], [7, 8, 0]]
    assert [batch["slots"].tolist() for batch in (first, second)] == [[0, 1], [0, 1]]
    assert [batch["windows"].tolist() for batch in (first, second)] == [[0, 0], [1, 1]]
    for batch in (first, second):  # a model may mask its inputs in place
        labels = batch["labels"].clone()
        batch["input_ids"].fill_(9)
        assert torch.equal(batch["labels"], labels)
    assert set(first) == {"input_ids", "labels", "slots", "windows"}
    assert dataset.lengths(np.arange(4)).tolist() == [4, 4, 3, 3]


def test_with_resets_the_first_tokens_of_texts_are_marked(tmp_path: Path):
    dataset = dataset_of(tmp_path, resets=True)
    resets = [dataset.batch(ids)["resets"].int().tolist() for ids in (np.array([0, 1]), np.array([2, 3]))]
    assert resets == [[[0, 0, 0, 0], [1, 0, 1, 0]], [[0, 0, 1], [0, 0, 0]]]


def test_windows_of_two_lengths_are_filled_up_with_what_is_not_predicted(tmp_path: Path):
    batch = dataset_of(tmp_path).batch(np.array([0, 2]))
    assert batch["input_ids"][:, :3].tolist() == [[1, 2, 3], [4, 0, 5]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [4, 0, 5, IGNORED_LABEL]]


def test_the_loader_goes_through_the_stream_in_order_in_every_epoch(tmp_path: Path):
    loader = Loader(dataset_of(tmp_path), 2, shuffle=False)
    seen = []
    for _ in range(4):
        seen.append(loader.peek().fields["windows"].tolist())
        loader.advance()
    assert seen == [[0, 0], [1, 1]] * 2


@pytest.mark.parametrize(
    ("batches", "shuffle", "why"),
    [
        (2, True, "these are shuffled: give 2 as the batch"),
        (3, False, "these are of 3: give 2"),
        (Buckets(batch_size=2), False, "these are of Buckets"),
        (2, BlockShuffle(), "these are shuffled"),
    ],
)
def test_windows_in_another_order_are_refused(tmp_path: Path, batches, shuffle, why):
    with pytest.raises(DataError, match=f"windows of 2 stream slots make batches in their order only.*{why}"):
        Loader(dataset_of(tmp_path), batches, shuffle=shuffle)


def test_streams_are_an_ordinary_dataset(tmp_path: Path):
    dataset = dataset_of(tmp_path, resets=True)
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again) == 4
    assert torch.equal(again[3]["resets"], dataset[3]["resets"])
    batches = torch.utils.data.DataLoader(dataset, 2, collate_fn=dataset.collate)
    assert [batch["input_ids"].tolist() for batch in batches] == [
        [[1, 2, 3, 4], [5, 0, 6, 7]],
        [[4, 0, 5], [7, 8, 0]],
    ]
