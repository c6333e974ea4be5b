"""Rows of whole texts: by hand, compared with plain best-fit, and with the losses and gradients of unpacked texts."""

import itertools
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll.data.samples import packing as module
from plimsoll.data.samples.packing import PackedDataset, best_fit, open_packs, pack
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.samples.texts import DocumentDataset
from plimsoll.data.samples.windows import IGNORED_LABEL
from plimsoll.errors import DataError
from token_stores import store_of, store_of_lengths

X = IGNORED_LABEL


def test_rows_hold_whole_texts_whose_positions_begin_anew(tmp_path: Path):
    store = store_of(tmp_path, [[1, 2, 3], [4], [5, 6, 7, 8, 9]])
    packs = pack(cut_texts(store, 6, with_end=True))  # spans of 4, 2 and 6 tokens
    assert len(packs) == 2
    assert packs.padding_share == 0
    batch = PackedDataset(packs, pad_id=0).batch(np.array([0, 1]))
    assert batch.keys() == {"input_ids", "position_ids", "labels"}
    rows = sorted(zip(*(batch[name].tolist() for name in ("input_ids", "position_ids", "labels")), strict=True))
    assert rows == [
        ([1, 2, 3, 0, 4, 0], [0, 1, 2, 3, 0, 1], [X, 2, 3, 0, X, 0]),
        ([5, 6, 7, 8, 9, 0], [0, 1, 2, 3, 4, 5], [X, 6, 7, 8, 9, 0]),
    ]


def test_padding_is_a_text_without_labels(tmp_path: Path):
    packs = pack(cut_texts(store_of(tmp_path, [[1, 2, 3], [4]]), 3, with_end=False), sequence_length=7)
    dataset = PackedDataset(packs, pad_id=9, mask="causal")
    batch = dataset.batch(np.array([0]))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 9, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert batch["labels"].tolist() == [[X, 2, 3, X, X, X, X]]
    assert batch["attention_mask"].shape == (1, 1, 7, 7)
    assert batch["attention_mask"][0, 0, 5].int().tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert packs.padding_share == pytest.approx(3 / 7)
    assert dataset.lengths(np.array([0])).tolist() == [7]


def test_overlap_of_windows_is_predicted_once(tmp_path: Path):
    packs = pack(cut_texts(store_of(tmp_path, [[1, 2, 3, 4, 5]]), 4, stride=2), sequence_length=8)
    batch = PackedDataset(packs, pad_id=0).batch(np.array([0]))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 3, 4, 5, 0]]
    assert batch["labels"].tolist() == [[X, 2, 3, 4, X, X, 5, X]]


def test_rows_shorter_than_a_text_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"rows of 3 tokens cannot hold texts of up to 4: use rows of at least 4"):
        pack(cut_texts(store_of_lengths(tmp_path, [5]), 4), sequence_length=3)


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return the rows of best-fit decreasing, placing one span at a time."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        rooms = [(capacity - sum(row), row) for row in rows if capacity - sum(row) >= length]
        if rooms:
            min(rooms, key=lambda room: room[0])[1].append(length)
        else:
            rows.append([length])
    return rows


@given(capacity=st.integers(1, 40), data=st.data())
def test_rows_are_those_of_plain_best_fit_decreasing(capacity: int, data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=80))
    members, nums = best_fit(np.array(lengths), capacity)
    assert sorted(members.tolist()) == list(range(len(lengths)))
    rows = [[lengths[member] for member in row.tolist()] for row in np.split(members, np.cumsum(nums)[:-1])]
    assert sorted(map(sum, rows)) == sorted(map(sum, plain_best_fit(lengths, capacity)))


