"""The rows that a vocabulary needs, taken from a file of word vectors and cached.

The file is read once, sequentially, a few MiB at a time. Only the vectors of wanted words are parsed, directly into the
mapped result file. So neither the input nor the result occupies private memory of the process. The result's name
depends on the file, the words and the options. If they are the same, the cached rows are used; they are identical to a
new result. Rows of missing words are zeros, the mean of the rows found, or random. Random rows have a normal
distribution with the mean and the standard deviation, per dimension, of the rows found.

Does NOT find phrases that a file writes with underscores, or words that are spelled differently in the file: only upper
and lower case are varied.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from plimsoll.embeddings.faults import FaultList
from plimsoll.embeddings.formats import Block, Rows, Vectors, in_precision
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.embeddings.opening import Opened, open_source, read_parts
from plimsoll.embeddings.table import Precision, Table, create_table, open_table
from plimsoll.embeddings.vocabulary import Vocabulary, vocabulary_of
from plimsoll.embeddings.wanted import BUILT, CAPITALISED, EXACT, LOWER, MISSING, NO_WORD, PADDING, Wanted
from plimsoll.errors import EmbeddingError
from plimsoll.files.checksums import require_whole
from plimsoll.files.identity import identity_of
from plimsoll.files.store import Facts, Progress, kept_facts, require_space, silent, stored
from plimsoll.records.base import cache_folder
from plimsoll.records.embeddings import SubsetFacts

Missing = Literal["zeros", "mean", "normal"]
"""The values of the rows of words that the file does not have."""

_FILE = "table.safetensors"
_RECIPE = 2  # increase it when the same file, words and options give other rows
_BLOCK_BYTES = 1 << 20
_MOST_MISSES = 20
_SHOWN_WORDS = 5
_SHOWN_BYTES = 40


class _Options(NamedTuple):
    """The options of `take_subset` that determine the rows."""

    missing: Missing
    ignore_case: bool
    precision: Precision
    strict: bool
    seed: int


class Subset(NamedTuple):
    """The rows of a vocabulary in a mapped file, facts about how they were found, and a hash of the mapped file."""

    table: Table
    facts: SubsetFacts
    digest: str

    @property
    def rows(self) -> NDArray[Any]:
        """The vectors (words, dimension), read-only."""
        return self.table.vectors


class _File(NamedTuple):
    path: str
    num_bytes: int
    mtime_ns: int


def take_subset(
    source: str | Path,
    vocabulary: Any,
    *,
    missing: Missing = "normal",
    ignore_case: bool = True,
    precision: Precision = "float32",
    strict: bool = False,
    seed: int = 0,
    padding: str | None = None,
    cache: str | Path | None = None,
    progress: Progress = silent,
) -> Subset:
    """Return the rows of the words of ``vocabulary``, from the cache if possible.

    Args:
        source: a file of word vectors, in any of the formats of `plimsoll.embeddings.formats`. A file in a zip archive
            with several files is named like a file in a folder (``glove.6B.zip/glove.6B.300d.txt``).
        vocabulary: any input of `plimsoll.embeddings.vocabulary.vocabulary_of`: a tokenizer, a file, words, counts.
        missing: how to fill the rows of words that are not found, and rows without a word: ``"normal"`` (random),
            ``"zeros"`` or ``"mean"``.
        ignore_case: whether a word that is not found as written is searched for in lower case, then capitalised.
        precision: data type of the rows.
        strict: whether faults in the file raise an error; otherwise they are counted.
        seed: seed of the random rows.
        padding: the word whose row is zero; ``None``: the tokenizer's padding token, if it has one.
        cache: the folder for the result; ``None``: the user's cache folder.
        progress: called with the stage ``"vectors"``.

    Returns:
        the rows (words, dimension), with facts about how they were found.

    Raises:
        EmbeddingError: if the file or the words cannot be used, if the file has none of the words, or, with ``strict``,
            if the file has a fault.
        OutputError: if the cache cannot be written.
    """
    words = vocabulary_of(vocabulary, padding)
    options = _Options(missing, ignore_case, precision, strict, seed)
    _require_known(options)
    file = Source(Path(source))
    folder = Path(cache or cache_folder() / "embeddings").absolute() / f"subset-{_key(file, words, options)}"
    written: list[Path] = []

    def write(folder: Path) -> Facts:
        written.append(folder)
        return _write(file, words, options, progress, folder)

    facts = stored(
        folder,
        write,
        is_whole=lambda facts: facts == _sealed(_digest(folder / _FILE), facts.get("subset")),
    )
    table = open_rows(folder)
    known = facts["subset"] | {"source": file.name, "vocabulary": words.name, "folder": str(folder)}
    known["is_from_cache"] = not written
    return Subset(table, SubsetFacts.model_validate(known | _hits(table.found, words)), facts["digest"])


def _require_known(options: _Options) -> None:
    for name, value, known in (
        ("missing", options.missing, get_args(Missing)),
        ("precision", options.precision, get_args(Precision)),
    ):
        if value not in known:
            raise EmbeddingError(f"{name} is {value!r}: give one of {', '.join(known)}")
    if not isinstance(options.seed, int) or options.seed < 0:
        raise EmbeddingError(f"the seed is {options.seed!r}: give a whole number of at least 0")


def open_rows(folder: Path) -> Table:
    """Map the rows of a cached subset.

    Raises:
        DataError: if the folder is missing or incomplete.
    """
    kept_facts(folder, "word vectors")
    require_whole(folder)
    return open_table(folder / _FILE)


def _key(source: Source, words: Vocabulary, options: _Options) -> str:
    files = []
    for path in (source.path, *source.companions()):
        status = path.stat()
        files.append(_File(str(path.absolute()), status.st_size, status.st_mtime_ns))
    identity = [[*entry[1:3], entry[3].hex()] for entry in identity_of(files)]  # the path does not change the rows
    facts = [_RECIPE, identity, source.member, words.key, *options]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    """Return a hash of a whole file. It takes a few milliseconds if the file is in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return xxhash.xxh3_128_hexdigest(mapped)


