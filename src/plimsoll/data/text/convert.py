"""Conversion of files that cannot be indexed: compressed files, archives, lists of JSON objects, tables and data sets.

Each source is converted once, into a folder of the cache. A compressed file becomes its content, and an archive its
files. A list of JSON objects becomes JSON lines, and a table becomes a store of `plimsoll.data.formats.packed`. All
conversions stream, so memory is bounded. An interrupted conversion leaves no files.

The name of a file determines its format; for compressed files, the name without ``.gz`` or similar
(`plimsoll.data.text.unpack`). Other sources are a `datasets.Dataset`, a folder written by its ``save_to_disk``, and
``hf:NAME[:CONFIG[:SPLIT]]``. The last form is loaded by `datasets.load_dataset` (``hf:imdb::test`` has no
configuration; the default split is ``train``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import xxhash

from plimsoll.data.formats import Reading, packed
from plimsoll.data.formats.helpers.records import HEAD_BYTES
from plimsoll.data.formats.helpers.scanning import read_head, text_begin
from plimsoll.data.text.json_values import are_lines, field_of_rows, json_lines
from plimsoll.data.text.sources import SourceFile, SourceFiles, find_files
from plimsoll.data.text.unpack import Torn, chunks_of, is_archive, members_of, plain_chunks, uncompressed
from plimsoll.errors import DataError
from plimsoll.files.addresses import is_remote
from plimsoll.files.checksums import Damaged, require_whole
from plimsoll.files.identity import changes_of, identity_of
from plimsoll.files.remote import Told, descriptor_of, held, is_copy, name_of
from plimsoll.files.store import Facts, Progress, require_space, stored
from plimsoll.records.job import HUB_PREFIX

if TYPE_CHECKING:
    from plimsoll.data.text.tables import Table

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_TABLES = ("parquet", "arrow")  # equal to `plimsoll.data.text.tables.OPENERS`, whose import needs pyarrow
_LINES_FILE = "data.jsonl"


class PlainFile(NamedTuple):
    """A file that can be indexed. ``name`` is the user's name for it, and ``path`` is the path of its bytes.

    ``is_named``: the user gave this very file. Unless faulty texts are skipped, a fault in it is then an error.
    For a converted file, ``skipped`` lists the first 100 rows that were left out, and ``num_skipped`` counts all.
    ``tags`` holds each tag of its words with its count.
    """

    name: str
    path: str
    num_bytes: int
    mtime_ns: int
    is_named: bool
    format: str
    skipped: tuple[str, ...] = ()
    num_skipped: int = 0
    tags: tuple[tuple[str, int], ...] = ()


class PlainFiles(NamedTuple):
    """The files that can be indexed, and the names of the files left out, each with the reason.

    ``num_hidden`` counts the hidden files and folders, which are not read.
    """

    files: list[PlainFile]
    left_out: dict[str, str]
    num_hidden: int


def plain_files(sources: Sequence[Any], reading: Reading, cache: Path, progress: Progress) -> PlainFiles:
    """Return the files of all sources sorted by path, then the data sets, all converted if necessary.

    Args:
        sources: paths, globs, addresses and data sets.
        reading: the rules for the texts of the files.
        cache: the folder for copies and converted files.
        progress: called with the stages ``"copy"`` and ``"convert"``.

    Raises:
        DataError: if a source is missing or cannot be read.
        OutputError: if the cache cannot be written.
    """
    of_datasets = [source for source in sources if _is_dataset(source)]
    paths = tuple(str(source) for source in sources if not _is_dataset(source))
    skips = reading.on_error == "skip"
    files, left_out, num_hidden = find_files(paths, cache / "copies", skips) if paths else SourceFiles([], {})
    total_bytes = sum(file.num_bytes for file in files if reading.is_tagged or is_converted(file.path))
    converting = _Converting(reading, cache, _Report(progress, total_bytes), left_out)
    plain: list[PlainFile] = []
    for file in files:
        try:
            plain += converting.plain(file, name_of(file.path))
        except Damaged:  # the cache is damaged, not a text, so `on_error` does not apply
            raise
        except DataError as error:
            if not skips:
                raise
            left_out[name_of(file.path)] = str(error)
        converting.report.end(file)
    plain += [_of_dataset(source, reading, cache, progress) for source in of_datasets]
    return PlainFiles(plain, left_out, num_hidden)


class _Report:
    """The progress of converting all files, reported to a callback."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress, self._total_bytes, self._before_bytes = progress, total_bytes, 0
        self._shown_bytes = 0

    def show(self, done_bytes: int) -> None:
        """Report how many bytes of the current file are converted. The shown total never decreases."""
        self._shown_bytes = max(self._shown_bytes, min(self._before_bytes + done_bytes, self._total_bytes))
        self._progress("convert", self._shown_bytes, self._total_bytes)

    def copied(self, num_bytes: int) -> None:
        """Report how many bytes of the current remote file are copied."""
        self._progress("copy", min(self._before_bytes + num_bytes, self._total_bytes), self._total_bytes)

    def end(self, file: SourceFile) -> None:
        """Count the current file as converted, and continue with the next file."""
        self._before_bytes += file.num_bytes


