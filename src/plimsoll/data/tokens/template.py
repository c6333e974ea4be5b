"""The special tokens that a tokenizer puts around a text, as ``[CLS]`` before it and ``[SEP]`` behind.

What a tokenizer adds is found out by trying, so it does not matter how its file says it. Covers tokens before and
behind one text. Refused is whatever else a tokenizer may do with it: to repeat it, or to give parts of it another token
type. NOT covered: pairs of texts.

Shapes: B rows, N elements of all rows.
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

_MOST_TRIED = 256  # words of the vocabulary, for a tokenizer that makes nothing of the first


class Template(NamedTuple):
    """The ids before and behind each text, or each window of a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens of a sample are not of its text."""
        return len(self.prefix) + len(self.suffix)

    def room(self, sequence_length: int) -> int:
        """Return how many tokens of the text fit into a sample of ``sequence_length``.

        Raises:
            DataError: if none does.
        """
        if self.num_tokens >= sequence_length:
            raise DataError(
                f"sequence_length = {sequence_length} leaves no room for a text beside the {self.num_tokens} special "
                f"tokens of the tokenizer: give more than {self.num_tokens}"
            )
        return sequence_length - self.num_tokens

    def around(
        self, flat_N: NDArray[Element], lengths_B: Ints, fill: int | None = None
    ) -> tuple[NDArray[Element], Ints]:
        """Put the special tokens around each row; return the longer rows end to end, and their lengths (B,).

        Args:
            flat_N: what the rows hold, end to end.
            lengths_B: of the rows; a row may be empty.
            fill: what stands for the special tokens in place of their ids, as a label does.
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
"""Of a tokenizer that puts nothing around a text."""


def template_of(backend: tokenizers.Tokenizer) -> Template:
    """Return what a tokenizer puts around a text.

    Raises:
        DataError: if it does something else with a text than that.
    """
    words = sorted(
        backend.get_vocab(with_added_tokens=False).items(), key=lambda item: (not item[0].isalpha(), item[1])
    )
    for text, _ in words[:_MOST_TRIED]:  # others may be unknown, which not every tokenizer has a token for
        plain, encoded = (backend.encode(text, add_special_tokens=adds) for adds in (False, True))
        if plain.ids or encoded.ids == plain.ids:
            break
    num_before = next((place for place, special in enumerate(encoded.special_tokens_mask) if not special), 0)
    end = num_before + len(plain.ids)
    if encoded.ids[num_before:end] != plain.ids or not all(encoded.special_tokens_mask[end:]):
        raise DataError(
            f"this tokenizer makes {encoded.tokens} of {text!r}, which is more than special tokens before and behind "
            "the text: set tokenizer.special_tokens=false to train without them, or give another tokenizer"
        )
    if len(set(encoded.type_ids)) > 1:
        raise DataError(
            f"this tokenizer gives the tokens of one text the types {encoded.type_ids}, and a training feeds no token "
            "types: set tokenizer.special_tokens=false to train without special tokens, or give another tokenizer"
        )
    return Template(tuple(encoded.ids[:num_before]), tuple(encoded.ids[end:]))
