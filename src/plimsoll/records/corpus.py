"""What `plimsoll data` says: of a corpus, of its tokens, of the samples they make, and of how fast they are fed."""

from __future__ import annotations

from typing import ClassVar

from plimsoll.records.base import Frozen, Record


class LabelCount(Frozen):
    """How many texts are of one class."""

    name: str
    num_texts: int


class TagCount(Frozen):
    """How many words have one tag."""

    name: str
    num_words: int


class CorpusFacts(Record):
    """A corpus that is indexed; ``skipped`` names the first 100 files and rows that were left out, with the reason.

    ``num_hidden`` hidden files and folders, below the folders that were given, are left out, too, and not among these.
    """

    record_kind: ClassVar[str] = "corpus"

    sources: tuple[str, ...]
    num_files: int
    num_texts: int
    num_bytes: int
    num_skipped: int
    num_hidden: int = 0
    skipped: tuple[str, ...]
    labels: tuple[LabelCount, ...] = ()
    tags: tuple[TagCount, ...] = ()
    index_folder: str
    index_bytes: int
    seconds: float


class TokenFacts(Record):
    """A corpus that is tokenized; ``seconds`` are of tokenizing, and next to nothing where the cache had the tokens."""

    record_kind: ClassVar[str] = "tokens"

    corpus: CorpusFacts
    tokenizer_folder: str
    vocab_size: int
    tokens_folder: str
    token_type: str
    num_tokens: int
    num_stored_bytes: int
    seconds: float


class Filling(Frozen):
    """One way to make samples of the texts, and what of a batch is padding then.

    ``num_dropped_tokens`` are seen in no epoch; ``num_long_texts`` were cut or truncated.
    """

    name: str
    num_samples: int
    batch_samples: float
    padding_share: float
    useful_tokens: float
    num_long_texts: int = 0
    num_dropped_tokens: int = 0
    is_this_job: bool = False


class Inspection(Record):
    """What is in a corpus and what becomes of it as samples of ``sequence_length`` tokens.

    Lengths are in tokens, those around a text not counted, of ``num_seen_texts``: all of them, or evenly drawn ones.
    ``special_tokens`` are those that the tokenizer puts around a text; ``num_borders``: between sentences or paragraphs
    of the texts seen, where windows are to end at these.
    """

    record_kind: ClassVar[str] = "data-inspection"

    corpus: CorpusFacts
    task: str
    sequence_length: int
    special_tokens: str | None = None
    num_borders: int | None = None
    num_seen_texts: int
    num_seen_tokens: int
    bytes_per_token: float
    num_tokens: int
    mean_tokens: float
    quantiles: tuple[tuple[float, int], ...]
    fillings: tuple[Filling, ...]
    examples: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Rate(Frozen):
    """How fast one stage goes. ``private_bytes`` is the most its processes used at once; ``None`` if not watched."""

    stage: str
    detail: str
    per_second: float
    unit: str
    private_bytes: int | None = None


class FeedRates(Record):
    """How fast a corpus is read, tokenized and fed on this machine; ``notes`` say what was left out, and why."""

    record_kind: ClassVar[str] = "data-bench"

    corpus: CorpusFacts
    rates: tuple[Rate, ...]
    notes: tuple[str, ...] = ()
