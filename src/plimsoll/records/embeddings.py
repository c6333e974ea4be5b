"""Records of word vectors: the settings in a job, the content of a file, and the rows taken from a file."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record


class VectorSource(Frozen):
    """A file of word vectors for the tokens, whether they are trained, and the initial vector of a missing token."""

    path: str
    trainable: bool = False
    missing: Literal["zeros", "mean", "normal"] = "normal"


class FaultCount(Frozen):
    """The number of words with one kind of fault.

    ``examples`` are the first such words, each with its line or number and the reason.
    """

    kind: str
    count: int
    examples: tuple[str, ...]


class VectorFile(Record):
    """The content of a file of word vectors that was read completely.

    ``num_words`` counts distinct words with a valid vector. ``num_entries`` counts all entries, including duplicates
    and faulty entries. ``num_promised`` is the number of entries according to the header; ``None`` without such a
    header. ``norms`` are the minimum, median and maximum norm of the vectors; ``None`` without valid vectors.
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
        """The bytes of all vectors in single precision."""
        return 4 * self.num_words * self.dimension


class Conversion(Record):
    """The conversion of a file of word vectors to another format. Words and entries are counted as in `VectorFile`."""

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

    Each row belongs to a word (``num_words``), to padding, or to no word. Words were found exactly as written
    (``num_exact``), in lower case, capitalised, or built from their parts. ``misses`` are the most frequent words that
    were not found, with their counts. If counts are unknown, they are the first such words, with count -1.
    ``num_tokens`` is the total count of all words, also of words without a row. ``num_hit_tokens`` is the total count
    of found words (``None``: no counts). ``mean`` and ``deviation`` are the mean and standard deviation of the found
    vectors, averaged over dimensions. ``num_entries`` is counted as in `VectorFile`, but only vectors of the words of
    the vocabulary are checked. ``seconds`` is the time of reading the file, also if the rows now come from the cache.
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
        """The number of words that got a vector from the file."""
        return self.num_exact + self.num_lower + self.num_capitalised + self.num_built


class CompressionFacts(Record):
    """Compressed word vectors, and the cosine between each row before and after compression.

    99 % of the rows have a cosine of at least ``low_cosine``; ``least_cosine`` is the minimum. Rows of zeros do not
    count.
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
