"""Makes files that can be indexed of what cannot: gzip, zstd, parquet, Arrow, and data sets of Hugging Face.

Each is converted once, into a folder of the cache: a compressed file to what it holds, a table to the store
`plimsoll.data.formats.packed`. Both stream, so memory is bounded; what is not whole leaves nothing behind. Formats are
told by the names of files, those of compressed ones without ``.gz`` or ``.zst``. Sources beyond files are a
`datasets.Dataset`, a folder written by its ``save_to_disk``, and ``hf:NAME[:CONFIG[:SPLIT]]``, which goes through
`datasets.load_dataset` (``hf:imdb::test`` has no configuration; without a split it is ``train``).
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import xxhash

from plimsoll.addresses import is_remote
from plimsoll.copies import Told, descriptor_of, held, name_of
from plimsoll.data.formats import Reading, packed
from plimsoll.data.sources import SourceFile, find_files
from plimsoll.errors import DataError
from plimsoll.identity import identity_of
from plimsoll.records.job import HUB_PREFIX
from plimsoll.store import Facts, Progress, require_space, stored

if TYPE_CHECKING:
    from plimsoll.data.tables import Table

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_TABLES = ("parquet", "arrow")
_COMPRESSED = (".gz", ".zst")
_COPY_BYTES = 1 << 20


class PlainFile(NamedTuple):
    """A file that can be indexed; ``name`` is what the user calls it, ``path`` where its bytes are.

    ``skipped`` are the rows that were left out where it was converted (the first 100), ``num_skipped`` how many;
    ``tags`` of its words and how often each occurs.
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


def plain_files(sources: Sequence[Any], reading: Reading, cache: Path, progress: Progress) -> list[PlainFile]:
    """Return the files of all sources in the order of their paths, then the data sets; converted where needed.

    Raises:
        DataError: if a source is missing or cannot be read.
        OutputError: if the cache cannot be written.
    """
    of_datasets = [source for source in sources if _is_dataset(source)]
    paths = tuple(str(source) for source in sources if not _is_dataset(source))
    files = find_files(paths, cache / "copies") if paths else []
    report = _Report(progress, sum(file.num_bytes for file in files if reading.is_tagged or is_converted(file.path)))
    plain = [_plain(file, reading, cache, report) for file in files]
    return plain + [_of_dataset(source, reading, cache, progress) for source in of_datasets]


