"""A file of word vectors written in another format: all words of it, or the rows of a subset.

The format is that of the name: ``.safetensors`` a table of ours, ``.npy`` an array with its words in ``.txt`` beside
it, ``.txt`` GloVe's text, ``.vec`` word2vec's text, ``.bin`` word2vec's binary. Numbers are written so that they are
read back bit for bit. The result appears under its name when it is whole. Vectors go through a table beside it, so
memory holds the words only; of words that occur twice the first is kept. Text formats cannot hold a word with a
newline, and word2vec's none with a space, which are an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.faults import FaultList
from plimsoll.embeddings.formats import in_precision
from plimsoll.embeddings.inspect import every_row
from plimsoll.embeddings.opening import open_file, read_parts
from plimsoll.embeddings.table import Precision, Table, TableWriter, open_table
from plimsoll.embeddings.wanted import MISSING
from plimsoll.errors import EmbeddingError, OutputError
from plimsoll.records.base import sync
from plimsoll.records.embeddings import Conversion
from plimsoll.store import Progress, silent

_BLOCK_ROWS = 1024


def convert(
    path: str | Path,
    output: Path,
    precision: Precision = "float32",
    strict: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Write all words of a file of word vectors in the format of the name ``output``.

    Args:
        path: the file, in any of the formats of `plimsoll.embeddings.formats`.
        output: the new file; what is there is replaced when the new one is whole.
        precision: in what the numbers are kept; text has them as they are in that precision.
        strict: whether the first thing that is wrong with the file is an error; otherwise it is left out.
        progress: called with the stage ``"vectors"``.

    Raises:
        EmbeddingError: if the file cannot be read, has no words, or a word cannot be written in that format.
        OutputError: if the output cannot be written, or its name says no format.
    """
    start_seconds = time.perf_counter()
    opened = open_file(Path(path))
    faults = FaultList(opened, strict)
    seen: set[bytes] = set()
    num_duplicates = 0
    with _beside(output) as folder:
        with TableWriter(folder / "table", opened.vectors.dimension, precision) as writer:
            for block, (indexes, parsed) in read_parts(opened.vectors, None, every_row):
                rows = in_precision(parsed, precision)
                faults.add(block, indexes, rows)
                wrong = {fault.at for fault in rows.faults}
                kept = []
                for index in sorted({*range(len(block.words))} - wrong):
                    num_duplicates += block.words[index] in seen
                    if block.words[index] not in seen:
                        seen.add(block.words[index])
                        kept.append(index)
                writer.add([block.words[index] for index in kept], rows.matrix[kept])
                progress("vectors", round(opened.vectors.share_read() * 1000), 1000)
        faults.end()
        if not seen:
            raise EmbeddingError(f"{opened.source.name} has 0 words that can be used: see `plimsoll embeddings info`")
        _write(open_table(folder / "table"), folder, output)
    return Conversion(
        source=opened.source.name,
        output=str(output),
        num_words=len(seen),
        dimension=opened.vectors.dimension,
        precision=precision,
        num_bytes=output.stat().st_size,
        num_duplicates=num_duplicates,
        faults=faults.counts(),
        seconds=time.perf_counter() - start_seconds,
    )


def export(table: Table, output: Path) -> None:
    """Write the rows of a table in the format of the name ``output``; only one of ours keeps rows without a vector.

    Raises:
        EmbeddingError: if a word cannot be written in that format.
        OutputError: as `convert`.
    """
    with _beside(output) as folder:
        if output.suffix == ".safetensors":
            shutil.copyfile(table.path, folder / "table")
        _write(table, folder, output)


def check_name(output: Path) -> None:
    """Refuse a name that says no format.

    Raises:
        OutputError: it lists those that do.
    """
    if output.suffix not in {".safetensors", *_WRITERS}:
        raise OutputError(
            f"cannot tell from the name {output} what to write: give -o a name in .safetensors, {', '.join(_WRITERS)}"
        )


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """Give a folder on the disk of the output, which is gone afterwards."""
    check_name(output)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}; free some space or give another -o") from error


def _write(table: Table, folder: Path, output: Path) -> None:
    made = {folder / "table": output}
    if output.suffix != ".safetensors":
        made = {folder / "new": output}
        if output.suffix == ".npy":
            made = {folder / "words": output.with_suffix(".txt"), folder / "new": output}
        _WRITERS[output.suffix](table, folder)
    for path, target in made.items():
        sync(path)
        os.replace(path, target)
    sync(output.parent)


def _rows(table: Table) -> Iterator[tuple[list[bytes], NDArray[Any]]]:
    """Yield words and vectors, some at a time, without the rows that have no vector of their own."""
    words = table.raw_words()
    for begin in range(0, len(words), _BLOCK_ROWS):
        rows = begin + np.flatnonzero(table.found[begin : begin + _BLOCK_ROWS] < MISSING)
        yield [words[row] for row in rows.tolist()], table.vectors[rows]


def _num_rows(table: Table) -> int:
    return int((table.found < MISSING).sum())


def _refuse(word: bytes, holds: bytes) -> None:
    if any(byte in word for byte in holds):
        raise EmbeddingError(
            f"the word {word.decode('utf-8', 'replace')!r} cannot be written in this format, for it would be read as "
            "two: write .safetensors"
        )


def _glove(table: Table, folder: Path) -> None:
    with (folder / "new").open("wb") as file:
        _write_lines(table, file, b"\n")


def _word2vec_text(table: Table, folder: Path) -> None:
    with (folder / "new").open("wb") as file:
        file.write(f"{_num_rows(table)} {table.vectors.shape[1]}\n".encode())
        _write_lines(table, file, b" \t\r\n\0")


def _write_lines(table: Table, file: IO[bytes], refused: bytes) -> None:
    for words, vectors in _rows(table):
        for word, vector in zip(words, vectors, strict=True):
            _refuse(word, refused)
            # The shortest text that is read back as the same number of this precision.
            file.write(word + b" " + " ".join(map(str, vector)).encode() + b"\n")


def _word2vec_binary(table: Table, folder: Path) -> None:
    with (folder / "new").open("wb") as file:
        file.write(f"{_num_rows(table)} {table.vectors.shape[1]}\n".encode())
        for words, vectors in _rows(table):
            for word, vector in zip(words, vectors.astype("<f4"), strict=True):
                _refuse(word, b" \n\0")
                file.write(word + b" " + vector.tobytes() + b"\n")


def _npy(table: Table, folder: Path) -> None:
    shape = (_num_rows(table), table.vectors.shape[1])
    array = np.lib.format.open_memmap(folder / "new", "w+", table.vectors.dtype, shape)
    at = 0
    with (folder / "words").open("wb") as file:
        for words, vectors in _rows(table):
            for word in words:
                _refuse(word, b"\r\n")
            file.write(b"".join([word + b"\n" for word in words]))
            array[at : at + len(words)] = vectors
            at += len(words)
    array.flush()


_WRITERS: dict[str, Callable[[Table, Path], None]] = {
    ".txt": _glove,
    ".vec": _word2vec_text,
    ".bin": _word2vec_binary,
    ".npy": _npy,
}
