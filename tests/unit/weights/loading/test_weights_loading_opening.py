"""Checkpoint folders with one or several files, and the faults of folders that cannot be opened."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.opening import open_checkpoint

A, B = {"a": torch.randn(3, 2)}, {"b": torch.arange(5)}


def sharded(folder, weight_map=None, index="model.safetensors.index.json"):
    save_file(A, folder / "one.safetensors")
    save_file(B, folder / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors"} if weight_map is None else weight_map
    (folder / index).write_text(json.dumps({"weight_map": places}))


def test_shards_are_one_checkpoint(tmp_path):
    sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert [path.name for path in checkpoint.files] == ["one.safetensors", "two.safetensors"]
    assert (checkpoint.num_bytes, checkpoint.largest_bytes) == (24 + 40, 40)
    assert {name: entry.read().tolist() for name, entry in checkpoint.entries.items()} == {
        "a": A["a"].tolist(),
        "b": B["b"].tolist(),
    }


def test_shards_of_torch_save(tmp_path):
    torch.save(A, tmp_path / "one.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "one.bin"}}))
    assert torch.equal(open_checkpoint(str(tmp_path)).entries["a"].read(), A["a"])


def test_a_format_is_told_by_the_content(tmp_path):
    torch.save(A, tmp_path / "model.safetensors")
    assert torch.equal(open_checkpoint(tmp_path).entries["a"].read(), A["a"])


def test_tensors_that_share_their_bytes_are_counted_once(tmp_path):
    torch.save({"one": A["a"], "other": A["a"]}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).num_bytes == 24


def test_safetensors_come_first(tmp_path):
    torch.save(B, tmp_path / "pytorch_model.bin")
    save_file(A, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path).entries) == ["a"]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "three.safetensors"}, r"names three.safetensors, which is missing .*1 tensors, such as a\)"),
        ({"a": "../one.safetensors"}, "which is not in its folder"),
        ({"a": 3}, "has no `weight_map` of names"),
        ([], "has no `weight_map` of names"),
        ({}, "has no `weight_map` of names"),
    ],
)
def test_an_index_that_is_wrong_is_named(tmp_path, places, message):
    sharded(tmp_path, places)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 90_000, "\xff"])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(WeightsError, match="is not an index of weights"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    sharded(tmp_path)
    save_file(A | B, tmp_path / "two.safetensors")
    with pytest.raises(WeightsError, match="`a` is both in one.safetensors and in two.safetensors"):
        open_checkpoint(tmp_path)


def test_a_shard_that_is_cut_off_says_how_much_is_missing(tmp_path):
    sharded(tmp_path)
    file = tmp_path / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(WeightsError, match=r"two.safetensors is cut off: 7 of its \d+ bytes are missing"):
        open_checkpoint(tmp_path)


def test_folders_that_are_none_are_named(tmp_path):
    with pytest.raises(WeightsError, match="is not a folder: give a folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(WeightsError, match="has no weights .*found nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"has no weights .*found config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(WeightsError, match="hold no tensor"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(WeightsError, match="run `git lfs pull`"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_text("nonsense, and more of it")
    with pytest.raises(WeightsError, match="has an unknown format"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match="cannot read .*Is a directory; give a folder"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_files_that_may_not_be_read_are_named(tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(WeightsError, match="Permission denied; give a folder whose files can be read"):
        open_checkpoint(tmp_path)
