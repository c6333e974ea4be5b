"""Conversion of a file of word vectors to another format: all words, or the rows of a subset.

The suffix of the output selects the format: ``.safetensors`` for a table of Plimsoll, ``.npy`` for an array, ``.txt``
for GloVe text, ``.vec`` for word2vec text, ``.bin`` for word2vec binary. The words of an array are written to a
``.txt`` file next to it. Reading the output gives bitwise the same numbers. The output gets its name when it is
complete. Vectors are first written to a temporary table next to the output, so memory holds only the words. If a word
occurs twice, its first vector is kept. A word that the format cannot store is an error: a newline in any text file,
for example, or a space in word2vec formats.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.faults import FaultList
from plimsoll.embeddings.formats import in_precision
from plimsoll.embeddings.inspect import every_row, first_usable
from plimsoll.embeddings.opening import open_file, read_parts
from plimsoll.embeddings.table import Precision, Table, TableWriter, open_table
from plimsoll.embeddings.wanted import MISSING
from plimsoll.errors import EmbeddingError, OutputError
from plimsoll.files.store import Progress, silent
from plimsoll.records.base import sync
from plimsoll.records.embeddings import Conversion

_BLOCK_ROWS = 1024


def convert(
    path: str | Path,
    output: str | Path,
    precision: Precision = "float32",
    strict: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Write all words of a file of word vectors, in the format given by the suffix of ``output``.

    Args:
        path: the file, in any of the formats of `plimsoll.embeddings.formats`.
        output: the new file. An existing file is replaced when the new one is complete.
        precision: data type of the numbers; text files get the shortest decimals that read back exactly in this type.
        strict: whether the first fault of the file raises an error; otherwise faulty words are left out.
        progress: called with the stage ``"vectors"``.

    Raises:
        EmbeddingError: if the file cannot be read, has no words, or has a word that the format cannot store.
        OutputError: if the output cannot be written, or its suffix is unknown.
    """
    start_seconds = time.perf_counter()
    opened = open_file(Path(path))
    faults = FaultList(opened, strict)
    seen: set[bytes] = set()
    output = Path(output)
    check_output(output, [opened.source.path])
    with _beside(output) as folder:
        with TableWriter(folder / "table", opened.vectors.dimension, precision) as writer:
            for block, (indexes, parsed), share in read_parts(opened.vectors, None, every_row):
                rows = in_precision(parsed, precision)
                faults.add(block, indexes, rows)
                kept = first_usable(block, rows, seen, faults)
                writer.add([block.words[index] for index in kept], rows.matrix[kept])
                progress("vectors", round(share * 1000), 1000)
        faults.end()
        if not seen:
            raise EmbeddingError(f"{opened.source.name} has 0 words that can be used: see `plimsoll embeddings info`")
        _write(open_table(folder / "table"), folder, output)
    return Conversion(
        source=opened.source.name,
        output=str(output),
        num_words=len(seen),
        num_entries=faults.num_entries,
        dimension=opened.vectors.dimension,
        precision=precision,
        num_bytes=output.stat().st_size,
        num_duplicates=faults.num_duplicates,
        faults=faults.counts(),
        seconds=time.perf_counter() - start_seconds,
    )


def export(table: Table, output: Path) -> None:
    """Write the rows of a table, in the format given by the suffix of ``output``.

    ``.safetensors`` and ``.npy`` keep all rows. Text and word2vec binary contain only rows with a vector from the file.

    Raises:
        EmbeddingError: if a word cannot be stored in that format.
        OutputError: if the output cannot be written, or its suffix is unknown.
    """
    check_output(output)
    with _beside(output) as folder:
        if output.suffix == ".safetensors":
            shutil.copyfile(table.path, folder / "table")
        _write(table, folder, output)


def outputs_of(output: Path) -> list[Path]:
    """Return the files that are written for an output: for ``.npy``, also the file with its words."""
    return [output, output.with_suffix(".txt")] if output.suffix == ".npy" else [output]


def check_output(output: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output that has an unknown suffix, is a folder, or has a words file that would overwrite an input.

    Raises:
        OutputError: if the output is refused. The message names a remedy.
    """
    words = outputs_of(output)[-1]
    if output.suffix == ".npy" and any(path.exists() and words.exists() and path.samefile(words) for path in inputs):
        raise OutputError(f"the words of {output} would be written to {words}, which is an input: give another -o")
    if output.is_dir():
        raise OutputError(f"{output} is a folder: give -o the name of a file in it")
    if output.suffix not in {".safetensors", *_WRITERS}:
        raise OutputError(
            f"cannot write {output}: its suffix is unknown: give -o a name that ends in .safetensors, "
            f"{', '.join(_WRITERS)}"
        )


def require_writable(output: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Refuse an output as `check_output` does, and also if it exists without ``force``, or its folder does not exist.

    Args:
        output: the file to write.
        force: whether an existing file may be overwritten.
        inputs: files that are read, which the words of a ``.npy`` output must not overwrite.

    Raises:
        OutputError: if the output is refused. The message names a remedy.
    """
    check_output(output, inputs)
    there = [str(path) for path in outputs_of(output) if path.exists()]
    if there and not force:
        raise OutputError(f"{' and '.join(there)} exists already and is not overwritten: give another -o, or --force")
    if not output.parent.is_dir():
        raise OutputError(f"cannot write {output}, there is no folder {output.parent}: make it, or give another -o")


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the output, and delete it afterwards."""
    folder = output.with_name(f".{output.name}.part")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
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
    """Yield in blocks the words and vectors of those rows of a table whose vector is from the original file."""
    words = table.raw_words()
    for begin in range(0, len(words), _BLOCK_ROWS):
        rows = begin + np.flatnonzero(table.found[begin : begin + _BLOCK_ROWS] < MISSING)
        yield [words[row] for row in rows.tolist()], table.vectors[rows]


def _num_rows(table: Table) -> int:
    return int((table.found < MISSING).sum())


def _refuse(word: bytes, holds: bytes) -> None:
    if any(byte in word for byte in holds):
        raise EmbeddingError(
            f"the word {word.decode('utf-8', 'replace')!r} cannot be written in this format, because it would be "
            "read as two words: write .safetensors"
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
            # `str` of a NumPy number is the shortest text that reads back exactly in its data type.
            file.write(word + b" " + " ".join(map(str, vector)).encode() + b"\n")


def _word2vec_binary(table: Table, folder: Path) -> None:
    with (folder / "new").open("wb") as file:
        file.write(f"{_num_rows(table)} {table.vectors.shape[1]}\n".encode())
        for words, vectors in _rows(table):
            for word, vector in zip(words, vectors.astype("<f4"), strict=True):
                _refuse(word, b" \n\0")
                file.write(word + b" " + vector.tobytes() + b"\n")


def _npy(table: Table, folder: Path) -> None:
    np.save(folder / "array.npy", table.vectors)
    (folder / "array.npy").rename(folder / "new")
    words = ["" if word is None else word for word in table.texts()]
    with (folder / "words").open("wb") as file:
        for word in words:
            raw = word.encode("utf-8", "surrogatepass")
            _refuse(raw, b"\r\n")
            file.write(raw + b"\n")


_WRITERS: dict[str, Callable[[Table, Path], None]] = {
    ".txt": _glove,
    ".vec": _word2vec_text,
    ".bin": _word2vec_binary,
    ".npy": _npy,
}
