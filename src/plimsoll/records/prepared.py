"""The prepared data of a job: the folder of each store, and the facts that models and batches depend on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from plimsoll.records.base import Frozen, Record
from plimsoll.records.run import GradientReach


class PreparedText(Frozen):
    """The prepared texts of a training or validation set. A folder is ``None`` if the job does not need its store.

    ``skipped`` lists the first 100 files and rows that were left out, with reasons. ``num_long_texts`` texts are longer
    than a sample. ``num_truncated`` of these texts lost ``num_dropped_tokens`` tokens in total, which no epoch uses.
    ``num_cut_inside`` windows end inside a sentence or paragraph, because no border between sentences or paragraphs
    fits. ``num_lost_words`` words have no token, so their tags are lost. If texts are tokenized on the fly, tokens and
    truncations are unknown and set to 0.
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
        """True if some texts are split into several samples or spread over several rows."""
        return self.num_long_texts > self.num_truncated

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of the stores that training reads."""
        texts = self.tokens_folder or self.index_folder
        names = (texts, self.texts_folder, self.labels_folder, self.spans_folder, self.packs_folder)
        return tuple(Path(name) for name in names if name is not None)


class Prepared(Record):
    """The data of a job, ready to be opened. ``key`` changes if a sample, a label or the tokenizer changes.

    ``special_ids`` and ``mask_id`` belong to the tokenizer. They are stored for augmentation, because the training
    process does not load the tokenizer. ``special_tokens`` describes the special tokens around each text.

    ``num_held_out_texts`` texts are held out; ``num_trained_on`` of them also occur, word for word, among the training
    texts. If ``holds_out_windows`` is true, the corpus is a single text, and some of its windows are held out.

    ``vectors_folder`` has the word vectors of the tokens, if the job has any, and ``vectors_digest`` is a digest of the
    vectors. ``gradient_reach`` counts the earlier tokens that a gradient reaches; ``None`` unless samples are read as
    streams. ``longest_row`` is the maximum number of tokens of a row of a training batch. ``held_out_batch`` are the
    samples and tokens of the largest evaluation batch. Both are ``None`` before `with_rows` has computed them.
    ``num_left_out_words`` words were too rare to be counted when the tokenizer was trained. ``peak_bytes`` is the peak
    private memory of the preparation, if it was measured.
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
        """The id of the token that pads the rows of a batch."""
        return self.end_id if self.padding_token is None else self.padding_token

    @property
    def num_labels(self) -> int | None:
        """The number of classes or tags; ``None`` for language modelling."""
        return len(self.label_names) or None