def _sealed(digest: str, facts: Any) -> Facts:
    """Return the facts to store with a subset: the hash of its file, the subset's own facts, and a hash of both."""
    return {"digest": digest, "subset": facts, "seal": xxhash.xxh3_128_hexdigest(json.dumps([digest, facts]).encode())}


def _write(source: Source, words: Vocabulary, options: _Options, progress: Progress, folder: Path) -> Facts:
    start_seconds = time.perf_counter()
    opened = open_source(source)
    require_space(folder, len(words) * opened.vectors.dimension * np.dtype(options.precision).itemsize)
    table = create_table(folder / _FILE, words.words, opened.vectors.dimension, options.precision)
    wanted = Wanted(words.words, words.padding, options.ignore_case)
    faults = _fill(table, wanted, opened, options, progress)
    _build(table, wanted, words, opened.vectors)
    table.found[:] = wanted.state
    if not (wanted.state < MISSING).any():
        raise EmbeddingError(_no_hits(opened, words))
    mean, deviation = _moments(table)
    _refuse_no_deviation(table, options, deviation, opened)
    _fill_missing(table, options, mean, deviation)
    facts = {
        "source_format": opened.title,
        "dimension": opened.vectors.dimension,
        "precision": options.precision,
        "num_rows": len(words),
        "missing": options.missing,
        "num_entries": faults.num_entries,
        "num_promised": opened.vectors.num_promised,
        "num_duplicates": faults.num_duplicates,
        "faults": [fault.model_dump() for fault in faults.counts()],
        "mean": float(mean.mean()),
        "deviation": float(deviation.mean()),
        "num_bytes": (folder / _FILE).stat().st_size,
        "seconds": time.perf_counter() - start_seconds,
    }
    return _sealed(_digest(folder / _FILE), facts)


def _fill(table: Table, wanted: Wanted, opened: Opened, options: _Options, progress: Progress) -> FaultList:
    """Write the vectors of wanted words from the file to the table, and return the faults of the file."""
    vectors = opened.vectors
    faults = FaultList(opened, options.strict)

    def parse(block: Block) -> tuple[NDArray[np.int64], Rows]:
        indexes = wanted.open_words(block.words)
        return indexes, in_precision(block.rows(indexes), options.precision)

    for block, (indexes, rows), share in read_parts(vectors, wanted.words, parse):
        row_of = np.full(len(block.words), -1)
        row_of[indexes] = np.arange(len(indexes))
        row_of[indexes[[fault.at for fault in rows.faults]]] = -1
        pairs = wanted.give(block.words, row_of >= 0)
        # Only these faults are counted: other vectors are parsed or not depending on the timing of the threads.
        matter = tuple(fault for fault in rows.faults if int(indexes[fault.at]) in pairs.refused)
        faults.add(block, indexes, rows._replace(faults=matter))
        faults.add_again(pairs.again)
        if len(pairs.rows):
            table.vectors[pairs.rows] = rows.matrix[row_of[pairs.indexes]]
        progress("vectors", round(share * 1000), 1000)
    faults.end()
    return faults


