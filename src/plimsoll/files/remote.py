"""Local copies of remote files, in a folder of bounded size.

fsspec opens sources with a protocol (``s3://bucket/part-*.jsonl``, ``https://host/a.txt``) and provides credentials.
`find` assigns each file a local path and stores its origin in a small file next to it. The file is downloaded when it
is first read (`held`), and appears only when complete. If copies exceed ``PLIMSOLL_COPIES`` (default 20GiB), the least
recently opened copies are deleted; a process that has a copy open can continue to read it. If a file has changed since
`find`, or changes during the download, an error is raised.

Not handled: folders on file systems without ``flock``, and disk space that another process holds through open files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from plimsoll.errors import DataError, OutputError
from plimsoll.files.addresses import Seen, file_name, head, look, pieces, shown
from plimsoll.records.base import write_atomically
from plimsoll.records.units import format_bytes, parse_bytes

_LIMIT, _DEFAULT_LIMIT = "PLIMSOLL_COPIES", "20GiB"
_NOTE, _LOCK, _TEMPORARY = ".from.json", ".lock", ".copying"
_MOST_NAME_CHARACTERS = 60  # up to four bytes each, and suffixes are added
_WAIT_SECONDS, _POLL_SECONDS = 600, 0.1
_WORTH_A_HEAD_BYTES = 8 << 20  # a smaller file downloads as quickly as its head


Told = Callable[[int], None]
"""Progress callback of a download, called with the number of bytes received."""


def _silent(num_bytes: int) -> None:
    """Ignore progress."""


class RemoteFile(NamedTuple):
    """A remote file: the path of its local copy, and the size and time that identify its version."""

    path: str
    num_bytes: int
    mtime_ns: int
    is_named: bool


def find(source: str, folder: Path | None) -> list[RemoteFile]:
    """Return the files at an address: the file itself, all files below a folder, or all matches of a pattern.

    Args:
        source: the address; ``*`` and ``**`` work if the store can list its files.
        folder: the folder for local copies. ``None``: return addresses as paths, if the files will not be read.

    Raises:
        DataError: if no file exists, the store is unreachable, or its protocol needs a package that is not installed.
        OutputError: if the folder is not writable.
    """
    files, is_named = look(source)
    return [_file(file, folder, is_named) for file in files]


def name_of(path: str) -> str:
    """Return the name of a file for messages: its path, or the address of a copy, without secrets."""
    note = _note_of(path)
    return path if note is None else shown(note["address"])


def is_copy(path: str) -> bool:
    """Return whether a path belongs to a local copy, downloaded or not."""
    return os.path.exists(path + _NOTE)


@contextmanager
def held(path: str, told: Told = _silent) -> Iterator[str]:
    """Download a remote file if necessary, yield the path of its copy, and keep the copy inside the block.

    Args:
        path: the path of a copy. Any other path is yielded unchanged.
        told: called with the number of bytes received so far.

    Raises:
        DataError: if the file cannot be downloaded, or has changed.
        OutputError: if the folder has too little space or is not writable.
    """
    note = _note_of(path)
    if note is None:
        yield path
        return
    place = Path(path)
    while True:
        with _locked(place, fcntl.LOCK_SH):
            if _is_whole(place, note):
                with suppress(OSError):  # mark it as recently used
                    os.utime(place, ns=(time.time_ns(), note["mtime_ns"]))
                yield path
                return
        with _locked(place, fcntl.LOCK_EX):
            note = _note_of(path) or note
            if not _is_whole(place, note):
                _copy(place, note, told)


def descriptor_of(path: str, told: Told = _silent) -> int:
    """Open a file for reading, after downloading it if necessary. Return its descriptor.

    Raises:
        OSError: if the file cannot be opened.
        DataError, OutputError: see `held`.
    """
    with held(path, told):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def head_of(path: str, num_bytes: int) -> bytes | None:
    """Return the first bytes of a large remote file that is not downloaded yet.

    Return ``None`` for any other file, which the caller opens as usual.
    """
    note = _note_of(path)
    if note is None or note["num_bytes"] < _WORTH_A_HEAD_BYTES or _is_whole(Path(path), note):
        return None
    return head(note["address"], min(num_bytes, note["num_bytes"]))


# -- places ------------------------------------------------------------------------------------------------------------


def _file(file: Seen, folder: Path | None, is_named: bool) -> RemoteFile:
    # Not a time, but derived from the version at the store, so that an index or checkpoint notices a changed file. It
    # is in whole seconds, which any file system can store.
    mtime_ns = int(file.mark, 16) % (1 << 31) * 10**9
    if folder is None:
        return RemoteFile(file.address, file.num_bytes, mtime_ns, is_named)
    own = folder / xxhash.xxh3_128_hexdigest(file.address.encode())[:16]
    place = own / (file_name(file.address)[-_MOST_NAME_CHARACTERS:] or "file")
    note = {"address": file.address, "num_bytes": file.num_bytes, "mark": file.mark, "mtime_ns": mtime_ns}
    if _note_of(str(place)) != note:
        with _said(own):
            own.mkdir(parents=True, exist_ok=True)
        # Readable only by its owner: the address may contain secrets.
        write_atomically(Path(str(place) + _NOTE), json.dumps(note).encode(), "--cache", mode=0o600)
    return RemoteFile(str(place), file.num_bytes, mtime_ns, is_named)


def _note_of(path: str) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = json.loads(Path(path + _NOTE).read_bytes())
    except (OSError, ValueError):
        return None
    return note


def _is_whole(place: Path, note: dict[str, Any]) -> bool:
    """Return whether a copy exists, in the version that its note (the file with its origin) records."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (note["num_bytes"], note["mtime_ns"])


