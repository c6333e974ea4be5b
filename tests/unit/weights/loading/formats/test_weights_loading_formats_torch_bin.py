"""Files of torch.save: tensors are found in their records, and no code of the file runs."""

import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.entries import WeightFile
from plimsoll.weights.loading.formats.torch_bin import read_entries, recognises


def entries_of(path: Path) -> dict:
    return {entry.name: entry for entry in read_entries(WeightFile(path, path.stat().st_size))}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "pytorch_model.bin"


def test_views_parameters_and_empty_tensors_are_read_and_mapped(path):
    weight = torch.randn(4, 6)
    state = {
        "whole": weight,
        "turned": weight.t(),
        "rows": weight[1:3],
        "every other": weight[:, ::2],
        "repeated": torch.ones(1, 5).expand(3, 5),
        "parameter": torch.nn.Parameter(weight[2]),
        "none": torch.zeros(0),
        "number": torch.tensor(7),
        "half": torch.randn(5).bfloat16(),
    }
    torch.save(state, path)
    entries = entries_of(path)
    assert entries.keys() == state.keys()
    for name, value in state.items():
        for found in (entries[name].read(), entries[name].mapped()):
            assert found.dtype == value.dtype
            assert torch.equal(found, value), name
        target = torch.empty(value.shape, dtype=torch.float64)
        entries[name].read_into(target)
        assert torch.equal(target, value.double())
    assert entries["whole"].offset == entries["turned"].offset


class Code:
    def __reduce__(self):
        return print, ("this was run",)


def test_a_pickle_that_needs_code_is_refused_and_not_run(path, capsys):
    torch.save({"w": torch.ones(2), "x": Code()}, path)
    with pytest.raises(WeightsError, match="needs to run `.*print` to be read, .* convert it with `safetensors"):
        entries_of(path)
    assert "this was run" not in capsys.readouterr().out


def test_a_file_of_before_torch_1_6_says_how_to_convert_it(path):
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match=r"a torch before 1.6.*convert it with `torch.save"):
        entries_of(path)


def test_another_pickle_is_refused(path):
    path.write_bytes(b"\x80\x04N.")
    with pytest.raises(WeightsError, match="is a pickle of more than tensors"):
        entries_of(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({"state_dict": {"w": torch.ones(2)}}, "`state_dict` in .* is a dict, not a dense tensor"),
        ({3: torch.ones(2)}, "holds a dict"),
    ],
)
def test_what_is_not_tensors_by_their_names_is_refused(path, value, message):
    torch.save(value, path)
    with pytest.raises(WeightsError, match=message):
        entries_of(path)


def test_a_compressed_zip_is_refused(path, tmp_path):
    torch.save({"w": torch.ones(200)}, tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(WeightsError, match="is compressed: save the file again"):
        entries_of(path)


@given(cut=st.integers(4, 1500), place=st.integers(0, 1500), byte=st.integers(0, 255))
def test_any_damage_is_a_weights_error_or_harmless(tmp_path_factory, cut, place, byte):
    path = tmp_path_factory.mktemp("fuzz") / "a"
    torch.save({"w": torch.arange(6.0), "v": torch.ones(3, 2)}, path)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[place % len(whole)] = byte
    for damaged in (whole[: cut % len(whole)], bytes(changed)):
        path.write_bytes(damaged)
        try:
            entries = entries_of(path)
        except WeightsError:
            continue
        for entry in entries.values():
            assert entry.offset + entry.num_bytes <= len(damaged)


def test_it_is_told_by_its_first_bytes(path):
    torch.save({}, path)
    assert recognises(path.read_bytes()[:16])
    assert not recognises(b"{}")
