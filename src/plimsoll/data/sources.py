"""Which files a corpus is made of: files, folders (with all below them) and globs (``**`` works), sorted, once each.

Also of object stores and web servers (`plimsoll.copies`), by their addresses; these come behind the files.

Hidden files and folders (``.git``) below a folder are left out, as a glob does; symbolic links to folders are not
followed. What is text is decided where the files are read.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plimsoll.addresses import is_remote
from plimsoll.copies import find as find_remote
from plimsoll.copies import name_of
from plimsoll.errors import DataError


class SourceFile(NamedTuple):
    """A file to read; ``named`` if the user gave this very path: a fault in it is an error, elsewhere it is skipped."""

    path: str
    num_bytes: int
    mtime_ns: int
    named: bool


def find_files(sources: tuple[str, ...], copies: Path | None = None) -> list[SourceFile]:
    """Return the regular files that the sources mean, by absolute path, in the order of their paths.

    Of files elsewhere the path is where their copy is, or will be, below ``copies``; without it, their address.

    Raises:
        DataError: if a source means no file, or a file that it means is a link to nothing or has just been removed.
    """
    named: dict[str, bool] = {}
    elsewhere: dict[str, SourceFile] = {}
    for source in sources:
        if is_remote(source):
            for file in find_remote(source, copies):
                elsewhere.setdefault(file.path, SourceFile(*file))
            continue
        if os.path.isfile(source):
            named[os.path.abspath(source)] = True
            continue
        found = [path for path in _below(source) if stat.S_ISREG(_status(path).st_mode)]
        if not found:
            raise DataError(_nothing_found(source))
        for path in found:
            named.setdefault(os.path.abspath(path), False)
    here = [_source_file(path, named[path]) for path in sorted(named)]
    return here + sorted(elsewhere.values(), key=lambda file: name_of(file.path))


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
