"""Tokenization of texts for inference with a model's own tokenizer, truncated to the length that the model reads.

The tokenizer adds the special tokens that it adds in `transformers` (``[CLS]``, ``<s>``). Models from ``plimsoll
train`` were also trained with these special tokens. Longer texts are truncated on the tokenizer's truncation side. Of a
much longer text, only enough characters to determine the kept tokens are tokenized. Not handled: slow tokenizers, chat
templates, and pairs of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from plimsoll.data.tokens.tokenizer import tokenizer_threads
from plimsoll.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

_SURE_CHARACTERS = 64
"""Characters of a long text tokenized at first for each token to be kept. Most tokens have 4 to 5 characters."""


_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Files that hold the vocabulary of a tokenizer; a tokenizer_config.json does not."""


class Tokens(NamedTuple):
    """The token ids of a text, and whether it was truncated."""

    ids: list[int]
    is_truncated: bool


class ModelTokenizer:
    """A tokenizer that returns the token ids of texts for a model.

    Args:
        tokenizer: a fast tokenizer of transformers.
        longest_tokens: the length in tokens to which a text is truncated, with special tokens; ``None`` for no
            truncation.
        with_special: whether to add the special tokens that the tokenizer has for a single text.
        keeps_end: whether to truncate at the beginning, as for a prompt that is continued at its end. ``False``: use
            the tokenizer's truncation side.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        longest_tokens: int | None,
        with_special: bool = True,
        keeps_end: bool = False,
    ) -> None:
        self._tokenizer, self._with_special = tokenizer, with_special
        if keeps_end:
            tokenizer.truncation_side = "left"
        self._keeps_end = tokenizer.truncation_side == "left"
        self.longest_tokens = longest_tokens

    @property
    def padding_id(self) -> int | None:
        """The id of the padding token, or of the end token if there is no padding token; ``None`` without either."""
        own = self._tokenizer.pad_token_id
        return cast("int | None", self._tokenizer.eos_token_id if own is None else own)

    def read(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        if not texts:
            return []
        if self.longest_tokens is None:
            return self._read(list(texts))
        sure_characters = _SURE_CHARACTERS * max(self.longest_tokens, 1)
        found = self._read([self._looked_at(text, sure_characters) for text in texts])
        for place, text in enumerate(texts):
            looked_at = sure_characters
            # A cut inside a word can change only the tokens next to the cut, so truncated results are final.
            while looked_at < len(text) and not found[place].is_truncated:
                looked_at *= 4
                found[place] = self._read([self._looked_at(text, looked_at)])[0]
        return found

    def _looked_at(self, text: str, num_characters: int) -> str:
        return text[-num_characters:] if self._keeps_end else text[:num_characters]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _read(self, texts: list[str]) -> list[Tokens]:
        with tokenizer_threads():
            encoded: Any = self._tokenizer(
                texts,
                add_special_tokens=self._with_special,
                truncation=self.longest_tokens is not None,
                max_length=self.longest_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        return [Tokens(list(encoding.ids), bool(encoding.overflowing)) for encoding in encoded.encodings]


def load_model_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder.

    Raises:
        DataError: if the folder has no fast tokenizer.
    """
    from transformers import AutoTokenizer

    # For some architectures, transformers returns a tokenizer with an empty vocabulary if no file exists.
    if not any(path for pattern in _FILES for path in folder.glob(pattern)):
        raise DataError(f"{folder} holds no tokenizer ({', '.join(_FILES)}): save the model's tokenizer there")
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load ({reason}): save the model's tokenizer there"
        ) from None
    if not tokenizer.is_fast:
        raise DataError(f"the tokenizer in {folder} has no fast form: convert it to a tokenizer.json first")
    return cast("PreTrainedTokenizerFast", tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of transformers, for example about texts that are too long for the model."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
