"""Records of word vectors as `plimsoll embeddings` shows them, small and with round numbers."""

from plimsoll.records.embeddings import CompressionFacts, Conversion, FaultCount, SubsetFacts, VectorFile

FAULTS = (
    FaultCount(kind="wrong dimension", count=1, examples=("line 17: 'the 0.1 0.2', 2 numbers, not 300",)),
    FaultCount(kind="NaN or infinite", count=7, examples=("line 18: 'a': it holds nan", "line 19: 'b': it holds inf")),
)


def subset_facts(**changes) -> SubsetFacts:
    """Return nine of ten words found, which are 95 % of the text."""
    facts = {
        "source": "glove.6B.300d.txt",
        "source_format": "GloVe text",
        "vocabulary": "corpus/*.txt",
        "dimension": 300,
        "precision": "float32",
        "num_rows": 20_002,
        "num_words": 20_000,
        "num_exact": 17_000,
        "num_lower": 600,
        "num_capitalised": 400,
        "num_built": 0,
        "num_tokens": 1_000_000,
        "num_hit_tokens": 950_000,
        "misses": (("don", 12_345), ("[b]", 678)),
        "missing": "normal",
        "num_entries": 400_000,
        "num_duplicates": 3,
        "faults": FAULTS,
        "mean": 0.0125,
        "deviation": 0.4,
        "num_bytes": 24 << 20,
        "folder": "cache/subset-0123456789abcdef",
        "seconds": 0.5,
    }
    return SubsetFacts(**facts | changes)


def uncounted() -> SubsetFacts:
    """Return facts on words whose frequency is unknown."""
    return subset_facts(num_tokens=None, num_hit_tokens=None, misses=(("don", -1),), faults=(), num_duplicates=0)


def vector_file(**changes) -> VectorFile:
    """Return a file whose header promises more words than it has."""
    facts = {
        "path": "vectors.vec",
        "format": "word2vec text (fastText .vec)",
        "num_file_bytes": 1 << 30,
        "dimension": 256,
        "num_words": 1 << 20,
        "num_entries": (1 << 20) + 8,
        "num_promised": 2_000_000,
        "num_duplicates": 0,
        "faults": FAULTS,
        "first_words": ("the", "of"),
        "norms": (0.5, 5.0, 25.0),
        "seconds": 4.0,
    }
    return VectorFile(**facts | changes)


def conversion() -> Conversion:
    """Return a file without faults."""
    return Conversion(
        source="model.kv", output="vectors.npy", num_words=1000, num_entries=1000,
        dimension=100, precision="float16", num_bytes=200_128,
        num_duplicates=0, seconds=0.25,
    )  # fmt: skip


def compression() -> CompressionFacts:
    """Return a compression to a sixteenth of the memory."""
    return CompressionFacts(
        method="product quantization", detail="75 parts", num_rows=20_000, dimension=300,
        num_bytes_before=24_000_000, num_bytes_after=1_500_000, mean_cosine=0.975, low_cosine=0.9, least_cosine=0.75,
    )  # fmt: skip
