"""The special tokens that a tokenizer puts around a text, such as ``[CLS]`` before it and ``[SEP]`` after it.

They are determined by encoding a text, so the format of the tokenizer file does not matter. Only tokens before and
after a single text are supported. Tokenizers that repeat a text, or that give its parts different token types, are
refused. Not handled: pairs of texts.

Shapes: B rows, N elements of all rows together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.samples import ragged
from plimsoll.errors import DataError

if TYPE_CHECKING:
    import tokenizers

Ints = NDArray[np.int64]
Element = TypeVar("Element", bound=np.generic)

_MOST_TRIED = 256  # words of the vocabulary, because a tokenizer may return no tokens for the first


class Template(NamedTuple):
    """The token ids before and after each text, or each window of a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of special tokens per sample."""
        return len(self.prefix) + len(self.suffix)

    def room(self, sequence_length: int) -> int:
        """Return how many tokens of the text fit into a sample of ``sequence_length`` tokens.

        Raises:
            DataError: if no token fits.
        """
        if self.num_tokens >= sequence_length:
            raise DataError(
                f"sequence_length = {sequence_length} leaves no space for a text next to the {self.num_tokens} special "
                f"tokens of the tokenizer: give more than {self.num_tokens}"
            )
        return sequence_length - self.num_tokens

    def around(
        self, flat_N: NDArray[Element], lengths_B: Ints, fill: int | None = None
    ) -> tuple[NDArray[Element], Ints]:
        """Put the special tokens around each row. Return the new rows end to end (N,), and their lengths (B,).

        Args:
            flat_N: the elements of all rows, end to end.
            lengths_B: the lengths of the rows (int64); a row may be empty.
            fill: the value to insert instead of the special token ids, for example an ignored label.
        """
        if not self.num_tokens:
            return flat_N, lengths_B
        longer_B = lengths_B + self.num_tokens
        stops_B = np.cumsum(longer_B)
        begins_B = stops_B - longer_B
        longer_N = np.empty(int(stops_B[-1]) if len(stops_B) else 0, flat_N.dtype)
        longer_N[ragged.places(begins_B + len(self.prefix), lengths_B)] = flat_N
        longer_N[begins_B[:, None] + np.arange(len(self.prefix))] = self.prefix if fill is None else fill
        longer_N[stops_B[:, None] - np.arange(len(self.suffix), 0, -1)] = self.suffix if fill is None else fill
        return longer_N, longer_B


NO_TEMPLATE = Template()
"""The template of a tokenizer that adds no special tokens."""


def template_of(backend: tokenizers.Tokenizer) -> Template:
    """Return the special tokens that a tokenizer puts around a text.

    Raises:
        DataError: if the tokenizer changes a text in any other way.
    """
    words = sorted(
        backend.get_vocab(with_added_tokens=False).items(), key=lambda item: (not item[0].isalpha(), item[1])
    )
    for text, _ in words[:_MOST_TRIED]:  # known words, because an unknown word may yield no token
        plain, encoded = (backend.encode(text, add_special_tokens=adds) for adds in (False, True))
        if plain.ids or encoded.ids == plain.ids:
            break
    num_before = next((place for place, special in enumerate(encoded.special_tokens_mask) if not special), 0)
    end = num_before + len(plain.ids)
    if encoded.ids[num_before:end] != plain.ids or not all(encoded.special_tokens_mask[end:]):
        raise DataError(
            f"this tokenizer returns {encoded.tokens} for {text!r}, which is more than special tokens before and after "
            "the text: set tokenizer.special_tokens=false to train without them, or give another tokenizer"
        )
    if len(set(encoded.type_ids)) > 1:
        raise DataError(
            f"this tokenizer gives the tokens of one text the types {encoded.type_ids}, but training passes no token "
            "types to the model: set tokenizer.special_tokens=false to train without special tokens, or give another "
            "tokenizer"
        )
    return Template(tuple(encoded.ids[:num_before]), tuple(encoded.ids[end:]))
