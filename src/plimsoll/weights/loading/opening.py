"""Open a checkpoint folder: which files it has, what their headers say, and what is wrong with them.

Looked for, in this order, as transformers does: ``model.safetensors``, its index, ``pytorch_model.bin``, its index. All
tensors of all files that an index names are there, also those that it does not name. Nothing but headers is read.
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
    """What a folder holds.

    Attributes:
        folder: where the files are.
        entries: the tensors by their names, in the order they lie in the files.
        files: the files of weights.
        coded: those of the entries that torchao wrote as several tensors, by their names.
    """

    folder: Path
    entries: Mapping[str, Entry]
    files: tuple[Path, ...]
    coded: Mapping[str, Coded] = field(default_factory=dict)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors; those that share their bytes are counted once."""
        places = {(entry.file, entry.offset, entry.num_bytes) for entry in self.entries.values()}
        return sum(num_bytes for _, _, num_bytes in places)

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max((entry.num_bytes for entry in self.entries.values()), default=0)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read what a checkpoint folder holds, from headers alone.

    Args:
        folder: with ``model.safetensors`` or ``pytorch_model.bin``, or the index of several such files.

    Raises:
        WeightsError: if there are no weights, or a file is missing, damaged, cut off, or needs code to be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder: give one that `save_pretrained` wrote")
    try:
        names = _file_names(folder)
        return _checkpoint(folder, names)
    except OSError as error:
        raise WeightsError(
            f"cannot read {error.filename or folder}: {error.strerror}; give a folder whose files can be read"
        ) from error


def entries_of(path: Path) -> list[Entry]:
    """List the tensors of one file of weights, in the order they lie in it.

    Raises:
        WeightsError: if it is of no known format, damaged, or cut off.
    """
    source = WeightFile(path, path.stat().st_size)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    for form in FORMATS:
        if form.recognises(head):
            return form.read_entries(source)
    if head.startswith(b"version https"):
        raise WeightsError(f"{path} is the pointer of a file in Git LFS, not the file: run `git lfs pull`")
    raise WeightsError(
        f"{path} ({source.num_bytes} bytes) is of no known format ({', '.join(form.TITLE for form in FORMATS)}): "
        "download or save it again"
    )


def _checkpoint(folder: Path, names: list[str]) -> Checkpoint:
    entries: dict[str, Entry] = {}
    for name in names:
        for entry in entries_of(folder / name):
            if entry.name in entries:
                raise WeightsError(
                    f"`{entry.name}` is both in {entries[entry.name].file.name} and in {name} of {folder}, and nothing "
                    "says which is right: download or save the checkpoint again"
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
    """What the header of a file says beside its tensors, which is where safetensors have it."""
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
        f"{folder} has no weights (looked for {', '.join(_SINGLE)} and an index of either; there is {shown}): give a "
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
                f"{path} names {name}, which is missing in {folder} (with {len(tensors)} tensors, {tensors[0]} among "
                "them): download that file"
            )
    return sorted(set(places.values()))


def _weight_map(path: Path) -> dict[str, str]:
    """Which file has which tensor, as an index says."""
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise WeightsError(f"{path} has {path.stat().st_size} bytes, which is no index: download it again")
    try:
        index: Any = json.loads(path.read_bytes())
        places: dict[str, str] = index["weight_map"]
        is_map = isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path} is no index of weights ({error}): download it again") from None
    if not is_map or not places:
        raise WeightsError(f"{path} has no `weight_map` of names: download it again")
    return places
