"""Texts as samples: padding by hand, labels of windows, and ordinary loaders."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.batches.augment import TokenAugmentation
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.samples.texts import DocumentDataset, split_by_text
from plimsoll.data.samples.windows import IGNORED_LABEL, split
from plimsoll.data.tokens.store import TokenStore
from plimsoll.errors import DataError
from plimsoll.records.augmentation import Augmentation
from token_stores import store_of, store_of_lengths


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return store_of(tmp_path, [[1, 2, 3, 4, 5], [6], [], [7, 8]])


LABELS = np.array([1, 0, 2, 1], np.uint8)


def test_documents_are_padded_to_the_longest_of_the_batch(store: TokenStore):
    dataset = DocumentDataset(cut_texts(store, 4, long_texts="truncate"), LABELS, pad_id=9, pad_multiple=1)
    assert len(dataset) == 4
    batch = dataset.batch(np.array([3, 1, 2]))
    assert batch["input_ids"].tolist() == [[7, 8], [6, 9], [0, 9]]  # the empty text consists of its end token
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert batch["labels"].tolist() == [1, 0, 2]
    assert {field.dtype for field in batch.values()} == {torch.int64}
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3, 4]
    assert dataset[-1]["labels"].item() == 1
    with pytest.raises(IndexError):
        dataset[4]


@pytest.mark.parametrize(("multiple", "width"), [(1, 2), (3, 3), (8, 5)])
def test_rows_are_rounded_up_to_a_multiple_but_not_beyond_the_longest(store: TokenStore, multiple: int, width: int):
    dataset = DocumentDataset(cut_texts(store, 5), LABELS, pad_id=9, pad_multiple=multiple)
    assert dataset.batch(np.array([3, 1]))["input_ids"].shape == (2, width)


def test_a_window_has_the_label_of_its_text(store: TokenStore):
    dataset = DocumentDataset(cut_texts(store, 2), LABELS, pad_id=9)
    ids = np.arange(len(dataset))
    assert dataset.parents(ids).tolist() == [0, 0, 0, 1, 2, 3]
    assert dataset.batch(ids)["labels"].tolist() == [1, 1, 1, 0, 2, 1]
    assert dataset.lengths(ids).tolist() == [2, 2, 1, 1, 1, 2]


def test_language_modelling_predicts_each_token_of_a_text_once(store: TokenStore):
    dataset = DocumentDataset(cut_texts(store, 3, stride=2, with_end=True), None, pad_id=9)
    batch = dataset.batch(np.arange(len(dataset)))
    assert batch["input_ids"].tolist() == [[1, 2, 3], [3, 4, 5], [5, 0, 9], [6, 0, 9], [0, 9, 9], [7, 8, 0]]
    ignored = IGNORED_LABEL
    assert batch["labels"].tolist() == [
        [1, 2, 3],
        [ignored, 4, 5],
        [ignored, 0, ignored],
        [6, 0, ignored],
        [0, ignored, ignored],
        [7, 8, 0],
    ]


@pytest.mark.parametrize("labels", [LABELS, None])
def test_single_samples_are_collated_to_the_batch(store: TokenStore, labels: np.ndarray | None):
    dataset = DocumentDataset(cut_texts(store, 4), labels, pad_id=9, pad_multiple=3)
    ids = [1, 4, 3, 0]
    assert [len(sample["input_ids"]) for sample in dataset.__getitems__(ids)] == [1, 2, 1, 4]
    batch, collated = dataset.batch(np.array(ids)), dataset.collate(dataset.__getitems__(ids))
    assert batch.keys() == collated.keys()
    assert all(torch.equal(batch[name], collated[name]) for name in batch)


def test_an_ordinary_loader_with_workers_gives_every_sample(tmp_path: Path):
    store = store_of(tmp_path, [[number + 1] * (number % 7 + 1) for number in range(50)])
    dataset = DocumentDataset(cut_texts(store, 3), np.arange(50), pad_id=0)
    loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True, collate_fn=dataset.collate, num_workers=2)
    seen = [(row[0].item() - 1, label.item()) for batch in loader for row, label in zip(*_columns(batch), strict=True)]
    assert len(seen) == len(dataset)
    assert all(text == label for text, label in seen)
    assert {label for _, label in seen} == set(range(50))


def _columns(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["input_ids"], batch["labels"]


def test_a_pickle_names_files_and_holds_no_labels(tmp_path: Path):
    store = store_of_lengths(tmp_path, [3] * 5000)
    np.save(tmp_path / "labels.npy", np.arange(5000) % 7)
    labels = np.load(tmp_path / "labels.npy", mmap_mode="r")
    dataset = DocumentDataset(cut_texts(store, 2), labels, pad_id=9)
    again = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 2000
    ids = np.array([9999, 5, 77])
    assert again.batch(ids)["labels"].tolist() == dataset.batch(ids)["labels"].tolist() == (ids // 2 % 7).tolist()


def test_a_split_by_text_shares_no_text_and_loses_no_window(tmp_path: Path):
    spans = cut_texts(store_of_lengths(tmp_path, [number % 30 for number in range(200)]), 8, stride=5)
    train, validation = split_by_text(spans, 0.1, seed=4)
    parents = [set(part.parents(np.arange(len(part))).tolist()) for part in (train, validation)]
    assert not parents[0] & parents[1]
    assert parents[0] | parents[1] == set(range(200))
    assert len(train) + len(validation) == len(spans)
    assert parents[1] == set(split(200, 0.1, 4)[1][np.arange(20)].tolist())
    assert train.num_tokens + validation.num_tokens == spans.num_tokens


def test_a_share_of_one_text_cannot_be_held_out_however_many_windows_it_has(tmp_path: Path):
    spans = cut_texts(store_of_lengths(tmp_path, [100]), 8)
    why = r"share of 0\.1 of 1 text, because windows .*: set data\.unit=line or data\.unit=paragraph .*data\.validation"
    with pytest.raises(DataError, match=why):
        split_by_text(spans, 0.1, seed=0)


@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=12),
    config=st.builds(
        Augmentation,
        mask=st.sampled_from([0, 0.3, 1]),
        delete=st.sampled_from([0, 0.3, 1]),
        swap=st.sampled_from([0, 0.5, 1]),
        swap_distance=st.integers(1, 4),
    ),
    is_labelled=st.booleans(),
)
def test_augmented_samples_do_not_depend_on_their_batch(lengths, config, is_labelled):
    with tempfile.TemporaryDirectory() as folder:
        spans = cut_texts(store_of_lengths(Path(folder), lengths), 8)
        labels = np.zeros(len(lengths), np.int64) if is_labelled else None
        augmentation = TokenAugmentation(config, 1, [0], 49, 8)
        dataset = DocumentDataset(spans, labels, pad_id=0, augmentation=augmentation)
        dataset.set_epoch(3)
        ids = np.arange(len(dataset))[::-1]
        batch, singly = dataset.batch(ids, epoch=3), dataset.collate([dataset[number] for number in ids.tolist()])
    assert all(torch.equal(batch[name], singly[name]) for name in batch)
    assert (batch["attention_mask"].sum(1) > 0).all()
    if not config.delete:
        assert batch["attention_mask"].sum(1).tolist() == spans.lengths(ids).tolist()
    if labels is None and not config.mask:
        inside = batch["attention_mask"] == 1
        assert torch.equal(batch["labels"][inside], batch["input_ids"][inside])


def test_masked_tokens_are_predicted_as_what_they_were(store: TokenStore):
    augmentation = TokenAugmentation(Augmentation(mask=1.0), 0, [0], 99, 5)
    dataset = DocumentDataset(cut_texts(store, 5, with_end=True), None, pad_id=0, augmentation=augmentation)
    batch = dataset.batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[99] * 5, [0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5], [0] + [IGNORED_LABEL] * 4]
