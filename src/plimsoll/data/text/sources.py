"""The files of a corpus: files, folders (recursively) and globs (``**`` works), sorted, each file once.

Files on object stores and web servers (`plimsoll.files.remote`) are given by their addresses and follow the local
files.

Hidden files and folders (``.git``) below a folder are left out, as with a glob, and counted. Links to folders are
followed. Each folder and each file is read once, however many links lead to it. Files that are found but not read are
listed with the reason: further names of a file, folders that match a pattern, pipes, sockets and devices. Whether a
file is text is decided when it is read.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plimsoll.errors import DataError
from plimsoll.files.addresses import is_remote
from plimsoll.files.remote import find as find_remote
from plimsoll.files.remote import name_of

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class SourceFile(NamedTuple):
    """A file to read. ``named``: the user gave this very path, so a fault in the file is an error, not skipped."""

    path: str
    num_bytes: int
    mtime_ns: int
    named: bool


class SourceFiles(NamedTuple):
    """The files to read, and the paths of all other files found, each with the reason why it is not read.

    ``num_hidden`` counts the hidden files and folders below the given folders.
    """

    files: list[SourceFile]
    left_out: dict[str, str]
    num_hidden: int = 0


def find_files(sources: tuple[str, ...], copies: Path | None = None, skips: bool = False) -> SourceFiles:
    """Return the regular files of the sources, by absolute path, sorted by path.

    A remote file has the path of its present or future copy below ``copies``. Without ``copies``, its path is its
    address.

    Args:
        sources: files, folders, globs and addresses.
        copies: the folder for copies of remote files; ``None`` if the files will not be read.
        skips: whether a folder that cannot be listed is left out and reported; otherwise it is an error.

    Raises:
        DataError: if a source matches no file, a folder cannot be listed, or a file is a broken link or was just
            removed.
    """
    search = _Search(skips)
    named: dict[str, bool] = {}
    elsewhere: dict[str, SourceFile] = {}
    for source in sources:
        if is_remote(source):
            for file in find_remote(source, copies):
                elsewhere.setdefault(file.path, SourceFile(*file))
        elif os.path.isfile(source):
            named[os.path.abspath(source)] = True
        else:
            found = search.files_of(source)
            if not found:
                raise DataError(_nothing_found(source, search.left_out, bool(search.hidden)))
            for path in found:
                named.setdefault(os.path.abspath(path), False)
    here = _once_each([_source_file(path, named[path]) for path in sorted(named)], search.left_out)
    files = here + sorted(elsewhere.values(), key=lambda file: name_of(file.path))
    left_out = {os.path.abspath(path): why for path, why in sorted(search.left_out.items())}
    return SourceFiles(files, left_out, len({os.path.abspath(path) for path in search.hidden} - set(named)))


class _Search:
    """Search in folders that records hidden files and files that are left out."""

    def __init__(self, skips: bool) -> None:
        self._skips = skips
        self.left_out: dict[str, str] = {}
        self.hidden: set[str] = set()

    def files_of(self, source: str) -> list[str]:
        """Return the files below a folder, or the files that match a pattern."""
        if os.path.isdir(source):
            found = list(self._expanded(source, ["**"]))
        elif glob.has_magic(source):
            parts = source.split("/")
            first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
            found = list(self._expanded("/".join([*parts[:first], ""]), parts[first:]))
        else:
            found = [source] if _is_there(source) else []
        modes = {path: _status(path).st_mode for path in found}
        files = [path for path, mode in modes.items() if stat.S_ISREG(mode)]
        within = {str(parent) for path in files for parent in Path(path).parents}
        for path, mode in modes.items():
            if stat.S_ISDIR(mode):
                if str(Path(path)) not in within and self._entries(path):
                    why = f"it is a folder, but the pattern must match files: {path}/** matches all files below it"
                    self.left_out.setdefault(path, why)
            elif not stat.S_ISREG(mode):
                kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "no file")
                self.left_out[path] = f"it is {kind}, which can be read only once: write its content into a file"
        return files

    def _expanded(self, folder: str, parts: list[str]) -> Iterator[str]:
        """Yield the paths in a folder that match the parts of a pattern, as `glob` does."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            for below in self._folders(folder):
                if rest:
                    yield from self._expanded(below, rest)
                else:
                    entries = self._entries(below, with_hidden=True)
                    self.hidden |= {entry.path for entry in entries if _is_hidden(entry)}
                    yield from (entry.path for entry in entries if not _is_hidden(entry) and not _is_folder(entry))
            return
        if not glob.has_magic(part):
            paths = [os.path.join(folder, part)]
        else:
            names = {entry.name: entry.path for entry in self._entries(folder, part.startswith("."))}
            paths = [names[name] for name in fnmatch.filter(names, part)]
        for path in filter(_is_there, paths):
            if not rest:
                yield path
            elif os.path.isdir(path):
                yield from self._expanded(path, rest)

    def _folders(self, top: str) -> Iterator[str]:
        """Yield a folder and all folders below it, each once. Linked folders come last."""
        seen: dict[tuple[int, int], str] = {}
        waiting, linked = [top], list[str]()
        while waiting or linked:
            folder = waiting.pop() if waiting else linked.pop(0)
            status = _status(folder or ".")
            first = seen.setdefault((status.st_dev, status.st_ino), folder)
            if first != folder:
                self.left_out[folder] = f"it is another name of the folder {first}, which is read"
                continue
            yield folder
            for entry in self._entries(folder):
                if _is_folder(entry):
                    (linked if entry.is_symlink() else waiting).append(entry.path)

    def _entries(self, folder: str, with_hidden: bool = False) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder or ".") as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            why = f"its files cannot be listed ({error.strerror}): allow reading it, or leave it out of the sources"
            if not self._skips:
                raise DataError(f"cannot use the folder {folder}: {why}; set on_error: skip to leave it out") from None
            self.left_out[folder] = why
            return []
        return [entry for entry in found if with_hidden or not _is_hidden(entry)]


