"""Opening of checkpoint folders: find the weight files, read their headers and report faults.

Files are searched in the order of transformers: ``model.safetensors``, its index, ``pytorch_model.bin``, its index. All
tensors in the files of an index are included, even if the index does not list them. Only headers are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.coded import Coded, with_coded
from plimsoll.weights.loading.entries import Entry, WeightFile
from plimsoll.weights.loading.formats import HEAD_BYTES, Format, safetensors, torch_bin

FORMATS: tuple[Format, ...] = (safetensors, torch_bin)

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
_MOST_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a folder.

    Attributes:
        folder: the folder of the files.
        entries: the tensors by name, in file order.
        files: the weight files.
        coded: the entries that torchao stored as several tensors, by name.
    """

    folder: Path
    entries: Mapping[str, Entry]
    files: tuple[Path, ...]
    coded: Mapping[str, Coded] = field(default_factory=dict)

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of all tensors; bytes that tensors share count once."""
        places = {(entry.file, entry.offset, entry.num_bytes) for entry in self.entries.values()}
        return sum(num_bytes for _, _, num_bytes in places)

    @cached_property
    def largest_bytes(self) -> int:
        """The bytes of the largest tensor."""
        return max((entry.num_bytes for entry in self.entries.values()), default=0)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint folder, reading only headers.

    Args:
        folder: contains ``model.safetensors`` or ``pytorch_model.bin``, or the index of several such files.

    Raises:
        WeightsError: if there are no weights, or a file is missing, damaged, truncated, or needs code to be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder: give a folder that `save_pretrained` wrote")
    try:
        names = _file_names(folder)
        return _checkpoint(folder, names)
    except OSError as error:
        raise WeightsError(
            f"cannot read {error.filename or folder}: {error.strerror}; give a folder whose files can be read"
        ) from error


def entries_of(path: Path) -> list[Entry]:
    """Return the tensors of one weight file, in file order.

    Raises:
        WeightsError: if the format is unknown, or the file is damaged or truncated.
    """
    source = WeightFile(path, path.stat().st_size)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    for form in FORMATS:
        if form.recognises(head):
            return form.read_entries(source)
    if head.startswith(b"version https"):
        raise WeightsError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`")
    raise WeightsError(
        f"{path} ({source.num_bytes} bytes) has an unknown format, not {' or '.join(form.TITLE for form in FORMATS)}: "
        "download or save it again"
    )


def _checkpoint(folder: Path, names: list[str]) -> Checkpoint:
    entries: dict[str, Entry] = {}
    for name in names:
        for entry in entries_of(folder / name):
            if entry.name in entries:
                raise WeightsError(
                    f"`{entry.name}` is both in {entries[entry.name].file.name} and in {name} of {folder}, but must be "
                    "in one file: download or save the checkpoint again"
                )
            entries[entry.name] = entry
    if not entries:
        raise WeightsError(f"{', '.join(names)} in {folder} hold no tensor: save the model again")
    metadata = {key: value for name in names for key, value in _metadata(folder / name).items()}
    entries, coded = with_coded(entries, metadata)
    return Checkpoint(
        folder, MappingProxyType(entries), tuple(folder / name for name in names), MappingProxyType(coded)
    )


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata in the header of a safetensors file; empty for other formats."""
    with path.open("rb") as file:
        is_headed = safetensors.recognises(file.read(HEAD_BYTES))
    return safetensors.read_metadata(WeightFile(path, path.stat().st_size)) if is_headed else {}


def _file_names(folder: Path) -> list[str]:
    for name in _SINGLE:
        if (folder / name).exists():
            return [name]
        if (folder / (name + _INDEX)).exists():
            return _shards(folder, name + _INDEX)
    found = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "nothing"
    raise WeightsError(
        f"{folder} has no weights (looked for {', '.join(_SINGLE)} and an index of either; found {shown}): give a "
        "folder that `save_pretrained` wrote"
    )


def _shards(folder: Path, index: str) -> list[str]:
    path = folder / index
    places = _weight_map(path)
    for name in sorted(set(places.values())):
        if PurePath(name).name != name:
            raise WeightsError(f"{path} names {name}, which is not in its folder: download the checkpoint again")
        if not (folder / name).exists():
            tensors = [tensor for tensor, place in places.items() if place == name]
            raise WeightsError(
                f"{path} names {name}, which is missing in {folder} (with {len(tensors)} tensors, such as "
                f"{tensors[0]}): download that file"
            )
    return sorted(set(places.values()))


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, by the tensor's name, as listed in an index."""
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise WeightsError(f"{path} has {path.stat().st_size} bytes, too many for an index: download it again")
    try:
        index: Any = json.loads(path.read_bytes())
        places: dict[str, str] = index["weight_map"]
        is_map = isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path} is not an index of weights ({error}): download it again") from None
    if not is_map or not places:
        raise WeightsError(f"{path} has no `weight_map` of names: download it again")
    return places