def format_of(path: str) -> str:
    """Return the format that the name of a file implies."""
    return _SUFFIXES.get(os.path.splitext(uncompressed(path))[1].lower(), "text")


def is_converted(path: str) -> bool:
    """Return whether a file of this name is converted first, because its texts cannot be read in place."""
    return uncompressed(path) != path or is_archive(path) or format_of(path) in {*_TABLES, "json"}


def _is_dataset(source: Any) -> bool:
    if not isinstance(source, str | os.PathLike):
        return True
    saved = (Path(source, "dataset_dict.json"), Path(source, "state.json"))
    if is_remote(str(source)):
        return False
    return str(source).startswith(HUB_PREFIX) or any(path.is_file() for path in saved)


class _Converting:
    """Converter of files that uses earlier results from the cache. It adds unusable archive members to ``left_out``."""

    def __init__(self, reading: Reading, cache: Path, report: _Report, left_out: dict[str, str]) -> None:
        self._reading, self._cache, self.report, self._left_out = reading, cache, report, left_out

    def plain(self, file: SourceFile, name: str) -> list[PlainFile]:
        """Return the files to index: the file itself, or the files converted from it. Messages call it ``name``."""
        form = format_of(name)
        if not file.num_bytes or not (self._reading.is_tagged or is_converted(name)):
            return [PlainFile(name, file.path, file.num_bytes, file.mtime_ns, file.named, form)]
        if uncompressed(name) != name:
            inner = "data" + os.path.splitext(uncompressed(name))[1].lower()
            file = self._made("plain", file, inner, partial(self._decompress, source=file, called=name, inner=inner))
        if is_archive(name):
            return self._members(file, name)
        if form == "json":
            form, file = "jsonl", self._lines(file, name)
        if form not in _TABLES and not self._reading.is_tagged:
            return [PlainFile(name, file.path, file.num_bytes, file.mtime_ns, file.named, form)]
        folder = self._cache / f"packed-{_hash([_states(file), _asked(self._reading)])}"
        facts = stored(folder, partial(self._pack, path=file.path, name=name, form=form))
        path = str((folder / packed.TEXTS_FILE).absolute())
        return [_as_plain(name, path, file.named, _form_of_store(self._reading), facts)]

    def _lines(self, file: SourceFile, name: str) -> SourceFile:
        """Return the file with the objects of ``file`` as JSON lines: ``file`` itself, or a converted file."""
        os.close(descriptor_of(file.path, self.report.copied))
        if are_lines(read_head(file.path, HEAD_BYTES)):
            return file
        # The requested columns decide whether an object is a row or contains the rows.
        asked = (self._reading.columns, self._reading.is_tagged)
        return self._made("lines", file, _LINES_FILE, partial(self._list_lines, source=file, called=name), asked)

    def _made(
        self, kind: str, source: SourceFile, name: str, write: Callable[[Path], Facts], asked: tuple[Any, ...] = ()
    ) -> SourceFile:
        """Return the file ``name`` that ``write`` converts from ``source``, from the cache or written now.

        ``kind`` and ``asked``, the settings that affect the conversion, are part of the cache key.
        """
        folder = self._cache / f"{kind}-{_hash([*_states(source), *asked])}"
        stored(folder, write)
        return _source(folder / name, source.named)

    def _members(self, file: SourceFile, name: str) -> list[PlainFile]:
        """Return the files to index that an archive contains."""
        folder = self._cache / f"archive-{_hash(_states(file))}"
        facts = stored(folder, partial(self._unpack, source=file, called=name))
        self._left_out |= {f"{name}/{inner}": why for inner, why in facts["left_out"]}
        named = file.named and len(facts["members"]) == 1
        return [
            plain
            for inner, stored_name in facts["members"]
            for plain in self.plain(_source(folder / stored_name, named), f"{name}/{inner}")
        ]

    def _decompress(self, folder: Path, source: SourceFile, called: str, inner: str) -> Facts:
        """Write the content of a compressed file."""
        with _unpacking(called), open(descriptor_of(source.path, self.report.copied), "rb") as compressed:
            self._write(folder / inner, chunks_of(called, compressed), source, compressed)
        return {}

    def _unpack(self, folder: Path, source: SourceFile, called: str) -> Facts:
        """Write the files of an archive into ``folder``. Return their names in the archive and in the folder."""
        members: list[tuple[str, str]] = []
        left_out: list[tuple[str, str]] = []
        _require_whole(source.path)
        with _unpacking(called), open(descriptor_of(source.path, self.report.copied), "rb") as archive:
            for name, chunks, why in members_of(archive, uncompressed(called)):
                if chunks is None or is_archive(name):
                    left_out.append((name, why or "it is an archive in an archive: unpack it"))
                    continue
                stored_name = f"{len(members)}{os.path.splitext(uncompressed(name))[1].lower()}"
                self._write(folder / stored_name, chunks, source, archive)
                members.append((name, stored_name))
        return {"members": sorted(members), "left_out": left_out}

    def _list_lines(self, folder: Path, source: SourceFile, called: str) -> Facts:
        """Write a list of JSON objects, which may be a field of one object, as JSON lines."""
        _require_whole(source.path)
        try:
            text_begin(source.path)
            with open(descriptor_of(source.path), "rb") as file:
                field = field_of_rows(plain_chunks(file), self._reading)
                file.seek(0)
                lines = json_lines(plain_chunks(file), self._reading.max_text_bytes, field)
                self._write(folder / _LINES_FILE, lines, source, file)
        except DataError as error:
            raise DataError(f"cannot use {called} as text: {error}") from None
        return {}

    def _write(self, path: Path, chunks: Iterator[bytes], source: SourceFile, file: IO[bytes]) -> None:
        """Write the converted chunks of a source into a file. Raise early if they are unlikely to fit on the disk."""
        with path.open("wb") as plain:
            for chunk in chunks:
                plain.write(chunk)
                done_bytes = file.tell()
                self.report.show(done_bytes)
                left_share = max(source.num_bytes / max(done_bytes, 1) - 1, 0)
                require_space(path.parent, int(left_share * plain.tell()))

    def _pack(self, folder: Path, path: str, name: str, form: str) -> Facts:
        from plimsoll.data.text.sentences import conll_sentences, json_sentences, pack_sentences

        if self._reading.is_tagged and uncompressed(name).lower().endswith(".csv"):
            raise DataError(
                f"{name} is csv, whose cells cannot hold lists of words: write it as JSON lines, or with a word and "
                "its tag in each line, separated by a tab, as .conll"
            )
        _require_whole(path)
        if form in _TABLES:
            with _table(path, name, form, self.report.copied) as table:
                return _pack_table(folder, table, table.name, self._reading, self.report.show)
        os.close(descriptor_of(path, self.report.copied))
        read = json_sentences if form == "jsonl" else conll_sentences
        try:
            return pack_sentences(folder, read(path, self._reading), name, self._reading, self.report.show)
        except OSError as error:
            raise DataError(f"cannot read {name} ({error.strerror}): check the disk, or leave the file out") from None


