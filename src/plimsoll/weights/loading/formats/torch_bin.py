"""Files of ``torch.save`` (``pytorch_model.bin``): a zip whose records are a pickle and the bytes of each storage.

Read with ``torch.load(weights_only=True)`` onto the meta device: nothing in the pickle is run but what makes tensors,
and of each storage torch says where its record is, so that its bytes are read or mapped later. Views and tensors that
share a storage are covered.

It does NOT cover files of before torch 1.6, which are no zip, other pickles, and zips whose records are compressed:
the errors say how to convert them.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.entries import Entry, WeightFile, num_bytes_of

TITLE = "torch.save"

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_OLD = bytes([0x80, 2, 0x8A, 10]) + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")  # a pickle of the magic number

_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What torch's reader raises on damaged bytes; it is not one kind of error."""


def recognises(head: bytes) -> bool:
    """Whether a file begins as a zip or a pickle."""
    return head.startswith((_ZIP, _PICKLE))


def read_entries(source: WeightFile) -> list[Entry]:
    """List the tensors of a file, in the order they lie in it.

    Raises:
        WeightsError: if it is damaged or cut off, needs code to be read, or was written in a way not covered here.
    """
    with source.path.open("rb") as file:
        head = file.read(len(_OLD))
    if not head.startswith(_ZIP):
        raise _of_another_kind(source, head)
    _check_records(source)
    named = _described(source)
    return sorted((_entry(source, name, value) for name, value in named.items()), key=lambda entry: entry.offset)


def _described(source: WeightFile) -> Mapping[str, Any]:
    try:
        with source.path.open("rb") as file, catch_warnings():  # given a name, torch would go by it
            simplefilter("ignore", UserWarning)  # of pickles of another protocol: what it cannot read it refuses
            described = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _needs_code(source, str(error)) from None
    except _FAULTS as error:
        raise _damaged(source, str(error).partition("\n")[0]) from None
    if not isinstance(described, Mapping) or not all(isinstance(name, str) for name in described):
        raise WeightsError(
            f"{source.path} holds a {type(described).__name__}, not tensors by their names: save "
            "`model.state_dict()` instead"
        )
    return described


def _entry(source: WeightFile, name: str, value: Any) -> Entry:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise WeightsError(
            f"`{name}` in {source.path} is a {type(value).__name__}, not a dense tensor: save `model.state_dict()` "
            "instead"
        )
    storage, size_bytes = value.untyped_storage(), value.dtype.itemsize
    begin, shape = storage._checkpoint_offset, tuple(value.shape)
    extent = 0 if value.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(shape, value.stride(), strict=True))
    last_bytes = (value.storage_offset() + extent) * size_bytes
    if begin is None or last_bytes > storage.nbytes() or begin + last_bytes > source.num_bytes:
        raise _damaged(source, f"`{name}` lies outside of its record")
    offset = begin + int(value.storage_offset()) * size_bytes
    if value.is_contiguous():
        return Entry(name, value.dtype, shape, source, offset, num_bytes_of(shape, value.dtype))
    return Entry(name, value.dtype, shape, source, offset, extent * size_bytes, value.stride())


def _check_records(source: WeightFile) -> None:
    """Check what the zip says of itself, so that no byte is taken for a weight that is none."""
    try:
        with zipfile.ZipFile(source.path) as archive:
            records = archive.infolist()
    # zipfile's own NotImplementedError, for a zip that needs a later version of the format to be read: damage, here.
    except (zipfile.BadZipFile, NotImplementedError, *_FAULTS) as error:
        raise _damaged(source, f"{error}, which its end should have: is it cut off?") from None
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise WeightsError(
                f"the record {record.filename} in {source.path} is compressed: save the file again with "
                "`torch.save(torch.load(path, weights_only=True), path)`"
            )
        if record.header_offset + record.file_size > source.num_bytes:
            raise _damaged(source, f"the record {record.filename} lies beyond its end")


def _of_another_kind(source: WeightFile, head: bytes) -> WeightsError:
    if head.startswith(_OLD):
        return WeightsError(
            f"{source.path} was written by a torch before 1.6, or as it did: convert it with "
            "`torch.save(torch.load(path, weights_only=True), path)`, which takes as much memory as it is long"
        )
    return _needs_code(source, "")


def _needs_code(source: WeightFile, what: str) -> WeightsError:
    found = re.search(r"GLOBAL ([\w.]+)", what)
    needed = f"runs `{found[1]}`" if found else "is a pickle of more than tensors"
    return WeightsError(
        f"{source.path} {needed} to be read, and code in a checkpoint is never run here: where you trust it, convert "
        "it with `safetensors.torch.save_file(torch.load(path, weights_only=False), 'model.safetensors')`"
    )


def _damaged(source: WeightFile, what: str) -> WeightsError:
    return WeightsError(f"{source.path} is no whole file of torch.save ({what}): download or save it again")
