"""Stores: cache folders that are complete or do not exist.

A store is written under a temporary name. The manifest comes last, with the size of each file, a checksum of its first
64 KiB, and the *facts*: JSON metadata from the caller. Then all files are synced and the folder is renamed. A crash, a
kill or a full disk therefore leaves no incomplete store. It leaves a temporary folder only if the writer can resume
from it. Later damage beyond the head of a file is found when it is read (`plimsoll.files.checksums`).

One process writes a store at a time. Other processes wait for it, and use the result. This requires ``flock``, which
some network file systems lack. Unused stores are not removed: the cache folder may be deleted while no command runs.
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
    """A progress callback, called with a stage and the amount ``done`` of ``total``."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def stored(
    folder: Path,
    write: Callable[[Path], Facts],
    goes_on: bool = False,
    is_whole: Callable[[Facts], bool] = lambda facts: True,
) -> Facts:
    """Return the facts (metadata) of the store at ``folder``. If it is missing or damaged, write it first.

    Args:
        folder: the folder of the store.
        write: a function that fills an empty folder and returns JSON facts to store with the files.
        goes_on: whether ``write`` gets the files that an interrupted call left. It must then find out which files are
            complete.
        is_whole: a further check of an existing store. If it fails, the store is written again.

    Raises:
        OutputError: if the disk is full or the folder is not writable. No files are left behind, unless ``goes_on``.
    """
    facts = read_facts(folder)
    if facts is not None and is_whole(facts):
        return facts
    with _translated(folder), _locked(folder):
        facts = read_facts(folder)  # another process may have written it while this one waited
        return facts if facts is not None and is_whole(facts) else _written(folder, write, goes_on)


@dataclass(frozen=True)
class Store(Generic[T]):
    """A cached object in a folder, declared before it is known whether the folder exists.

    Attributes:
        folder: the folder. Its name is the cache key: it contains, or is a hash of, everything the content depends on.
        write: the function that fills the folder, see `stored`.
        open: the function that creates the object from the folder and the facts (metadata) stored in it.
        goes_on: True if an interrupted writer can resume.
    """

    folder: Path
    write: Callable[[Path], Facts]
    open: Callable[[Path, Facts], T]
    goes_on: bool = False

    @property
    def is_there(self) -> bool:
        """True if the store is complete in the cache."""
        return read_facts(self.folder) is not None

    def made(self) -> T:
        """Open the store, and write it first if it is not in the cache.

        Raises:
            OutputError: if the cache is not writable.
        """
        return self.open(self.folder, stored(self.folder, self.write, self.goes_on))


class kept(Generic[P, T]):
    """Decorator for a function that returns a `Store`. A call returns the object; `declare` returns the `Store`."""

    def __init__(self, declare: Callable[P, Store[T]]) -> None:
        self.declare = declare
        update_wrapper(self, declare)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the object, from the cache or newly written."""
        return self.declare(*args, **kwargs).made()


def read_facts(folder: Path) -> Facts | None:
    """Return the facts of the store at ``folder``, or ``None`` if it is missing, damaged or of another version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["version"] != _VERSION or manifest["files"] != _fingerprints(folder):
            return None
        facts: Facts = manifest["facts"]
        if manifest.get("seal", _seal(facts)) != _seal(facts):  # stores of earlier releases have no seal
            return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return facts


def kept_facts(folder: Path, what: str) -> Facts:
    """Return the facts of a store that must exist. The error calls its content ``what``.

    Raises:
        DataError: if the store is missing or damaged.
    """
    facts = read_facts(folder)
    if facts is None:
        raise DataError(
            f"the {what} {folder} are missing from the cache, or damaged: prepare them again, as --resume does"
        )
    return facts


def require_space(folder: Path, needed_bytes: int) -> None:
    """Check the free disk space in advance.

    Raises:
        OutputError: if the disk under ``folder`` has less than ``needed_bytes`` free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise OutputError(
            f"the cache needs about {format_bytes(needed_bytes)} more in {folder.parent}, but the disk has "
            f"{format_bytes(free_bytes)} free: free some space, or use a cache on another disk"
        )


def _written(folder: Path, write: Callable[[Path], Facts], goes_on: bool) -> Facts:
    temporary = folder.with_name(folder.name + ".part")
    if not goes_on:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process: this process holds the lock
    temporary.mkdir(exist_ok=goes_on)
    try:
        facts = write(temporary)
        write_sums(temporary)
        for path in temporary.iterdir():
            sync(path)
        manifest = {"version": _VERSION, "files": _fingerprints(temporary), "facts": facts, "seal": _seal(facts)}
        write_atomically(temporary / MANIFEST, json.dumps(manifest).encode(), "cache folder")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged store
        temporary.replace(folder)
        sync(folder.parent)
    finally:
        if not goes_on:
            shutil.rmtree(temporary, ignore_errors=True)
    return facts


def _seal(facts: Facts) -> int:
    return zlib.crc32(json.dumps(facts).encode())


def _fingerprints(folder: Path) -> dict[str, list[int]]:
    """Map the name of each file in a store to its size in bytes and the checksum of its first 64 KiB."""
    prints = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                prints[path.name] = [os.fstat(file.fileno()).st_size, zlib.crc32(file.read(BLOCK_BYTES))]
    return prints


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Convert errors of writing a store inside the block to `OutputError`."""
    try:
        yield
    except OSError as error:
        what = f"cannot write the cache {folder}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OutputError(f"{what}; free some space, or use a cache on another disk") from error
        raise OutputError(f"{what}; use a writable folder") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