def _is_hidden(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _is_there(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"cannot look for {path} ({error.strerror}): allow looking into its folder") from None
    return True


def _once_each(files: list[SourceFile], left_out: dict[str, str]) -> list[SourceFile]:
    """Return each file by one of its names: the name given by the user, else a name without links, else the first."""
    names: dict[tuple[object, ...], list[SourceFile]] = {}
    for file in files:
        status = _status(file.path)
        place = (status.st_dev, status.st_ino) if status.st_ino else (os.path.realpath(file.path),)
        names.setdefault((*place, file.num_bytes, file.mtime_ns), []).append(file)
    others = set()
    for same in names.values():
        if len(same) > 1:
            first = min(same, key=lambda file: (not file.named, os.path.realpath(file.path) != file.path, file.path))
            others |= {file.path for file in same if file != first}
            left_out |= {
                file.path: f"it is another name of {first.path}, which is read" for file in same if file != first
            }
    return [file for file in files if file.path not in others]


def _nothing_found(source: str, left_out: dict[str, str], has_hidden: bool) -> str:
    if left_out:
        path, why = next(iter(left_out.items()))
        return f"{source} matches no file to read; {path} is left out: {why}"
    where = f" (relative to {Path.cwd()})" if not os.path.isabs(source) else ""
    if os.path.isdir(source):
        which = "no file that is not hidden" if has_hidden else "no file"
        return f"the folder {source}{where} holds {which}: put text files into it, or give another folder"
    if glob.has_magic(source):
        return f"no file matches {source}{where}: check the pattern; `folder/**/*.txt` matches every .txt file below"
    return f"there is no file or folder {source}{where}: check the path"


def _source_file(path: str, named: bool) -> SourceFile:
    status = _status(path)
    return SourceFile(path, status.st_size, status.st_mtime_ns, named)


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        # Raise, because leaving a text out silently would change the training.
        if os.path.islink(path):
            why = f"it is a symbolic link to {os.readlink(path)} ({error.strerror}): remove the link, or put that back"
        else:
            why = f"it was there a moment ago ({error.strerror}): start again when the folder no longer changes"
        if isinstance(error, PermissionError):
            why = f"{error.strerror}: allow looking into its folder"
        raise DataError(f"cannot use {path} as text: {why}") from None
