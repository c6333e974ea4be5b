"""The augmentation settings of a job: changes to training samples as they are read. See `docs/data/augmentation.md`.

The values are checked here. Does NOT check that the table or the function exists: that error is raised when it is
opened.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from plimsoll.records.base import Frozen

Probability = Annotated[float, Field(ge=0, le=1)]

DEFAULT_SYNONYM = 0.1  # the share of words that EDA replaces: Wei and Zou 2019, https://arxiv.org/abs/1901.11196


class Augmentation(Frozen):
    """Probabilities of changing each token or word. The changes are drawn anew for each sample and epoch.

    Tokens: ``mask`` replaces a token by the mask token, ``delete`` removes it, and ``swap`` moves it behind one of the
    next ``swap_distance`` tokens (1: neighbours are exchanged). ``token_function`` is called last.

    Words, before the text is tokenized: ``synonym`` replaces a word by another word from the table ``synonyms``.
    ``delete_word`` and ``swap_word`` correspond to ``delete`` and ``swap``, and ``function`` is called last. Functions
    are named ``module:function``.
    """

    mask: Probability = 0.0
    delete: Probability = 0.0
    swap: Probability = 0.0
    swap_distance: int = Field(default=1, ge=1)
    token_function: str | None = None
    synonyms: str | None = None
    synonym: Probability | None = None
    delete_word: Probability = 0.0
    swap_word: Probability = 0.0
    function: str | None = None

    @field_validator("function", "token_function")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError("write it as `module:function`, for example `my_project.noise:typos`")
        return value

    @model_validator(mode="after")
    def _has_a_table(self) -> Self:
        if self.synonym and self.synonyms is None:
            raise ValueError(f"synonym = {self.synonym:g} needs words: add `synonyms: table.tsv`")
        return self

    @property
    def synonym_share(self) -> float:
        """The probability that a word that is in the table of synonyms is replaced; 0 without a table."""
        return 0.0 if self.synonyms is None else DEFAULT_SYNONYM if self.synonym is None else self.synonym

    @property
    def changes_tokens(self) -> bool:
        """True if the settings can change tokens after tokenization."""
        return bool(self.mask or self.delete or self.swap or self.token_function)

    @property
    def changes_text(self) -> bool:
        """True if the text can change before tokenization, so that it must be tokenized as it is read."""
        return bool(self.synonym_share or self.delete_word or self.swap_word or self.function)
