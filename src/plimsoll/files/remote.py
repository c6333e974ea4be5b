"""Files of object stores and web servers, as local copies in a folder of bounded size.

A source with a protocol (``s3://bucket/part-*.jsonl``, ``https://host/a.txt``) is opened by fsspec, which also has the
credentials. `find` gives each file a place in a folder, and writes a note beside it of where it is from. A copy is made
when somebody reads at that place (`held`); it is whole or not there. Where copies would take more than
``PLIMSOLL_COPIES`` (20GiB), those go that were opened longest ago; a process that has one open reads on. A file that
has changed since it was found, or while it was copied, is refused.

Does NOT cover a folder on a file system without ``flock``, and space that is freed only when another process closes
what it has open.
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
_MOST_NAME_CHARACTERS = 60  # of four bytes each, and with what is put behind it
_WAIT_SECONDS, _POLL_SECONDS = 600, 0.1
_WORTH_A_HEAD_BYTES = 8 << 20  # what is smaller is copied as quickly as its first bytes


Told = Callable[[int], None]
"""Called with the bytes of a file that have come, while it is copied."""


def _silent(num_bytes: int) -> None:
    """Tell nobody."""


class RemoteFile(NamedTuple):
    """A file elsewhere: where its copy is, or will be, and what tells its state from another."""

    path: str
    num_bytes: int
    mtime_ns: int
    is_named: bool


def find(source: str, folder: Path | None) -> list[RemoteFile]:
    """Return the files that an address means: itself, all below it, or those that match it.

    Args:
        source: an address; ``*`` and ``**`` work where the store can list.
        folder: where copies go; ``None``: places are the addresses, for who does not read.

    Raises:
        DataError: if there is no file, the store cannot be reached, or a package is missing that knows the protocol.
        OutputError: if the folder cannot be written.
    """
    files, is_named = look(source)
    return [_file(file, folder, is_named) for file in files]


def name_of(path: str) -> str:
    """Return what the user calls a file: the address of a copy, without its secrets."""
    note = _note_of(path)
    return path if note is None else shown(note["address"])


def is_copy(path: str) -> bool:
    """Whether a path is the place of a copy, there or not."""
    return os.path.exists(path + _NOTE)


@contextmanager
def held(path: str, told: Told = _silent) -> Iterator[str]:
    """Have a file where it is, copied now if it was not or has gone; it stays there while the block runs.

    Args:
        path: of a copy, or of any other file, which is left alone.
        told: how much of it has come.

    Raises:
        DataError: if the file cannot be copied, or is not what it was.
        OutputError: if the folder cannot hold it.
    """
    note = _note_of(path)
    if note is None:
        yield path
        return
    place = Path(path)
    while True:
        with _locked(place, fcntl.LOCK_SH):
            if _is_whole(place, note):
                with suppress(OSError):  # used now
                    os.utime(place, ns=(time.time_ns(), note["mtime_ns"]))
                yield path
                return
        with _locked(place, fcntl.LOCK_EX):
            note = _note_of(path) or note
            if not _is_whole(place, note):
                _copy(place, note, told)


def descriptor_of(path: str, told: Told = _silent) -> int:
    """Return a descriptor for reading a file, copied now if it was not or has gone.

    Raises:
        OSError: if it cannot be opened.
        DataError, OutputError: as `held`.
    """
    with held(path, told):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def head_of(path: str, num_bytes: int) -> bytes | None:
    """Return the first bytes of a file elsewhere that is large and not copied yet; ``None`` of all others."""
    note = _note_of(path)
    if note is None or note["num_bytes"] < _WORTH_A_HEAD_BYTES or _is_whole(Path(path), note):
        return None
    return head(note["address"], min(num_bytes, note["num_bytes"]))


# -- places ------------------------------------------------------------------------------------------------------------


def _file(file: Seen, folder: Path | None, is_named: bool) -> RemoteFile:
    # Made of what the store says of the file, so that a file that changed there is another one for an index or a
    # checkpoint. In whole seconds, which any file system keeps; it is no time.
    mtime_ns = int(file.mark, 16) % (1 << 31) * 10**9
    if folder is None:
        return RemoteFile(file.address, file.num_bytes, mtime_ns, is_named)
    own = folder / xxhash.xxh3_128_hexdigest(file.address.encode())[:16]
    place = own / (file_name(file.address)[-_MOST_NAME_CHARACTERS:] or "file")
    note = {"address": file.address, "num_bytes": file.num_bytes, "mark": file.mark, "mtime_ns": mtime_ns}
    if _note_of(str(place)) != note:
        with _said(own):
            own.mkdir(parents=True, exist_ok=True)
        # Only its owner may read it: the address can have secrets.
        write_atomically(Path(str(place) + _NOTE), json.dumps(note).encode(), "--cache", mode=0o600)
    return RemoteFile(str(place), file.num_bytes, mtime_ns, is_named)


def _note_of(path: str) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = json.loads(Path(path + _NOTE).read_bytes())
    except (OSError, ValueError):
        return None
    return note


def _is_whole(place: Path, note: dict[str, Any]) -> bool:
    """Whether a copy is there, and of the state that its note is of."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (note["num_bytes"], note["mtime_ns"])


