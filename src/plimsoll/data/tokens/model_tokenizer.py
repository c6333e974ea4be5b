"""The tokens of a text as a model's own tokenizer makes them, with its special tokens, no more than the model reads.

A tokenizer adds what it adds in `transformers` (``[CLS]``, ``<s>``), also that of a model of ``plimsoll train``, which
has been trained so. Longer texts are truncated as the tokenizer does it, on the side that it names; of a text that is
very much longer only as many characters are looked at as are sure to hold all tokens that count. It does NOT
cover tokenizers without a fast form, chat templates, and pairs of texts.
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
"""Texts of more characters a token are looked at in part first. Tokens are of 4 to 5 characters in most languages."""


_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""What tokenizers are kept in; a tokenizer_config.json alone holds no words."""


class Tokens(NamedTuple):
    """The ids of a text, and whether some were cut off."""

    ids: list[int]
    is_truncated: bool


class ModelTokenizer:
    """Turns texts into tokens.

    Args:
        tokenizer: of transformers, a fast one.
        longest_tokens: what a text is truncated to, special tokens included; ``None`` for no truncation.
        with_special: whether the special tokens are added that the tokenizer has for a single text.
        keeps_end: whether it is the begin of a text that is cut off, as of a prompt that goes on behind its end; else
            the tokenizer says so.
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
        """What the tokenizer pads with; else its end token, if it has one."""
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
            # What was cut off inside of a word may have changed the tokens beside the cut, and only there.
            while looked_at < len(text) and not found[place].is_truncated:
                looked_at *= 4
                found[place] = self._read([self._looked_at(text, looked_at)])[0]
        return found

    def _looked_at(self, text: str, num_characters: int) -> str:
        return text[-num_characters:] if self._keeps_end else text[:num_characters]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, without special ones."""
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
        DataError: if there is none, or none that is fast.
    """
    from transformers import AutoTokenizer

    # Without any file transformers makes a tokenizer of some architectures that knows no word.
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
    """Keep transformers from writing to the terminal, that texts are longer than a model reads for example."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
