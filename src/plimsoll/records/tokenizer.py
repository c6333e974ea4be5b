"""The tokenizer of a job, as `job.yaml` has it: see `docs/job.md`.

Covers the values; it does NOT check that a folder or file is there: that is said where it is opened.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from plimsoll.records.base import Frozen

SMALLEST_VOCAB_SIZES = {"bpe": 257, "words": 2}
"""Tokens of a tokenizer that is trained, on no text: all bytes and the end of a text; that and the unknown word."""


class TokenizerSource(Frozen):
    """A folder or file of an existing tokenizer (``path``), or one trained on the spot.

    ``special_tokens``: whether an existing one puts around each text what it puts there in transformers.
    """

    path: str | None = None
    special_tokens: bool = True
    train: Literal["bpe", "words"] = "bpe"
    vocab_size: int = Field(default=8000, ge=3, le=1 << 20)
    min_count: int = Field(default=1, ge=1)
    lowercase: bool = False

    @field_validator("vocab_size")
    @classmethod
    def _has_all_bytes(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("train") == "bpe" and value < SMALLEST_VOCAB_SIZES["bpe"]:
            raise ValueError("train: bpe needs at least 257 tokens, for all bytes and the end of a text: give more")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> TokenizerSource:
        if self.path is not None and self.train == "words":
            raise ValueError(f"train: words makes a tokenizer, and path {self.path!r} names one: leave out one of them")
        if self.path is None and not self.special_tokens:
            raise ValueError(
                "special_tokens: false is of an existing tokenizer, and one that is trained puts none around a text: "
                "leave it out, or give a path"
            )
        of_words = {"min_count": self.min_count, "lowercase": self.lowercase}
        given = [name for name, value in of_words.items() if value != type(self).model_fields[name].default]
        if given and self.train == "bpe":
            raise ValueError(
                f"train: words alone has {' and '.join(given)}: leave out what it has, or add `train: words` (and no "
                "path)"
            )
        return self
