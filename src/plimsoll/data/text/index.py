"""Opening of texts in files that are larger than memory: converts files if necessary, and builds an index once.

Every file is read once, in parallel: it is checked, hashed and split into texts. The beginnings of the texts are
written to the index (8 bytes per text, memory-mapped; see `plimsoll.data.text.index_rows`). The texts stay in their
files. The index is valid for the paths, sizes, times (of modification and of inode change) and a sample of the content
of the files. If any of these differs, a new index is built. Memory: about 500 bytes per file, nothing per text.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from plimsoll.data.formats import Layout, Reading
from plimsoll.data.formats.helpers.scanning import text_begin
from plimsoll.data.text.convert import PlainFile, plain_files
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index_rows import FileFault, Rows, Source, sorted_names
from plimsoll.data.text.scan import Scanned, format_named, scan_files
from plimsoll.errors import DataError, PlimsollWarning
from plimsoll.files.addresses import shown
from plimsoll.files.checksums import require_whole
from plimsoll.files.identity import changes_of, identity_of
from plimsoll.files.remote import descriptor_of, is_copy
from plimsoll.files.store import Facts, Progress, Store, kept, silent
from plimsoll.records.units import format_bytes


@kept
def open_corpus(sources: Sequence[Any], reading: Reading, cache: Path, progress: Progress = silent) -> Store[Corpus]:
    """Open the texts of files, folders, globs and data sets. They are indexed first if new or changed.

    Args:
        sources: files, folders and globs (`plimsoll.data.text.sources`), and data sets (`plimsoll.data.text.convert`).
        reading: the rules for the texts of the files. Texts of zero bytes are left out.
        cache: the folder for the index and for converted files; created if missing.
        progress: called with the stages ``"copy"`` (of remote files), ``"convert"`` and ``"index"``.

    Raises:
        DataError: if a source is missing, if only white space is found, or if a file or row cannot be read. With
            ``on_error="skip"``, unreadable rows and files are left out and listed in `Corpus.skipped`. Binary files in
            a folder or matched by a glob are always left out and listed.
        OutputError: if the index cannot be written.
    """
    files, left_out, num_hidden = plain_files(sources, reading, cache, progress)
    identity = [
        reading,
        sorted(left_out.items()),
        *((file.name, file.format, file.is_named) for file in files),
        *identity_of(files),
        changes_of(files),
    ]
    folder = cache / f"index-{xxhash.xxh3_128_hexdigest(repr(identity).encode())[:16]}"
    named = [shown(source) if isinstance(source, str) else "the data set" for source in sources]
    write = partial(_write_index, shown=named, files=files, left_out=left_out, reading=reading, progress=progress)
    return Store(folder, write, partial(_opened, num_hidden=num_hidden))


def _opened(folder: Path, facts: Facts, num_hidden: int) -> Corpus:
    """Open an index, and warn about rows and files that look wrong."""
    if facts["whole_files"]:
        warnings.warn(_whole_files(facts), PlimsollWarning, stacklevel=2)
    if num_suspects := facts.get("num_suspects", 0):
        rows = f"{num_suspects:,} rows may" if num_suspects > 1 else "a row may"
        said = f"{rows} include other rows by mistake, the first: {facts['first_suspect']}"
        warnings.warn(said, PlimsollWarning, stacklevel=2)
    return Corpus(
        folder, facts | {"num_hidden": num_hidden}
    )  # the current number: hidden files do not change the index


class _Looked(NamedTuple):
    """A file that can be scanned. ``first`` is the offset of the first byte that may begin a text."""

    file: PlainFile
    layout: Layout
    first: int


def _write_index(  # noqa: PLR0917 -- the inputs and the options of an index
    folder: Path,
    shown: list[str],
    files: list[PlainFile],
    left_out: dict[str, str],
    reading: Reading,
    progress: Progress,
) -> Facts:
    with closing(Rows(folder, reading)) as rows:
        for name, why in left_out.items():
            rows.list_skipped(name, why)
        writing = _Writing(rows, reading, progress)
        facts = writing.write(files)
        if writing.is_blank or not sum(facts["num_texts"]):
            raise DataError(_no_text(shown, files, writing, rows))
        return facts


class _Writing:
    """The writer of an index. It records the indexed files and a hash of their content."""

    def __init__(self, rows: Rows, reading: Reading, progress: Progress) -> None:
        self._rows, self._reading, self._progress = rows, reading, progress
        self._kept: list[tuple[_Looked, int]] = []  # each file with the number of its texts
        self._left_out: list[str] = []
        self._whole_files: list[tuple[str, int, str]] = []  # text files with a fault: name, bytes, fault
        self._key = xxhash.xxh3_128()
        self._copied_bytes = 0
        self.is_blank, self.num_refused, self.num_only_header = True, 0, 0

    def write(self, files: list[PlainFile]) -> Facts:
        """Scan the files, write the index, and return the metadata to store with it."""
        looked = [one for file in files if (one := self._look(file)) is not None]
        total_bytes, done_bytes, waiting = sum(one.file.num_bytes for one in looked), 0, iter(looked)
        scanned = (self._at_hand(one, total_bytes) for one in looked)
        with closing(scan_files(scanned, self._reading.max_text_bytes, total_bytes)) as parts:
            for part, found in parts:
                if part.begin == 0:
                    current, is_open, digests = next(waiting), True, xxhash.xxh3_128()
                    file = current.file
                    is_optional = file.format == "text" and not file.is_named
                    self._rows.begin(Source(file.name, is_optional, current.layout, file.num_bytes), current.first)
                if isinstance(found, DataError):
                    raise found
                try:
                    if is_open:
                        digests.update(found.digest)
                        self._rows.add(part, found)
                        self.is_blank = self.is_blank and found.is_blank
                    if is_open and part.end == part.num_file_bytes:
                        self._end(current, self._rows.end(part.path), digests.digest())
                except FileFault as fault:
                    is_open = False
                    self._rows.leave_out(str(fault))
                    self._whole_files.append((current.file.name, current.file.num_bytes, str(fault)))
                    self._refuse(current.file)
                done_bytes += part.end - part.begin
                self._progress("index", done_bytes, total_bytes)
        return self._facts()

    def _at_hand(self, looked: _Looked, total_bytes: int) -> Scanned:
        """Return the file to scan. A remote file is first copied here, because only this process can show progress."""
        file = looked.file

        def told(num_bytes: int) -> None:
            self._progress("copy", self._copied_bytes + num_bytes, total_bytes)

        if is_copy(file.path):
            os.close(descriptor_of(file.path, told))
        self._copied_bytes += file.num_bytes
        return Scanned(file.path, file.num_bytes, looked.first, looked.layout)

    def _look(self, file: PlainFile) -> _Looked | None:
        for why in file.skipped:
            self._rows.list_skipped(file.name, why)
        self._rows.num_skipped += file.num_skipped - len(file.skipped)
        if not file.num_bytes:
            self._left_out.append(file.name)
            return None
        if file.path != file.name and not is_copy(file.path):
            require_whole(Path(file.path).parent if file.format in {"packed", "tagged"} else Path(file.path))
        try:
            return _Looked(file, *format_named(file.format).look(file.path, self._reading))
        except DataError as error:
            if self._reading.on_error == "stop" and (file.is_named or file.format != "text"):
                raise DataError(f"cannot use {file.name} as text: {error}") from None
            self._rows.list_skipped(file.name, str(error))
            self._refuse(file)
            return None

    def _refuse(self, file: PlainFile) -> None:
        self.num_refused += 1
        self._left_out.append(file.name)

    def _end(self, looked: _Looked, num_texts: int, digest: bytes) -> None:
        if num_texts:
            self._kept.append((looked, num_texts))
            content = (looked.layout._replace(label=None), looked.file.num_bytes)
            self._key.update(repr(content).encode() + digest)
        else:
            self._left_out.append(looked.file.name)
            self.num_only_header += looked.layout.format == "csv" and looked.first > text_begin(looked.file.path)

    def _facts(self) -> Facts:
        label_names = self._rows.finish()
        self._key.update(self._rows.places.digest())
        layouts: dict[Layout, int] = {}
        files = [looked.file for looked, _ in self._kept]
        return {
            "paths": [file.name for file in files],
            "stored": {str(number): file.path for number, file in enumerate(files) if file.path != file.name},
            "sizes": [file.num_bytes for file in files],
            "mtimes": [file.mtime_ns for file in files],
            "num_texts": [num_texts for _, num_texts in self._kept],
            "layout_numbers": [layouts.setdefault(one.layout, len(layouts)) for one, _ in self._kept],
            "layouts": list(layouts),
            "skipped": self._rows.skipped,
            "num_skipped": self._rows.num_skipped,
            "left_out": sorted(self._left_out),
            "whole_files": _summary(self._whole_files),
            "num_suspects": self._rows.num_suspects,
            "first_suspect": self._rows.first_suspect,
            "label_names": label_names,
            "tags": _counted_tags(files),
            "key": self._key.hexdigest(),
        }


def _summary(whole_files: list[tuple[str, int, str]]) -> Facts:
    """Return the number, size and first fault of the text files left out as a whole; an empty dict if none is."""
    if not whole_files:
        return {}
    name, _, why = whole_files[0]
    num_bytes = sum(num_bytes for _, num_bytes, _ in whole_files)
    return {"number": len(whole_files), "num_bytes": num_bytes, "name": name, "why": why}


def _whole_files(facts: Facts) -> str:
    """Return the warning that files are left out because of a fault in them."""
    out, num_kept = facts["whole_files"], len(facts["paths"])
    which = f"{out['number']} of {out['number'] + num_kept} files"
    return (
        f"{which} ({format_bytes(out['num_bytes'])}) are left out entirely because of a fault in each, the first: "
        f"{out['name']}: {out['why']}; to leave out only their faulty texts, set on_error: skip"
    )


def _counted_tags(files: Sequence[PlainFile]) -> dict[str, int]:
    """Return the number of occurrences of each tag in all files, in the order of the names."""
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(dict(file.tags))
    return {name: counts[name] for name in sorted_names(list(counts))}


def _no_text(shown: list[str], files: list[PlainFile], writing: _Writing, rows: Rows) -> str:
    where, num_refused = ", ".join(shown), writing.num_refused
    if files and num_refused == len(files):
        which = "the only file" if len(files) == 1 else f"none of the {len(files)} files"
        negated = " not" if len(files) == 1 else ""
        return f"{which} of {where} is{negated} UTF-8 text, the first: {rows.skipped[0]}"
    if rows.num_skipped > num_refused:
        return (
            f"nothing is left of {where}: {rows.num_skipped} rows or files were skipped, the first: {rows.skipped[0]}"
        )
    num_texts = len(files) - num_refused
    if writing.num_only_header:
        which = f"{writing.num_only_header} of the {num_texts} files of {where} have"
        which = f"the only file of {where} has" if num_texts == 1 else which
        return (
            f"{which} a header and no row with text below it, and there is no other text: add rows, or set header: "
            "false if the first row is a text"
        )
    which = f"the only text file of {where} holds" if num_texts == 1 else f"the {num_texts} text files of {where} hold"
    return f"{which} nothing but white space: give files with text"
