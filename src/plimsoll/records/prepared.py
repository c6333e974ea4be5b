"""The data of a job as they are prepared: where each store is, and what a model and its batches depend on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from plimsoll.records.base import Frozen, Record
from plimsoll.records.run import GradientReach


class PreparedText(Frozen):
    """Texts that are ready to be opened; a folder is ``None`` where there is no need of it.

    ``skipped`` names the first 100 files and rows that were left out, with the reason. Of the texts that are longer
    than a sample, ``num_truncated`` lost ``num_dropped_tokens`` in all, which no epoch sees; ``num_cut_inside``
    windows end where no border fitted; ``num_lost_words`` are without a token, and so their tags are without a place.
    Where texts are tokenized on the fly, tokens and truncations are unknown: 0.
    """

    corpus_key: str
    index_folder: str
    tokens_folder: str | None = None
    texts_folder: str | None = None
    labels_folder: str | None = None
    spans_folder: str | None = None
    packs_folder: str | None = None
    num_documents: int
    num_bytes: int
    num_tokens: int = 0
    num_samples: int
    num_skipped: int
    skipped: tuple[str, ...]
    num_long_texts: int = 0
    num_truncated: int = 0
    num_dropped_tokens: int = 0
    num_cut_inside: int = 0
    num_lost_words: int = 0

    @property
    def has_windows(self) -> bool:
        """Whether a text may be several samples, or in several rows."""
        return self.num_long_texts > self.num_truncated

    @property
    def folders(self) -> tuple[Path, ...]:
        """The stores that training reads."""
        texts = self.tokens_folder or self.index_folder
        names = (texts, self.texts_folder, self.labels_folder, self.spans_folder, self.packs_folder)
        return tuple(Path(name) for name in names if name is not None)


class Prepared(Record):
    """The data of a job, ready to be opened; ``key`` changes when a sample, a label or the tokenizer does.

    ``special_ids`` and ``mask_id`` are of the tokenizer, for augmentation: the training process does not load it.
    ``special_tokens`` shows what stands around each text. ``num_held_out_texts`` are held out, of which
    ``num_trained_on`` are among the training texts, too, word for word; or ``holds_out_windows``: windows of the only
    text are held out.
    ``vectors_folder`` holds the vectors of the tokens, if the job has any, ``vectors_digest`` is of their bits.
    ``gradient_reach`` is of streams. ``longest_row`` is the most tokens of a row of a training batch, and
    ``held_out_batch`` the samples and tokens of the largest batch of an evaluation, where `with_rows` has looked.
    ``num_left_out_words`` were too rare to be counted when the tokenizer was
    trained, and ``peak_bytes`` is the most private memory that preparing took, where that was watched.
    """

    record_kind: ClassVar[str] = "prepared-data"

    key: str
    train: PreparedText
    validation: PreparedText | None = None
    tokenizer_folder: str
    vocab_size: int
    end_id: int
    padding_token: int | None = None
    special_tokens: str | None = None
    special_ids: tuple[int, ...] = ()
    vectors_folder: str | None = None
    vectors_digest: str | None = None
    mask_id: int | None = None
    num_held_out_texts: int = 0
    holds_out_windows: bool = False
    num_trained_on: int = 0
    label_names: tuple[str, ...] = ()
    gradient_reach: GradientReach | None = None
    longest_row: int | None = None
    held_out_batch: tuple[int, int] | None = None
    num_left_out_words: int = 0
    peak_bytes: int | None = None

    @property
    def pad_id(self) -> int:
        """The token that fills the rows of a batch."""
        return self.end_id if self.padding_token is None else self.padding_token

    @property
    def num_labels(self) -> int | None:
        """How many classes or tags there are; ``None`` for language modelling."""
        return len(self.label_names) or None
