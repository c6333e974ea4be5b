"""The contract of weight formats: a file returns the saved tensors, and damage raises `WeightsError`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plimsoll.errors import WeightsError
from plimsoll.weights.loading import formats
from plimsoll.weights.loading.formats import HEAD_BYTES
from plimsoll.weights.loading.opening import FORMATS, entries_of

WRITERS = {"safetensors": save_file, "torch_bin": torch.save}
NAMES = [form.__name__.rpartition(".")[2] for form in FORMATS]
TENSORS = {
    "matrix": torch.randn(5, 3),
    "half": torch.randn(4).bfloat16(),
    "ids": torch.arange(4).view(1, 4),
    "none": torch.zeros(0, 2),
}


def test_every_module_of_the_folder_is_listed_and_written_here():
    modules = {path.stem for path in Path(formats.__file__).parent.glob("[!_]*.py")}
    assert modules == set(NAMES) == WRITERS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_what_was_saved_is_read_and_mapped(name, tmp_path):
    path = tmp_path / "weights"
    WRITERS[name](TENSORS, path)
    assert [form.__name__.endswith(name) for form in FORMATS if form.recognises(path.read_bytes()[:HEAD_BYTES])] == [
        True
    ]
    entries = {entry.name: entry for entry in entries_of(path)}
    assert entries.keys() == TENSORS.keys()
    for key, value in TENSORS.items():
        assert (entries[key].shape, entries[key].dtype) == (tuple(value.shape), value.dtype)
        assert torch.equal(entries[key].read(), value)
        assert torch.equal(entries[key].mapped(), value)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_off_anywhere_is_refused(name, tmp_path):
    path = tmp_path / "weights"
    WRITERS[name](TENSORS, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            entries_of(path)
