"""Conversion of parquet, Arrow and `datasets` tables, batch by batch, to a store (`plimsoll.data.formats.packed`).

The text is one or several columns of strings. The label is a column of strings, whole numbers or booleans;
``ClassLabel`` columns give the names of their classes. Memory: one batch of rows. Not handled: nested columns, and
streaming data sets. The functions of `datasets` used here are public, except ``Dataset._fingerprint``, which identifies
the content of a data set and its transformations.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
from numpy.typing import NDArray

from plimsoll.data.formats import Reading
from plimsoll.data.formats.helpers.columns import MOST_LABELS, NO_LABEL, listed, text_columns
from plimsoll.data.formats.packed import CODES_FILE, ENDS_FILE, NAMES_FILE, TEXTS_FILE
from plimsoll.data.text.index_rows import MOST_SKIPPED_LISTED
from plimsoll.errors import DataError
from plimsoll.files.store import Facts, require_space
from plimsoll.records.job import HUB_PREFIX
from plimsoll.records.units import format_bytes

_BATCH_ROWS = 1000
_BUFFER_BYTES = 1 << 20

Batch = tuple[Any, int]  # a pyarrow.RecordBatch or Table, and the bytes of the table read so far


class Table(NamedTuple):
    """A table that can be read once with ``batches(columns)``.

    ``class_names`` maps each column of class indices to the names of its classes.
    """

    name: str
    schema: Any
    num_bytes: int
    batches: Callable[[list[str]], Iterator[Batch]]
    class_names: dict[str, list[str]]


@contextmanager
def open_parquet(path: str, name: str) -> Iterator[Table]:
    """Open a parquet file, of which at most one batch of rows and its pages are in memory."""
    num_bytes = Path(path).stat().st_size
    with _said(name), pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        num_rows = max(file.metadata.num_rows, 1)

        def batches(columns: list[str]) -> Iterator[Batch]:
            done_rows = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                done_rows += batch.num_rows
                yield batch, num_bytes * done_rows // num_rows

        yield Table(name, file.schema_arrow, num_bytes, batches, {})


@contextmanager
def open_arrow(path: str, name: str) -> Iterator[Table]:
    """Open an Arrow file of either kind: with a footer ("file", Feather) or without ("stream")."""
    with _said(name), pyarrow.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        num_bytes = source.size()

        def batches(columns: list[str]) -> Iterator[Batch]:
            num_batches = reader.num_record_batches if is_file else 0
            read = map(reader.get_batch, range(num_batches)) if is_file else iter(reader)
            for number, batch in enumerate(read, start=1):
                done_bytes = num_bytes * number // num_batches if is_file else source.tell()
                for begin in range(0, batch.num_rows, _BATCH_ROWS):
                    yield batch.select(columns).slice(begin, _BATCH_ROWS), done_bytes

        yield Table(name, reader.schema, num_bytes, batches, {})


OPENERS = {"parquet": open_parquet, "arrow": open_arrow}  # by format


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Convert errors that Arrow raises inside the block to `DataError`."""
    try:
        yield
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"cannot read {name} ({error}): write it again, or leave it out") from None


