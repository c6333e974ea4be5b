"""Word vectors: what a job says of them, what a file of them has, and the rows that were taken from one."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record


class VectorSource(Frozen):
    """A file of word vectors for the tokens: whether they are trained, and what stands in rows it has no vector for."""

    path: str
    trainable: bool = False
    missing: Literal["zeros", "mean", "normal"] = "normal"


class FaultCount(Frozen):
    """How many words had one kind of fault; ``examples`` name the first ones, with line or number and reason."""

    kind: str
    count: int
    examples: tuple[str, ...]


class VectorFile(Record):
    """A file of word vectors that was read as a whole.

    ``num_words`` are different and have a vector; ``num_entries`` is what the file has, with those that come again and
    those that something is wrong with; ``num_promised`` is what its header says. ``norms`` are the shortest, the median
    and the longest of the vectors of words.
    """

    record_kind: ClassVar[str] = "vector-file"

    path: str
    format: str
    num_file_bytes: int
    dimension: int
    num_words: int
    num_entries: int
    num_promised: int | None = None
    num_duplicates: int
    faults: tuple[FaultCount, ...] = ()
    first_words: tuple[str, ...] = ()
    norms: tuple[float, float, float] | None = None
    seconds: float

    @property
    def num_full_bytes(self) -> int:
        """What all of it takes in memory, in single precision."""
        return 4 * self.num_words * self.dimension


class Conversion(Record):
    """A file of word vectors that was written in another format; words and entries as of a `VectorFile`."""

    record_kind: ClassVar[str] = "vector-conversion"

    source: str
    output: str
    num_words: int
    num_entries: int
    dimension: int
    precision: str
    num_bytes: int
    num_duplicates: int
    faults: tuple[FaultCount, ...] = ()
    seconds: float


class SubsetFacts(Record):
    """The rows of a vocabulary, taken from a file of word vectors.

    Rows are of words (``num_words``), of padding, or stand for no word. Of the words, as many were found exactly as
    written, in lower case, capitalised, or built from their parts; ``misses`` are the most frequent of the others, the
    first ones where no counts are known (-1). ``num_tokens`` are the uses of all words, those without a row included,
    ``num_hit_tokens`` of those found; ``None``: no counts. ``mean`` and ``deviation`` are of the numbers found.
    ``num_entries`` are those of the file, as of a `VectorFile`: which of them have a vector is looked at where a word
    is wanted. ``seconds`` is what reading the file took, now or, where the rows are from the cache, then.
    """

    record_kind: ClassVar[str] = "embedding-subset"

    source: str
    source_format: str
    vocabulary: str
    dimension: int
    precision: str
    num_rows: int
    num_words: int
    num_exact: int
    num_lower: int
    num_capitalised: int
    num_built: int
    num_tokens: int | None = None
    num_hit_tokens: int | None = None
    misses: tuple[tuple[str, int], ...] = ()
    missing: str
    num_entries: int
    num_promised: int | None = None
    num_duplicates: int
    faults: tuple[FaultCount, ...] = ()
    mean: float
    deviation: float
    num_bytes: int
    folder: str
    seconds: float
    is_from_cache: bool = False

    @property
    def num_found(self) -> int:
        """Words that have a vector from the file."""
        return self.num_exact + self.num_lower + self.num_capitalised + self.num_built


class CompressionFacts(Record):
    """Vectors that were made smaller, and the cosine between each row and what became of it.

    ``low_cosine`` is what 99 % of the rows reach; rows of zeros do not count.
    """

    record_kind: ClassVar[str] = "embedding-compression"

    method: str
    detail: str
    num_rows: int
    dimension: int
    num_bytes_before: int
    num_bytes_after: int
    mean_cosine: float
    low_cosine: float
    least_cosine: float
