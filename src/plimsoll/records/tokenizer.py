"""The tokenizer settings of a job; `docs/job.md` describes them.

The values are checked here. Does NOT check that a folder or file exists: that error is raised when it is opened.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from plimsoll.records.base import Frozen

SMALLEST_VOCAB_SIZES = {"bpe": 257, "words": 2}
"""The vocabulary size of a tokenizer that is trained on no text, which is the smallest possible size.

``bpe`` has all bytes and the end token; ``words`` has the unknown word and the end token.
"""


class TokenizerSource(Frozen):
    """An existing tokenizer (``path``, a folder or file), or a tokenizer that is trained on the texts.

    With ``special_tokens``, an existing tokenizer adds the same special tokens as in transformers.
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
            raise ValueError(f"train: words and path {self.path!r} exclude each other: leave out one of them")
        if self.path is None and not self.special_tokens:
            raise ValueError(
                "special_tokens: false needs an existing tokenizer, because a trained one adds no special tokens: "
                "leave it out, or give a path"
            )
        of_words = {"min_count": self.min_count, "lowercase": self.lowercase}
        given = [name for name, value in of_words.items() if value != type(self).model_fields[name].default]
        if given and self.train == "bpe":
            raise ValueError(
                f"{' and '.join(given)} needs train: words: leave it out, or add `train: words` (and no path)"
            )
        return self