# -- copying -----------------------------------------------------------------------------------------------------------

# Why not fsspec's own `filecache`, `simplecache` or `blockcache` (version 2026.9)? They have no size limit, and delete
# files by age (`clear_expired_cache`) even while they are read. They download to the final name, so other processes
# read incomplete files (fsspec issue 639; pull request 2075 adds a rename). They silently download a changed source
# again (`check_files`), although an index or checkpoint of the old version must be refused. `blockcache` returns a file
# object, but memory mapping needs a path.


def _copy(place: Path, note: dict[str, Any], told: Told) -> None:
    """Download a file to ``place``. The caller holds the lock of ``place``."""
    temporary = place.with_name(place.name + _TEMPORARY)
    try:
        with _said(place):
            place.unlink(missing_ok=True)
            temporary.unlink(missing_ok=True)  # left by a killed process
            _reserve(temporary, note)
        _require_same(note)
        _download(temporary, note, told)
        _require_same(note)
        with _said(place):
            os.utime(temporary, ns=(time.time_ns(), note["mtime_ns"]))
            temporary.rename(place)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _require_same(note: dict[str, Any]) -> None:
    files, _ = look(note["address"])
    if files[0].mark != note["mark"]:
        raise DataError(
            f"{shown(note['address'])} has changed since the run started: restore it, or start a new run in another "
            "--out"
        )


def _download(temporary: Path, note: dict[str, Any], told: Told) -> None:
    with _said(temporary), temporary.open("r+b") as file:
        for piece in pieces(note["address"], note["num_bytes"]):
            file.write(piece)
            told(file.tell())
        file.flush()
        os.fsync(file.fileno())


def _reserve(temporary: Path, note: dict[str, Any]) -> None:
    """Reserve space for a file: delete the least recently opened copies, and wait while too many are in use."""
    num_bytes, name, folder = note["num_bytes"], shown(note["address"]), temporary.parents[1]
    most_bytes = parse_bytes(os.environ.get(_LIMIT, _DEFAULT_LIMIT))
    if num_bytes > most_bytes:
        raise OutputError(
            f"{name} has {format_bytes(num_bytes)}, but local copies are limited to {format_bytes(most_bytes)}: "
            f"set {_LIMIT} to more"
        )
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until:
        with _locked(folder / "copies", fcntl.LOCK_EX):
            lacking_bytes = _let_go(folder, num_bytes, most_bytes)
            if lacking_bytes <= 0:
                with temporary.open("wb") as file:
                    file.truncate(num_bytes)  # makes other processes count it
                return
        time.sleep(_POLL_SECONDS)
    raise OutputError(
        f"not enough space for {name}: it has {format_bytes(num_bytes)}, but copies in use leave "
        f"{format_bytes(num_bytes - lacking_bytes)} of {format_bytes(most_bytes)}: set {_LIMIT} to more, or free some "
        f"space under {folder}"
    )


def _let_go(folder: Path, num_bytes: int, most_bytes: int) -> int:
    """Delete copies until ``num_bytes`` more bytes fit on the disk and into ``most_bytes``, the limit for all copies.

    Return how many bytes are still missing; 0 or a negative number if the bytes fit.
    """
    copies, taken_bytes = [], 0
    for note in folder.glob(f"*/*{_NOTE}"):
        place = Path(str(note).removesuffix(_NOTE))
        for path in (place.with_name(place.name + _TEMPORARY), place):
            with suppress(FileNotFoundError):
                status = path.stat()
                is_copied = path == place
                copies.append((is_copied, status.st_atime_ns, status.st_size, path, place))
                taken_bytes += status.st_size
    for _, _, size, path, place in sorted(copies):  # leftovers of killed processes first
        lacking_bytes = _lacking_bytes(folder, num_bytes, most_bytes - taken_bytes)
        if lacking_bytes <= 0:
            return lacking_bytes
        with _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
            if is_mine:
                with suppress(FileNotFoundError):  # a download may have finished meanwhile
                    path.unlink()
                    taken_bytes -= size
    return _lacking_bytes(folder, num_bytes, most_bytes - taken_bytes)


def _lacking_bytes(folder: Path, num_bytes: int, allowed_bytes: int) -> int:
    return num_bytes - min(allowed_bytes, shutil.disk_usage(folder).free)


@contextmanager
def _locked(place: Path, how: int) -> Iterator[bool]:
    """Lock a path during the block. Yield whether it was locked, which is always true without ``LOCK_NB``."""
    with _said(place):
        file = _lock_file(place)
    with file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            yield False
            return
        yield True


def _lock_file(place: Path) -> IO[bytes]:
    path = place.with_name(place.name + _LOCK)
    try:
        return path.open("ab")
    except OSError:  # existing copies are readable in a read-only folder
        if not path.exists():
            raise
        return path.open("rb")


@contextmanager
def _said(place: Path) -> Iterator[None]:
    """Convert errors of writing to the disk to `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {place}: {error.strerror}; free some space, or use another --cache") from None