def _pack_table(folder: Path, table: Table, name: str, reading: Reading, show: Callable[[int], None]) -> Facts:
    """Write the texts of a table, or its words with tags, as a store that can be indexed."""
    from plimsoll.data.text.sentences import pack_sentences, table_sentences
    from plimsoll.data.text.tables import pack

    if reading.is_tagged:
        return pack_sentences(folder, table_sentences(table, reading), name, reading, show)
    return pack(folder, table, reading, show)


def _require_whole(path: str) -> None:
    """Verify the checksums of a file, unless it is a copy of a remote file."""
    if not is_copy(path):
        require_whole(Path(path))


def _source(path: Path, named: bool) -> SourceFile:
    status = os.stat(path)
    return SourceFile(str(path.absolute()), status.st_size, status.st_mtime_ns, named)


def _as_plain(name: str, path: str, is_named: bool, form: str, facts: Facts) -> PlainFile:
    status = os.stat(path)
    skipped, num_skipped = tuple(facts.get("skipped", ())), facts.get("num_skipped", 0)
    tags = tuple((tag, count) for tag, count in facts.get("tags", ()))
    return PlainFile(name, path, status.st_size, status.st_mtime_ns, is_named, form, skipped, num_skipped, tags)


def _asked(reading: Reading) -> tuple[Any, ...]:
    """Return the fields of ``reading`` that determine the conversion of a table."""
    asked = (reading.columns, reading.label, reading.on_error, reading.max_text_bytes)
    return (*asked, "tagged") if reading.is_tagged else asked


def _form_of_store(reading: Reading) -> str:
    return "tagged" if reading.is_tagged else "packed"


def _states(file: SourceFile) -> list[Any]:
    return [identity_of([file]), changes_of([file])]


def _hash(identity: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(identity).encode())[:16]


@contextmanager
def _unpacking(called: str) -> Iterator[None]:
    try:
        yield
    except Torn as error:
        raise DataError(f"cannot unpack {called}: {error}; download or write it again, or leave it out") from None


@contextmanager
def _table(path: str, name: str, form: str, told: Told) -> Iterator[Table]:
    """Open a table. If it is a copy of a remote file, the copy stays in the cache while it is read."""
    from plimsoll.data.text.tables import OPENERS

    with held(path, told), OPENERS[form](path, name) as table:
        yield table


def _of_dataset(source: Any, reading: Reading, cache: Path, progress: Progress) -> PlainFile:
    from plimsoll.data.text.tables import load_dataset, open_dataset

    dataset, name = load_dataset(source)
    table = open_dataset(dataset, name)

    def write(folder: Path) -> Facts:
        return _pack_table(folder, table, name, reading, lambda done: progress("convert", done, table.num_bytes))

    folder = cache / f"packed-{_hash([dataset._fingerprint, _asked(reading)])}"
    facts = stored(folder, write)
    return _as_plain(name, str((folder / packed.TEXTS_FILE).absolute()), True, _form_of_store(reading), facts)