class _Report:
    """Adds up what is converted and passes it on."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress, self._total_bytes, self._before_bytes = progress, total_bytes, 0

    def show(self, done_bytes: int) -> None:
        """Say how far the present file is."""
        self._progress("convert", min(self._before_bytes + done_bytes, self._total_bytes), self._total_bytes)

    def copied(self, num_bytes: int) -> None:
        """Say how much has come of the present file, which is elsewhere."""
        self._progress("copy", min(self._before_bytes + num_bytes, self._total_bytes), self._total_bytes)

    def end(self, file: SourceFile) -> None:
        """Go on to the next file."""
        self._before_bytes += file.num_bytes


def format_of(path: str) -> str:
    """Return the format that the name of a file means."""
    return _SUFFIXES.get(os.path.splitext(_uncompressed(path))[1].lower(), "text")


def _uncompressed(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    return stem if suffix.lower() in _COMPRESSED else path


def is_converted(path: str) -> bool:
    """Return whether the file of this name is compressed or a table, of which a part of the bytes says nothing."""
    return _uncompressed(path) != path or format_of(path) in _TABLES


def _is_dataset(source: Any) -> bool:
    if not isinstance(source, str | os.PathLike):
        return True
    saved = (Path(source, "dataset_dict.json"), Path(source, "state.json"))
    if is_remote(str(source)):
        return False
    return str(source).startswith(HUB_PREFIX) or any(path.is_file() for path in saved)


def _plain(file: SourceFile, reading: Reading, cache: Path, report: _Report) -> PlainFile:
    path, form = file.path, format_of(file.path)
    if not file.num_bytes or not (reading.is_tagged or is_converted(path)):
        return PlainFile(name_of(path), path, file.num_bytes, file.mtime_ns, file.named, form)
    if _uncompressed(path) != path:
        name = "data" + os.path.splitext(_uncompressed(path))[1].lower()
        folder = cache / f"plain-{_hash(identity_of([file]))}"
        stored(folder, partial(_decompress, source=file, name=name, report=report))
        path = str((folder / name).absolute())
    facts: Facts = {}
    if form in _TABLES or reading.is_tagged:
        plain_file = file if path == file.path else find_files((path,))[0]
        folder = cache / f"packed-{_hash([identity_of([plain_file]), _asked(reading)])}"
        pack_file = _pack_tagged if reading.is_tagged else _pack_file
        facts = stored(folder, partial(pack_file, path=path, name=name_of(file.path), reading=reading, report=report))
        path, form = str((folder / packed.TEXTS_FILE).absolute()), _form_of_store(reading)
    report.end(file)
    return _as_plain(name_of(file.path), path, file.named, form, facts)


def _as_plain(name: str, path: str, is_named: bool, form: str, facts: Facts) -> PlainFile:
    status = os.stat(path)
    skipped, num_skipped = tuple(facts.get("skipped", ())), facts.get("num_skipped", 0)
    tags = tuple((tag, count) for tag, count in facts.get("tags", ()))
    return PlainFile(name, path, status.st_size, status.st_mtime_ns, is_named, form, skipped, num_skipped, tags)


def _asked(reading: Reading) -> tuple[Any, ...]:
    """Return what of a reading says what a table is converted to."""
    asked = (reading.columns, reading.label, reading.on_error, reading.max_text_bytes)
    return (*asked, "tagged") if reading.is_tagged else asked


def _form_of_store(reading: Reading) -> str:
    return "tagged" if reading.is_tagged else "packed"


def _hash(identity: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(identity).encode())[:16]


def _decompress(folder: Path, source: SourceFile, name: str, report: _Report) -> Facts:
    """Write what a compressed file holds."""
    try:
        with open(descriptor_of(source.path, report.copied), "rb") as compressed, (folder / name).open("wb") as plain:
            for chunk in chunks_of(source.path, compressed):
                plain.write(chunk)
                done_bytes = compressed.tell()
                report.show(done_bytes)
                left_share = max(source.num_bytes / max(done_bytes, 1) - 1, 0)
                require_space(folder, int(left_share * plain.tell()))
    except Torn as error:
        raise DataError(
            f"cannot unpack {name_of(source.path)}: {error}; download or write it again, or leave it out"
        ) from None
    return {}


class Torn(Exception):
    """A compressed file cannot be unpacked."""


def chunks_of(path: str, compressed: IO[bytes]) -> Iterator[bytes]:
    """Yield what a compressed file holds, about a mebibyte at a time.

    Raises:
        Torn: if it is not whole.
    """
    import pyarrow

    if path.lower().endswith(".gz"):
        opened: Any = gzip.GzipFile(fileobj=compressed)
    else:
        opened = pyarrow.CompressedInputStream(pyarrow.PythonFile(compressed, "r"), "zstd")
    with opened:
        while True:
            try:
                chunk = opened.read(_COPY_BYTES)
            except (OSError, EOFError, zlib.error, pyarrow.ArrowInvalid) as error:
                raise Torn(str(error)) from None
            if not chunk:
                return
            yield chunk


def _pack_file(folder: Path, path: str, name: str, reading: Reading, report: _Report) -> Facts:
    from plimsoll.data.tables import pack

    with _table(path, name, report.copied) as table:
        return pack(folder, table, reading, report.show)


@contextmanager
def _table(path: str, name: str, told: Told) -> Iterator[Table]:
    """Open a table, which may be a copy: it stays while it is read."""
    from plimsoll.data.tables import open_arrow, open_parquet

    with held(path, told), (open_parquet if format_of(path) == "parquet" else open_arrow)(path, name) as table:
        yield table


def _pack_tagged(folder: Path, path: str, name: str, reading: Reading, report: _Report) -> Facts:
    from plimsoll.data.sentences import conll_sentences, json_sentences, pack_sentences, table_sentences

    form = format_of(path)
    if path.lower().endswith(".csv"):
        raise DataError(
            f"{name} is csv, whose cells hold no lists of words: write it as JSON lines, or with a word and its tag in "
            "each line, separated by a tab, as .conll"
        )
    if form not in _TABLES:
        os.close(descriptor_of(path, report.copied))
        read = json_sentences if form == "jsonl" else conll_sentences
        try:
            return pack_sentences(folder, read(path, reading), name, reading, report.show)
        except OSError as error:
            raise DataError(f"cannot read {name} ({error.strerror}): check the disk, or leave the file out") from None
    with _table(path, name, report.copied) as table:
        return pack_sentences(folder, table_sentences(table, reading), table.name, reading, report.show)


def _of_dataset(source: Any, reading: Reading, cache: Path, progress: Progress) -> PlainFile:
    from plimsoll.data.tables import load_dataset, open_dataset, pack

    dataset, name = load_dataset(source)
    table = open_dataset(dataset, name)

    def write(folder: Path) -> Facts:
        def show(done_bytes: int) -> None:
            progress("convert", done_bytes, table.num_bytes)

        if not reading.is_tagged:
            return pack(folder, table, reading, show)
        from plimsoll.data.sentences import pack_sentences, table_sentences

        return pack_sentences(folder, table_sentences(table, reading), name, reading, show)

    folder = cache / f"packed-{_hash([dataset._fingerprint, _asked(reading)])}"
    facts = stored(folder, write)
    return _as_plain(name, str((folder / packed.TEXTS_FILE).absolute()), True, _form_of_store(reading), facts)
