"""Files of ``torch.save`` (``pytorch_model.bin``): a zip with a pickle and one record of bytes per storage.

They are read by ``torch.load(weights_only=True)`` onto the meta device, so the pickle can only create tensors. torch
reports the offset of each storage's record, and the bytes are read or mapped later. Views and tensors that share a
storage are covered.

Does NOT cover files from before torch 1.6 (not a zip), other pickles, or zips with compressed records: the errors tell
how to convert such files.
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
_OLD = bytes([0x80, 2, 0x8A, 10]) + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")  # the pickled magic number

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
"""The various errors that torch's reader raises for damaged bytes."""


def recognises(head: bytes) -> bool:
    """Return whether ``head``, the first bytes of a file, begins like a zip or a pickle."""
    return head.startswith((_ZIP, _PICKLE))


def read_entries(source: WeightFile) -> list[Entry]:
    """Return the tensors of a file, in file order.

    Raises:
        WeightsError: if the file is damaged or truncated, needs code to be read, or has a variant that is not covered.
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
        with source.path.open("rb") as file, catch_warnings():  # given a path, torch would look at its suffix
            simplefilter("ignore", UserWarning)  # about other pickle protocols: unreadable ones raise anyway
            described = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _needs_code(source, str(error)) from None
    except _FAULTS as error:
        raise _damaged(source, str(error).partition("\n")[0]) from None
    if not isinstance(described, Mapping) or not all(isinstance(name, str) for name in described):
        raise WeightsError(
            f"{source.path} holds a {type(described).__name__}, not tensors by name: save `model.state_dict()` instead"
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
    """Check the directory of the zip, so that all bytes that are read later belong to one of its records."""
    try:
        with zipfile.ZipFile(source.path) as archive:
            records = archive.infolist()
    # zipfile raises NotImplementedError for a later version of the zip format: here, this means damage.
    except (zipfile.BadZipFile, NotImplementedError, *_FAULTS) as error:
        raise _damaged(source, f"{error}; its end may be missing") from None
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
            f"{source.path} has the format of a torch before 1.6: convert it with "
            "`torch.save(torch.load(path, weights_only=True), path)`, which needs memory for the whole file"
        )
    return _needs_code(source, "")


def _needs_code(source: WeightFile, what: str) -> WeightsError:
    found = re.search(r"GLOBAL ([\w.]+)", what)
    needed = f"needs to run `{found[1]}`" if found else "is a pickle of more than tensors and needs code"
    return WeightsError(
        f"{source.path} {needed} to be read, and Plimsoll never runs code in a checkpoint: if you trust it, convert "
        "it with `safetensors.torch.save_file(torch.load(path, weights_only=False), 'model.safetensors')`"
    )


def _damaged(source: WeightFile, what: str) -> WeightsError:
    return WeightsError(f"{source.path} is not a valid torch.save file ({what}): download or save it again")