def _build(table: Table, wanted: Wanted, words: Vocabulary, vectors: Vectors) -> None:
    """Fill the rows of words that are not in the file, if the format can build vectors from n-grams."""
    for rows in _blocks(np.flatnonzero(wanted.state == MISSING), vectors.dimension):
        built = vectors.build([str(words.words[row]).encode("utf-8", "surrogatepass") for row in rows.tolist()])
        if built is None:
            return
        is_built, matrix = built
        table.vectors[rows[is_built]] = matrix[is_built]
        wanted.state[rows[is_built]] = BUILT


def _moments(table: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and the standard deviation of the rows that were found, (dimension,) each."""
    found = np.flatnonzero(table.found < MISSING)
    total = np.zeros((2, table.vectors.shape[1]))
    blocks = list(_blocks(found, table.vectors.shape[1]))
    for block in blocks:
        total[0] += table.vectors[block].sum(axis=0, dtype=np.float64)
    mean = total[0] / len(found)
    for block in blocks:
        total[1] += np.square(table.vectors[block] - mean).sum(axis=0)
    return mean, np.sqrt(total[1] / len(found))


def _refuse_no_deviation(table: Table, options: _Options, deviation: NDArray[np.float64], opened: Opened) -> None:
    """Raise an error if random rows would all be equal, because all rows that were found have the same vector."""
    num_others = int(((table.found == MISSING) | (table.found == NO_WORD)).sum())
    if options.missing == "normal" and num_others and not deviation.any():
        num_found = int((table.found < MISSING).sum())
        raise EmbeddingError(
            f"{num_found} of the {len(table.found):,} rows were found in {opened.source.name}, all with the same "
            f"vector, so the other {num_others:,} cannot be drawn from their distribution: set missing to zeros "
            "or mean (--missing zeros; embeddings.missing of a job), or use other vectors"
        )


def _fill_missing(table: Table, options: _Options, mean: NDArray[np.float64], deviation: NDArray[np.float64]) -> None:
    if options.missing == "zeros":
        return
    generator = np.random.default_rng(options.seed)
    for rows in _blocks(np.flatnonzero((table.found == MISSING) | (table.found == NO_WORD)), len(mean)):
        is_drawn = options.missing == "normal"
        table.vectors[rows] = generator.normal(mean, deviation, (len(rows), len(mean))) if is_drawn else mean


def _blocks(rows: NDArray[np.int64], dimension: int) -> Iterator[NDArray[np.int64]]:
    """Yield the row indexes in blocks, such that the vectors of a block have about 1 MiB in float64."""
    num_rows = max(_BLOCK_BYTES // (8 * dimension), 1)
    for begin in range(0, len(rows), num_rows):
        yield rows[begin : begin + num_rows]


def _hits(state: NDArray[np.uint8], words: Vocabulary) -> dict[str, Any]:
    """Return fields of `SubsetFacts`: how many words were found, and the most frequent words that were not.

    ``state`` has the source of each row's vector (`plimsoll.embeddings.wanted`).
    """
    is_word = (state != NO_WORD) & (state != PADDING)
    missed = np.flatnonzero(state == MISSING)
    counts = words.counts
    if counts is not None:
        missed = missed[np.argsort(-counts[missed], kind="stable")]
        missed = missed[counts[missed] > 0]
    hits: dict[str, Any] = {
        "num_words": int(is_word.sum()),
        "num_exact": int((state == EXACT).sum()),
        "num_lower": int((state == LOWER).sum()),
        "num_capitalised": int((state == CAPITALISED).sum()),
        "num_built": int((state == BUILT).sum()),
        "misses": tuple(
            (str(words.words[row]), -1 if counts is None else int(counts[row]))
            for row in missed[:_MOST_MISSES].tolist()
        ),
    }
    if counts is not None:
        hits["num_hit_tokens"] = int(counts[state < MISSING].sum())
        hits["num_tokens"] = int(counts[is_word].sum()) + words.num_other_tokens
    return hits


def _no_hits(opened: Opened, words: Vocabulary) -> str:
    part = next(iter(opened.vectors.parts(None)), None)
    theirs = ", ".join(
        word[:_SHOWN_BYTES].decode("utf-8", "replace") for word in (part().words[:_SHOWN_WORDS] if part else [])
    )
    known = [word for word in words.words if word is not None]
    ours = ", ".join([word for word in known if word.isalpha()] or known)[:80]
    return (
        f"none of the {len(words):,} words of {words.name} ({ours}, ...) is in {opened.source.name} ({theirs}, ...): "
        "give vectors of the same language, or the vocabulary that belongs to them"
    )
