"""A folder of files that opens whole or not at all: how everything in the cache is kept.

A store is written under a temporary name, its manifest (each file's size and the checksum of its first 64 KiB, and
facts of the caller's) last, everything is synced, and the folder is renamed. So a crash, a kill or a full disk leaves
no store, and at most, where the writer can go on from it, the temporary folder. A byte that is changed later beyond the
head of a file is found by who reads it (`plimsoll.files.checksums`). One process writes a store at a time; others wait
for it and use its result (by ``flock``, which some network file systems lack). It does NOT remove a store that is no
longer needed: the cache folder may be deleted whenever nothing runs.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from plimsoll.errors import DataError, OutputError
from plimsoll.files.checksums import BLOCK_BYTES, MANIFEST, write_sums
from plimsoll.records.base import sync, write_atomically
from plimsoll.records.units import format_bytes

_VERSION = 1  # raise it when the meaning of any stored file changes: old stores are then written again

Facts = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T", covariant=True)  # noqa: PLC0105 -- it is in no public name


class Progress(Protocol):
    """Told how far a stage is: ``done`` of ``total``."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def stored(
    folder: Path,
    write: Callable[[Path], Facts],
    goes_on: bool = False,
    is_whole: Callable[[Facts], bool] = lambda facts: True,
) -> Facts:
    """Return the facts of the store at ``folder``; where there is none, or a torn one, let ``write`` fill it first.

    ``write`` gets an empty folder to put files into and returns the facts to keep with them (JSON). With ``goes_on`` it
    gets the folder as it left it when it was interrupted, and has to know itself which of it is good. ``is_whole`` may
    look closer at a store that is there than this module does: one that is not is written again.

    Raises:
        OutputError: if the disk is full or the folder cannot be written; nothing is left behind.
    """
    facts = read_facts(folder)
    if facts is not None and is_whole(facts):
        return facts
    with _translated(folder), _locked(folder):
        facts = read_facts(folder)  # another process may have written it while this one waited
        return facts if facts is not None and is_whole(facts) else _written(folder, write, goes_on)


@dataclass(frozen=True)
class Store(Generic[T]):
    """What is kept in a folder of the cache, declared before it is known whether it is there.

    Attributes:
        folder: where; its name is the cache key: it says, or is a hash of, all that the content depends on.
        write: fills it, as `stored` describes.
        open: makes of the folder and its facts what is asked for.
        goes_on: whether an interrupted writer goes on from what it left.
    """

    folder: Path
    write: Callable[[Path], Facts]
    open: Callable[[Path, Facts], T]
    goes_on: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the cache has all of it."""
        return read_facts(self.folder) is not None

    def made(self) -> T:
        """Open it; where it is not in the cache, let it be written first.

        Raises:
            OutputError: if the cache cannot be written.
        """
        return self.open(self.folder, stored(self.folder, self.write, self.goes_on))


class kept(Generic[P, T]):
    """A function that declares a `Store`: a call makes it and returns what it holds, `declare` returns the store."""

    def __init__(self, declare: Callable[P, Store[T]]) -> None:
        self.declare = declare
        update_wrapper(self, declare)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what is kept, from the cache or made now."""
        return self.declare(*args, **kwargs).made()


def read_facts(folder: Path) -> Facts | None:
    """Return the facts of the store at ``folder``, or ``None`` if it is missing, torn or of another version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["version"] != _VERSION or manifest["files"] != _fingerprints(folder):
            return None
        facts: Facts = manifest["facts"]
        if manifest.get("seal", _seal(facts)) != _seal(facts):  # stores of before have none
            return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return facts


def kept_facts(folder: Path, what: str) -> Facts:
    """Return the facts of a store that was written before; ``what`` it holds is said if it is no longer there.

    Raises:
        DataError: if it is gone or torn.
    """
    facts = read_facts(folder)
    if facts is None:
        raise DataError(f"the {what} {folder} are gone from the cache, or torn: prepare them again, as --resume does")
    return facts


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse early what cannot end well.

    Raises:
        OutputError: if the disk under ``folder`` has less than ``needed_bytes`` free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise OutputError(
            f"the cache needs about {format_bytes(needed_bytes)} more in {folder.parent}, but the disk has "
            f"{format_bytes(free_bytes)} free: free some space, or put the cache on another disk"
        )


def _written(folder: Path, write: Callable[[Path], Facts], goes_on: bool) -> Facts:
    temporary = folder.with_name(folder.name + ".part")
    if not goes_on:
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed: the lock is ours
    temporary.mkdir(exist_ok=goes_on)
    try:
        facts = write(temporary)
        write_sums(temporary)
        for path in temporary.iterdir():
            sync(path)
        manifest = {"version": _VERSION, "files": _fingerprints(temporary), "facts": facts, "seal": _seal(facts)}
        write_atomically(temporary / MANIFEST, json.dumps(manifest).encode(), "cache folder")
        shutil.rmtree(folder, ignore_errors=True)  # a torn one
        temporary.replace(folder)
        sync(folder.parent)
    finally:
        if not goes_on:
            shutil.rmtree(temporary, ignore_errors=True)
    return facts


def _seal(facts: Facts) -> int:
    return zlib.crc32(json.dumps(facts).encode())


def _fingerprints(folder: Path) -> dict[str, list[int]]:
    """Map each file to its size in bytes and the checksum of its head."""
    prints = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                prints[path.name] = [os.fstat(file.fileno()).st_size, zlib.crc32(file.read(BLOCK_BYTES))]
    return prints


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Say an error of the disk in our words; errors of reading the text are translated where the text is read."""
    try:
        yield
    except OSError as error:
        what = f"cannot write the cache {folder}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OutputError(f"{what}; free some space, or put the cache on another disk") from error
        raise OutputError(f"{what}; give a folder that can be written to") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
