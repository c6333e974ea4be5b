"""The header of safetensors: it is read like the library reads it, and any damage is a `WeightsError`."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.entries import WeightFile
from plimsoll.weights.loading.formats.safetensors import _DTYPES, read_entries, recognises


def source_of(path: Path, raw: bytes) -> WeightFile:
    path.write_bytes(raw)
    return WeightFile(path, len(raw))


def file_of(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_every_type_is_read_as_the_library_writes_it(tmp_path):
    tensors = {str(dtype): torch.arange(8).to(dtype) for dtype in _DTYPES.values() if dtype is not torch.float8_e8m0fnu}
    save_file(tensors, tmp_path / "a")
    entries = read_entries(WeightFile(tmp_path / "a", (tmp_path / "a").stat().st_size))
    assert {entry.name for entry in entries} == tensors.keys()
    for entry in entries:
        assert entry.read().view(torch.uint8).equal(tensors[entry.name].view(torch.uint8)), entry


def test_a_tensor_without_elements_and_one_without_dimensions(tmp_path):
    save_file({"none": torch.zeros(0, 3), "one": torch.tensor(5.0)}, tmp_path / "a")
    entries = {e.name: e for e in read_entries(WeightFile(tmp_path / "a", (tmp_path / "a").stat().st_size))}
    assert entries["none"].read().shape == entries["none"].mapped().shape == (0, 3)
    assert entries["one"].read() == entries["one"].mapped() == 5.0


def one(**facts: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **facts}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x01", "its header would have"),
        ((1 << 62).to_bytes(8, "little") + b"{", "its header would have"),
        ((900).to_bytes(8, "little") + b"{}", "898 bytes of its header are missing"),
        (file_of(b"{nonsense}"), "its header is not JSON"),
        (file_of(b"[" * 90_000), "its header is not JSON"),
        (file_of(b'{"\xff": 1}'), "its header is not JSON"),
        (file_of(b"[]"), "its header is not a JSON object"),
        (file_of(b'{"a": {}, "a": {}}'), "`a` is listed twice"),
        (file_of({"w": 3}), "the header does not describe `w`"),
        (file_of(one(shape=None), bytes(8)), "has shape None"),
        (file_of(one(shape=[-2]), bytes(8)), r"has shape \[-2\]"),
        (file_of(one(shape=[True]), bytes(8)), r"has shape \[True\]"),
        (file_of(one(shape=[1 << 40, 1 << 40]), bytes(8)), "has shape"),
        (file_of(one(data_offsets=[0]), bytes(8)), r"offsets \[0\]"),
        (file_of(one(dtype="F4"), bytes(8)), "`w` in .* is of type F4, which is not supported"),
        (file_of(one(dtype=["F32"]), bytes(8)), "which is not supported"),
        (file_of(one(data_offsets=[0, 12]), bytes(12)), r"has 12 bytes, but shape \[2\] of F32"),
        (file_of(one(data_offsets=[4, 12]), bytes(12)), "begins at byte"),
        (file_of(one(), bytes(5)), "is cut off: 3 of its .* bytes are missing"),
        (file_of(one(), bytes(9)), "1 bytes follow its last tensor"),
        (file_of({**one(), "v": one()["w"]}, bytes(8)), "begins at byte"),
    ],
)
def test_damage_is_named(tmp_path, raw, message):
    with pytest.raises(WeightsError, match=message):
        read_entries(source_of(tmp_path / "a", raw))


@given(place=st.integers(0, 200), byte=st.integers(0, 255), length=st.integers(0, 400))
def test_any_changed_byte_and_any_cut_is_a_weights_error_or_a_whole_file(tmp_path_factory, place, byte, length):
    whole = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int8)})
    raw = bytearray(whole)
    raw[place % len(raw)] = byte
    path = tmp_path_factory.mktemp("fuzz") / "a"
    for damaged in (bytes(raw), whole[:length], bytes(raw)[:length]):
        try:
            entries = read_entries(source_of(path, damaged))
        except WeightsError:
            continue
        for entry in entries:
            assert entry.offset + entry.num_bytes <= len(damaged)
            entry.read()


def test_it_is_told_by_its_first_bytes():
    assert recognises(save({"a": torch.ones(1)})[:16])
    assert not recognises(b"PK\x03\x04 and more bytes")
    assert not recognises(b"")
