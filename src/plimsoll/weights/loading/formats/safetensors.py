"""The safetensors format: eight bytes with the length of a JSON header, the header, and the tensors one after another.

See https://github.com/huggingface/safetensors#format. The header is parsed here and `Entry` reads the tensors. The
library would map the file as writable private memory, all of which counts against ``RLIMIT_DATA``. The checks are the
same as in the library: no gaps, no overlaps, shapes match the bytes, and the file ends with the last tensor.

Does NOT cover types that torch lacks, or types of less than one byte (F4, F6).
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.entries import Entry, WeightFile, num_bytes_of

TITLE = "safetensors"

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of the library
_MOST_NUMEL = 1 << 60

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}  # fmt: skip


def recognises(head: bytes) -> bool:
    """Return whether ``head``, the first bytes of a file, is a length and the beginning of a JSON object."""
    return head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_entries(source: WeightFile) -> list[Entry]:
    """Return the tensors of a file, in file order.

    Raises:
        WeightsError: if the header is damaged or the file is truncated.
    """
    header, header_bytes = _header(source)
    header.pop("__metadata__", None)
    first_byte = _LENGTH_BYTES + header_bytes
    entries = sorted((_entry(source, name, facts, first_byte) for name, facts in header.items()), key=_place)
    end = first_byte
    for entry in entries:
        if entry.offset != end:
            raise _damaged(source, f"`{entry.name}` begins at byte {entry.offset}, the one before ends at {end}")
        end += entry.num_bytes
    if source.num_bytes < end:
        raise WeightsError(
            f"{source.path} is cut off: {end - source.num_bytes} of its {end} bytes are missing; download or copy it "
            "again"
        )
    if source.num_bytes > end:
        raise _damaged(source, f"{source.num_bytes - end} bytes follow its last tensor")
    return entries


def read_metadata(source: WeightFile) -> dict[str, Any]:
    """Return the metadata in the header, by name.

    Raises:
        WeightsError: if the header is damaged or the file is truncated.
    """
    said = _header(source)[0].get("__metadata__") or {}
    return said if isinstance(said, dict) else {}


def _header(source: WeightFile) -> tuple[dict[str, Any], int]:
    """Return the header and its length in bytes."""
    with source.path.open("rb", buffering=0) as file:
        num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if source.num_bytes < _LENGTH_BYTES or num_bytes > _MOST_HEADER_BYTES:
            raise _damaged(source, f"its header would have {num_bytes} bytes")
        if num_bytes > source.num_bytes - _LENGTH_BYTES:
            missing_bytes = num_bytes + _LENGTH_BYTES - source.num_bytes
            raise WeightsError(
                f"{source.path} is cut off: {missing_bytes} bytes of its header are missing, and all that follows; "
                "download or copy it again"
            )
        raw = os.pread(file.fileno(), num_bytes, _LENGTH_BYTES)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(source, pairs))
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise _damaged(source, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(source, "its header is not a JSON object")
    return header, num_bytes


def _unique(source: WeightFile, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        raise _damaged(source, f"`{next(name for name in names if names.count(name) > 1)}` is listed twice")
    return named


def _entry(source: WeightFile, name: str, facts: Any, first_byte: int) -> Entry:
    if not isinstance(facts, dict):
        raise _damaged(source, f"the header does not describe `{name}`")
    shape: Any = facts.get("shape")
    offsets: Any = facts.get("data_offsets")
    kind: Any = facts.get("dtype")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(source, f"`{name}` has shape {shape} and offsets {offsets}")
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise WeightsError(
            f"`{name}` in {source.path} is of type {kind}, which is not supported: convert the checkpoint to one of "
            f"{', '.join(_DTYPES)}"
        )
    numel = 1
    for size in shape:
        numel *= size
        if numel > _MOST_NUMEL:
            raise _damaged(source, f"`{name}` has shape {shape}")
    begin, end = offsets
    if end - begin != num_bytes_of(tuple(shape), _DTYPES[kind]):
        raise _damaged(source, f"`{name}` has {end - begin} bytes, but shape {shape} of {kind}")
    return Entry(name, _DTYPES[kind], tuple(shape), source, first_byte + begin, end - begin)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MOST_NUMEL for value in values)


def _place(entry: Entry) -> tuple[int, int]:
    return entry.offset, entry.num_bytes


def _damaged(source: WeightFile, what: str) -> WeightsError:
    return WeightsError(f"{source.path} is not a valid safetensors file: {what}; download or save it again")
