"""Fingerprints of files, from their metadata and small samples of their content, for the keys of derived data.

An edit is not detected if it keeps the size and modification time and does not touch the sampled bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import xxhash

from plimsoll.errors import DataError
from plimsoll.files.remote import is_copy

_SAMPLED_FILES, _SAMPLED_PLACES, _SAMPLE_BYTES = 64, 8, 4 << 10


class Located(Protocol):
    """A file with known size and modification time."""

    @property
    def path(self) -> str:
        """The path of the file."""
        ...

    @property
    def num_bytes(self) -> int:
        """The size of the file in bytes."""
        ...

    @property
    def mtime_ns(self) -> int:
        """The modification time in nanoseconds."""
        ...


def identity_of(files: Sequence[Located]) -> list[tuple[str, int, int, bytes]]:
    """Return the path, size, modification time and the hash of a content sample of each file.

    Up to 64 files are sampled at the head, the tail and six places between, 4 KiB each. If there are more files, at
    most 64 evenly spaced files are sampled, at the head only.

    Raises:
        DataError: if a file cannot be read.
    """
    step = -(-len(files) // _SAMPLED_FILES)
    num_places = _SAMPLED_PLACES if step <= 1 else 1
    return [
        (file.path, file.num_bytes, file.mtime_ns, _sample(file, num_places) if number % step == 0 else b"")
        for number, file in enumerate(files)
    ]


def changes_of(files: Sequence[Located]) -> list[int]:
    """Return the inode change time of each file in nanoseconds; 0 for copies of remote files.

    Programs cannot reset this time. Renaming a file or changing its permissions changes it, too. So use it for results
    that are cheap to recreate.

    Raises:
        DataError: if a file is not accessible.
    """
    try:
        return [0 if is_copy(file.path) else os.stat(file.path).st_ctime_ns for file in files]
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename} ({error.strerror}): restore it, or change its permissions"
        ) from None


def _sample(file: Located, num_places: int) -> bytes:
    hasher = xxhash.xxh3_128()
    if is_copy(file.path):  # its time stands for the version at the store, and the copy may not exist yet
        return b""
    try:
        with open(file.path, "rb", buffering=0) as opened:
            last = max(file.num_bytes - _SAMPLE_BYTES, 0)
            for place in sorted({last * number // max(num_places - 1, 1) for number in range(num_places)}):
                hasher.update(os.pread(opened.fileno(), _SAMPLE_BYTES, place))
    except OSError as error:
        raise DataError(f"cannot read {file.path} ({error.strerror}): restore it, or change its permissions") from None
    return hasher.digest()
