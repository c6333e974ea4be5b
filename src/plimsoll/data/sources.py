"""Which files a corpus is made of: files, folders (with all below them) and globs (``**`` works), sorted, once each.

Hidden files and folders (``.git``) below a folder are left out, as a glob does; symbolic links to folders are not
followed. What is text is decided where the files are read.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

from plimsoll.errors import DataError

_SAMPLED_FILES, _SAMPLED_PLACES, _SAMPLE_BYTES = 64, 8, 4 << 10


class SourceFile(NamedTuple):
    """A file to read; ``named`` if the user gave this very path: a fault in it is an error, elsewhere it is skipped."""

    path: str
    num_bytes: int
    mtime_ns: int
    named: bool


def find_files(sources: tuple[str, ...]) -> list[SourceFile]:
    """Return the regular files that the sources mean, by absolute path, in the order of their paths.

    Raises:
        DataError: if a source means no file, or a file that it means is a link to nothing or has just been removed.
    """
    named: dict[str, bool] = {}
    for source in sources:
        if os.path.isfile(source):
            named[os.path.abspath(source)] = True
            continue
        found = [path for path in _below(source) if stat.S_ISREG(_status(path).st_mode)]
        if not found:
            raise DataError(_nothing_found(source))
        for path in found:
            named.setdefault(os.path.abspath(path), False)
    return [_source_file(path, named[path]) for path in sorted(named)]


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


def _sample(file: Located, num_places: int) -> bytes:
    hasher = xxhash.xxh3_128()
    try:
        with open(file.path, "rb", buffering=0) as opened:
            last = max(file.num_bytes - _SAMPLE_BYTES, 0)
            for place in sorted({last * number // max(num_places - 1, 1) for number in range(num_places)}):
                hasher.update(os.pread(opened.fileno(), _SAMPLE_BYTES, place))
    except OSError as error:
        raise DataError(f"cannot read {file.path} ({error.strerror}): put it back, or allow reading it") from None
    return hasher.digest()


def _below(source: str) -> Iterator[str]:
    if not os.path.isdir(source):
        yield from glob.iglob(source, recursive=True)
        return
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _nothing_found(source: str) -> str:
    where = f" (relative to {Path.cwd()})" if not os.path.isabs(source) else ""
    if os.path.isdir(source):
        return f"the folder {source}{where} holds no file: put text files into it, or give another folder"
    if glob.has_magic(source):
        return f"no file matches {source}{where}: check the pattern; `folder/**/*.txt` means every .txt file below"
    return f"there is no file or folder {source}{where}: check the path"


def _source_file(path: str, named: bool) -> SourceFile:
    status = _status(path)
    return SourceFile(path, status.st_size, status.st_mtime_ns, named)


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        # Leaving a text out without a word would make it another training.
        if os.path.islink(path):
            why = f"it is a symbolic link to {os.readlink(path)} ({error.strerror}): remove the link, or put that back"
        else:
            why = f"it was there a moment ago ({error.strerror}): start again when the folder no longer changes"
        raise DataError(f"cannot use {path} as text: {why}") from None
