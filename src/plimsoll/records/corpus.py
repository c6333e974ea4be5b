"""The output of `plimsoll data`: facts about a corpus, its tokens and samples, and the speed of reading them."""

from __future__ import annotations

from typing import ClassVar

from plimsoll.records.base import Frozen, Record


class LabelCount(Frozen):
    """The number of texts of one class."""

    name: str
    num_texts: int


class TagCount(Frozen):
    """The number of words with one tag."""

    name: str
    num_words: int


class CorpusFacts(Record):
    """An indexed corpus. ``skipped`` lists the first 100 files and rows that were left out, with reasons.

    ``num_hidden`` hidden files and folders below the given folders are left out, too, and not counted as skipped.
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
    """A tokenized corpus. ``seconds`` is the time of tokenizing, almost 0 if the tokens were in the cache."""

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
    """A method of making samples from the texts, and the padding in the resulting batches.

    ``is_this_job`` is true for the method that the job uses. ``num_dropped_tokens`` tokens are used in no epoch.
    ``num_long_texts`` texts were split into several samples or truncated.
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
    """The text lengths of a corpus, and ways to make samples of ``sequence_length`` tokens from its texts.

    Lengths are in tokens, without the special tokens around a text. They are from ``num_seen_texts`` texts: all texts,
    or evenly spaced texts. ``quantiles`` are pairs of a share of the texts and the length that this share does not
    exceed. ``special_tokens`` are the tokens that the tokenizer adds around a text. ``num_borders`` is the number of
    sentence or paragraph borders in these texts; ``None`` if windows may end anywhere. ``fillings`` compares ways to
    make samples.
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
    """The speed of one stage of the input pipeline.

    ``private_bytes`` is the peak private memory of all processes of the stage together; ``None`` if not measured.
    """

    stage: str
    detail: str
    per_second: float
    unit: str
    private_bytes: int | None = None


class FeedRates(Record):
    """The speed of reading, tokenizing and loading a corpus on this machine.

    ``notes`` give the reason if a stage was not measured.
    """

    record_kind: ClassVar[str] = "data-bench"

    corpus: CorpusFacts
    rates: tuple[Rate, ...]
    notes: tuple[str, ...] = ()
