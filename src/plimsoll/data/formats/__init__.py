"""Where texts lie in a file: one module per format, each with the functions of `Format`.

A module turns the bytes of a file, seen once from begin to end, into byte spans (one per text), and the bytes of a span
into its text. So a corpus needs 16 bytes of (mapped) index per text and no copy of the file. The contract tests run
over every module of this folder.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Unit = Literal["document", "line"]


class Format(Protocol):
    """What a module of this folder offers."""

    def spans(self, chunks: Iterable[bytes], unit: Unit) -> Iterator[NDArray[np.int64]]:
        """Return the byte offsets (start, end) of the texts of a file given in chunks, as arrays of shape (any, 2).

        Raises:
            DataError: where the file is not of this format; the message says at which byte, and names no file.
        """
        ...

    def decode(self, raw: bytes) -> str:
        """Return the text of one span, or of a part of it cut between two characters."""
        ...