def load_dataset(source: Any) -> tuple[Any, str]:
    """Return a Hugging Face data set and its name, from an object, a saved folder or ``hf:NAME``.

    Args:
        source: a `datasets.Dataset`, a folder, or ``hf:NAME[:CONFIG[:SPLIT]]``.

    Raises:
        DataError: if `datasets` is not installed, or cannot load it.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source} is a data set of Hugging Face, and datasets is not installed: run "
            "pip install 'torch-plimsoll[datasets]'"
        ) from None
    name, split = str(source), None
    if not isinstance(source, str):
        dataset, name = source, f"the data set {getattr(source, '_fingerprint', type(source).__name__)}"
    else:
        place, config, split = [*source.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
        try:
            if any(Path(place, mark).is_file() for mark in ("state.json", "dataset_dict.json")):
                dataset = datasets.load_from_disk(place)
            else:
                dataset = datasets.load_dataset(place, config or None, split=split or "train")
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot load {source} ({error}): check the name, and write hf:NAME:CONFIG:SPLIT (without a "
                "configuration hf:NAME::test)"
            ) from None
    if isinstance(dataset, dict):
        if (split or "train") not in dataset:
            raise DataError(f"{name} has the splits {listed(list(dataset))}: choose one with hf:<folder>::<split>")
        dataset = dataset[split or "train"]
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"{name} is a {type(dataset).__name__}: give a path, hf:NAME, or a Dataset without streaming")
    return dataset, name


def open_dataset(dataset: Any, name: str) -> Table:
    """Return a data set as a table. The order of selected or shuffled rows is kept."""
    num_rows, num_bytes = max(len(dataset), 1), max(dataset.data.nbytes, 1)

    def batches(columns: list[str]) -> Iterator[Batch]:
        chosen = dataset.select_columns(columns).with_format("arrow")
        for number, batch in enumerate(chosen.iter(_BATCH_ROWS), start=1):
            yield batch, num_bytes * min(number * _BATCH_ROWS, num_rows) // num_rows

    classes = {column: feature.names for column, feature in dataset.features.items() if hasattr(feature, "names")}
    return Table(name, dataset.features.arrow_schema, num_bytes, batches, classes)


def pack(folder: Path, table: Table, reading: Reading, show: Callable[[int], None]) -> Facts:
    """Write the texts of a table and their classes into a store. Return the skipped rows.

    Args:
        folder: the folder of the store.
        table: the table to read.
        reading: the columns, and the rules for faulty rows.
        show: called with the bytes of the table read so far.

    Raises:
        DataError: if a column is missing or has another type, or at the first row without a text if faults are not
            skipped.
    """
    try:
        columns = text_columns(reading, table.schema.names, strings_of(table.schema))
    except DataError as error:
        raise DataError(f"cannot use {table.name}: {error}") from None
    for column in columns:
        if not _is_of_strings(table.schema.field(column).type):
            kind = table.schema.field(column).type
            raise DataError(f"the column {column!r} of {table.name} holds {kind} and no strings: give a column of text")
    wanted = list(dict.fromkeys([*columns, *filter(None, [reading.label])]))
    packing = _Packing(table, reading)
    with (
        (folder / TEXTS_FILE).open("wb") as texts,
        (folder / ENDS_FILE).open("wb") as ends,
        (folder / CODES_FILE).open("wb") as codes,
    ):
        for batch, done_bytes in table.batches(wanted):
            rows = packing.rows_of(batch, columns)
            texts.write(rows.raw)
            ends.write(rows.ends.tobytes())
            codes.write(rows.codes.tobytes() if reading.label is not None else b"")
            show(done_bytes)
            left_share = max(table.num_bytes / max(done_bytes, 1) - 1, 0)
            require_space(folder, int(left_share * (texts.tell() + ends.tell() + codes.tell())))
    (folder / NAMES_FILE).write_text(json.dumps(list(packing.names)))
    return {"skipped": packing.skipped, "num_skipped": packing.num_skipped}


def strings_of(schema: Any) -> list[str]:
    """Return the names of the columns that hold strings."""
    return [field.name for field in schema if _is_of_strings(field.type)]


def _is_of_strings(kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _is_of_strings(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


class _Rows(NamedTuple):
    """Texts end to end, their end offsets in the store, and their class codes."""

    raw: memoryview
    ends: NDArray[np.int64]
    codes: NDArray[np.uint32]


class _Packing:
    """The state of writing a store: the class names, counts and skipped rows so far."""

    def __init__(self, table: Table, reading: Reading) -> None:
        self._table, self._reading = table, reading
        self._num_rows = self._num_bytes = self.num_skipped = 0
        self.names: dict[str | int, int] = {}
        self.skipped: list[str] = []

    def rows_of(self, batch: Any, columns: tuple[str, ...]) -> _Rows:
        """Return the non-empty texts of a batch."""
        compute = pyarrow.compute
        parts = [_one_chunk(batch.column(column)).cast(pyarrow.large_string()) for column in columns]
        newline = pyarrow.scalar("\n", pyarrow.large_string())
        texts = parts[0] if len(parts) == 1 else compute.binary_join_element_wise(*parts, newline)
        lengths = compute.fill_null(compute.binary_length(texts), 0).to_numpy(zero_copy_only=False)
        kept = lengths > 0
        for row in np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False)).tolist():
            self._meet(row, "has no text (null)", kept)
        for row in np.flatnonzero(lengths > self._reading.max_text_bytes).tolist():
            limit = format_bytes(self._reading.max_text_bytes)
            self._meet(row, f"has more than {limit} of text ({lengths[row]} bytes)", kept)
        for row in _not_utf8(texts):
            self._meet(row, "is not UTF-8", kept)
        codes = self._codes(batch, kept)
        self._num_rows += len(texts)
        if not kept.all():
            texts, codes = texts.filter(pyarrow.array(kept)), codes[kept]
        _, offsets_buffer, data = texts.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        raw = memoryview(data)[offsets[0] : offsets[-1]] if len(texts) else memoryview(b"")
        ends = offsets[1:] - offsets[0] + self._num_bytes
        self._num_bytes += len(raw)
        return _Rows(raw, ends, codes)

    def _codes(self, batch: Any, kept: NDArray[np.bool_]) -> NDArray[np.uint32]:
        """Return the class code of each row of a batch. Rows without a class are faults."""
        label = self._reading.label
        if label is None:
            return np.zeros(len(kept), np.uint32)
        encoded = _one_chunk(batch.column(label)).dictionary_encode()
        classes = self._table.class_names.get(label)
        names = [self._class_name(value, classes) for value in encoded.dictionary.to_pylist()]
        places = encoded.indices.fill_null(len(names)).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(np.array([*(name is None for name in names), True])[places] & kept).tolist():
            self._meet(row, f"has no class in {label!r}", kept)
        used = set(places[kept].tolist())
        numbers = array("I", [0] * (len(names) + 1))
        for place, name in enumerate(names):
            if place in used and name is not None:
                numbers[place] = self.names.setdefault(name, len(self.names))
        if len(self.names) > MOST_LABELS:
            raise DataError(
                f"the column {label!r} of {self._table.name} has more than {MOST_LABELS} different values, which "
                "is too many for classes: name the column with the class labels"
            )
        codes: NDArray[np.uint32] = np.array(numbers, np.uint32)[places]
        return codes

    def _class_name(self, value: Any, classes: list[str] | None) -> str | int | None:
        if value is None or isinstance(value, bool):
            return None if value is None else str(value).lower()
        if str(value) == NO_LABEL:
            return None
        if not isinstance(value, str | int):
            raise DataError(
                f"the column {self._reading.label!r} of {self._table.name} holds {value!r}: give one of strings or "
                "whole numbers"
            )
        if classes is None or isinstance(value, str):
            return value
        return classes[value] if 0 <= value < len(classes) else None  # -1 is "no class" in datasets

    def _meet(self, row: int, why: str, kept: NDArray[np.bool_]) -> None:
        why = f"row {self._num_rows + row + 1} {why}"
        if self._reading.on_error == "stop":
            raise DataError(
                f"cannot use {self._table.name} as text: {why}: correct it, or set on_error: skip to leave out "
                "unreadable texts"
            )
        kept[row] = False
        self.num_skipped += 1
        if len(self.skipped) < MOST_SKIPPED_LISTED:
            self.skipped.append(why)


def _one_chunk(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column


def _not_utf8(texts: Any) -> Iterator[int]:
    """Yield the indices of the texts that are not UTF-8."""
    try:
        texts.validate(full=True)
    except pyarrow.ArrowInvalid:
        for row, raw in enumerate(texts.cast(pyarrow.large_binary()).to_pylist()):
            try:
                (raw or b"").decode("utf-8")
            except UnicodeDecodeError:
                yield row