# -- copying -----------------------------------------------------------------------------------------------------------

# Why not fsspec's own `filecache`, `simplecache` or `blockcache` (looked at in 2026.9)? They have no limit on their
# size: files go when they are older than some days (`clear_expired_cache`), whoever reads them. They write a copy under
# its final name, so that a process that is killed leaves half a file, which the next one reads, and so does one that
# comes while it is written (fsspec issue 639; pull request 2075 makes it a rename, where it is released). A source that
# has changed is copied anew without a word (`check_files`), where an index or a checkpoint of the old one must be
# refused. `blockcache` gives a file object and no path that could be mapped, and fills it as it is read.


def _copy(place: Path, note: dict[str, Any], told: Told) -> None:
    """Make a copy, where nobody else does."""
    temporary = place.with_name(place.name + _TEMPORARY)
    try:
        with _said(place):
            place.unlink(missing_ok=True)
            temporary.unlink(missing_ok=True)  # of a process that was killed
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
            f"{shown(note['address'])} has changed since it was first looked at: put it back, or start anew in another "
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
    """Reserve the space of a file, letting the copies go that were opened longest ago; others are waited for."""
    num_bytes, name, folder = note["num_bytes"], shown(note["address"]), temporary.parents[1]
    most_bytes = parse_bytes(os.environ.get(_LIMIT, _DEFAULT_LIMIT))
    if num_bytes > most_bytes:
        raise OutputError(
            f"{name} has {format_bytes(num_bytes)}, copies may take {format_bytes(most_bytes)}: set {_LIMIT} to more"
        )
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until:
        with _locked(folder / "copies", fcntl.LOCK_EX):
            lacking_bytes = _let_go(folder, num_bytes, most_bytes)
            if lacking_bytes <= 0:
                with temporary.open("wb") as file:
                    file.truncate(num_bytes)  # so that others count it
                return
        time.sleep(_POLL_SECONDS)
    raise OutputError(
        f"no room for {name}: copies in use leave {format_bytes(num_bytes - lacking_bytes)} of "
        f"{format_bytes(most_bytes)}, and it has {format_bytes(num_bytes)}: set {_LIMIT} to more, or free some space "
        f"under {folder}"
    )


def _let_go(folder: Path, num_bytes: int, most_bytes: int) -> int:
    """Remove copies until so much more may be there and the disk has space; return the bytes that are still lacking."""
    copies, taken_bytes = [], 0
    for note in folder.glob(f"*/*{_NOTE}"):
        place = Path(str(note).removesuffix(_NOTE))
        for path in (place.with_name(place.name + _TEMPORARY), place):
            with suppress(FileNotFoundError):
                status = path.stat()
                is_copied = path == place
                copies.append((is_copied, status.st_atime_ns, status.st_size, path, place))
                taken_bytes += status.st_size
    for _, _, size, path, place in sorted(copies):  # first of all what killed processes have left
        lacking_bytes = _lacking_bytes(folder, num_bytes, most_bytes - taken_bytes)
        if lacking_bytes <= 0:
            return lacking_bytes
        with _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
            if is_mine:
                with suppress(FileNotFoundError):  # what was being copied is whole by now, and still there
                    path.unlink()
                    taken_bytes -= size
    return _lacking_bytes(folder, num_bytes, most_bytes - taken_bytes)


def _lacking_bytes(folder: Path, num_bytes: int, allowed_bytes: int) -> int:
    return num_bytes - min(allowed_bytes, shutil.disk_usage(folder).free)


@contextmanager
def _locked(place: Path, how: int) -> Iterator[bool]:
    """Keep others from a place; without waiting (``LOCK_NB``) it is said whether that was possible."""
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
    except OSError:  # copies that are there can be read in a folder that cannot be written
        if not path.exists():
            raise
        return path.open("rb")


@contextmanager
def _said(place: Path) -> Iterator[None]:
    """Say an error of the disk in our words."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {place}: {error.strerror}; free some space, or give another --cache") from None