@pytest.mark.parametrize("capacity", [8192, 8193, 3 * 8192 + 1])
def test_long_rows_are_filled_too(capacity: int):
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 3000)
    members, nums = best_fit(lengths, capacity)
    filled = np.add.reduceat(lengths[members], np.cumsum(nums) - nums)
    assert filled.max() <= capacity
    assert lengths.sum() / (len(nums) * capacity) > 0.97


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    most=st.integers(1, 12),
    room=st.integers(0, 9),
    spans_per_pool=st.integers(1, 20),
)
def test_no_token_is_lost_and_none_comes_twice(lengths, most, room, spans_per_pool):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SPANS_PER_POOL", spans_per_pool)
        spans = cut_texts(store_of_lengths(Path(folder), lengths), most)
        packs = pack(spans, most + room)
        batch = PackedDataset(packs, pad_id=0).batch(np.arange(len(packs)))
        members = packs.members.tolist()
        places = zip(*spans.places(np.arange(len(spans))), strict=True)
        texts = [spans.store.tokens[start : start + length].tolist() for start, length in places]
    assert sorted(members) == list(range(len(spans)))
    tokens, positions = (batch[name].flatten().tolist() for name in ("input_ids", "position_ids"))
    begins = [place for place, position in enumerate(positions) if position == 0]
    found = [tokens[begin:end] for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True)]
    padding = sum(1 for text in found if not any(text)) - sum(1 for text in texts if not any(text))
    assert sorted(text for text in found if any(text)) == sorted(text for text in texts if any(text))
    assert 0 <= padding <= len(packs)


def test_next_to_nothing_is_padding_on_lengths_as_text_has_them(tmp_path: Path):
    # Lognormal lengths with mean 28 and 99th percentile 117, as lines of English text have, up to 512.
    lengths = np.random.default_rng(0).lognormal(3.05, 0.735, 100_000).astype(np.int64).clip(1, 512)
    members, nums = best_fit(lengths[: module._SPANS_PER_POOL], 512)
    assert len(members) == module._SPANS_PER_POOL
    assert 1 - lengths[: module._SPANS_PER_POOL].sum() / (len(nums) * 512) < 0.001
    store = store_of_lengths(tmp_path, lengths[:2000].tolist())
    assert pack(cut_texts(store, 512)).padding_share < 0.01


def test_packs_are_made_once_and_pickled_as_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packs = pack(cut_texts(store_of_lengths(tmp_path, [3, 1, 4, 1, 5, 9, 2, 6] * 100), 9))
    monkeypatch.setattr(module, "best_fit", None)
    dataset = PackedDataset(pack(packs.spans), pad_id=0)
    assert len(pickle.dumps(dataset)) < 2000
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[3]["input_ids"], dataset[3]["input_ids"])
    (packs.folder / "ends.bin").unlink()
    with pytest.raises(DataError, match=r"the packs .* are missing from the cache, or damaged: prepare them again"):
        open_packs(packs.spans, packs.folder)


def test_an_ordinary_loader_with_workers_gives_every_row(tmp_path: Path):
    dataset = PackedDataset(pack(cut_texts(store_of_lengths(tmp_path, [3, 1, 4, 1, 5] * 20), 5)), pad_id=0)
    loader = torch.utils.data.DataLoader(dataset, 4, shuffle=True, collate_fn=dataset.collate, num_workers=2)
    rows = sorted(row for batch in loader for row in batch["input_ids"].tolist())
    assert rows == sorted(dataset.batch(np.arange(len(dataset)))["input_ids"].tolist())


KINDS = [*itertools.product(["gpt2", "llama", "qwen2", "gpt_neox", "mixtral"], ["sdpa", "eager"]), ("opt", "sdpa")]


@pytest.mark.parametrize(("kind", "attention"), KINDS)
def test_packed_losses_and_gradients_are_those_of_the_texts_unpacked(kind: str, attention: str, tmp_path: Path):
    spans = cut_texts(store_of_lengths(tmp_path, [9, 3, 1, 14, 6, 2, 11, 5, 0, 4]), 16, with_end=True)
    packed = PackedDataset(pack(spans), pad_id=0, mask="causal" if kind == "opt" else None)
    assert len(packed) < 6
    singly = DocumentDataset(spans, None, pad_id=0)
    losses, gradients = [], []
    for dataset in (packed, singly):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            kind,
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            use_cache=False,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        loss = model(**dataset.batch(np.arange(len(dataset)))).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-5, rtol=1e-5, msg=name)
