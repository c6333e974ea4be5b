"""What tells one state of some files from another without reading them: part of the name of all that is made of them.

Does NOT notice an edit that keeps a file's size and time and misses the sample of its content.
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
    """A file of known size and time."""

    @property
    def path(self) -> str:
        """Where it is."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    @property
    def mtime_ns(self) -> int:
        """When it was last written to."""
        ...


def identity_of(files: Sequence[Located]) -> list[tuple[str, int, int, bytes]]:
    """Return the path, size, modification time and a sample of the content (hashed) of each file.

    The sample is 4 KiB at the head, the tail and six places between, of up to 64 files; of more, the head of 64 that
    are evenly spaced. An edit that keeps size and time and misses the sample is not noticed.

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
    """Return when each file was last changed in any way, which no program can set back as it can the time of writing.

    It also tells a file that got another name or other rights: for what is cheap to make again. Of copies it is 0.

    Raises:
        DataError: if a file cannot be looked at.
    """
    try:
        return [0 if is_copy(file.path) else os.stat(file.path).st_ctime_ns for file in files]
    except OSError as error:
        raise DataError(f"cannot read {error.filename} ({error.strerror}): put it back, or allow reading it") from None


def _sample(file: Located, num_places: int) -> bytes:
    hasher = xxhash.xxh3_128()
    if is_copy(file.path):  # its time is made of what the store says of it, and it need not be here
        return b""
    try:
        with open(file.path, "rb", buffering=0) as opened:
            last = max(file.num_bytes - _SAMPLE_BYTES, 0)
            for place in sorted({last * number // max(num_places - 1, 1) for number in range(num_places)}):
                hasher.update(os.pread(opened.fileno(), _SAMPLE_BYTES, place))
    except OSError as error:
        raise DataError(f"cannot read {file.path} ({error.strerror}): put it back, or allow reading it") from None
    return hasher.digest()
