"""A corpus as one flat file of tokens, each text followed by the end token, and the place where each text ends.

Texts are encoded once (encoding is hundreds of times slower than reading), in batches of about 1 MiB of text on all
cores, so the memory needed does not depend on the corpus; long texts are cut into pieces where that changes no token,
see `Corpus.pieces`. Tokens are stored in the smallest unsigned type that holds the vocabulary. No special tokens are
added but the end token: a ``[CLS]`` or ``<s>`` that a tokenizer's template would put around a text is NOT stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.index import Corpus, Progress, silent
from plimsoll.data.store import Facts, read_facts, require_space, stored
from plimsoll.data.tokenizer import tokenizer_threads
from plimsoll.errors import DataError

if TYPE_CHECKING:
    from plimsoll.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20
_TOKENS_FILE, _ENDS_FILE = "tokens.bin", "ends.bin"


class TokenStore:
    """The tokens of a corpus, memory-mapped; picklable (mapped again on the other side).

    Text ``i`` is ``tokens[ends[i - 1] + 1 : ends[i]]`` (from 0 for the first); ``tokens[ends[i]]`` is the end token.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder = folder
        self.tokens: NDArray[Any] = np.memmap(folder / _TOKENS_FILE, facts["dtype"], "r")
        self.ends: NDArray[np.int64] = np.memmap(folder / _ENDS_FILE, np.int64, "r")

    def __reduce__(self) -> tuple[Any, ...]:
        return open_tokens, (self.folder,)


def tokenize(corpus: Corpus, tokenizer: Tokenizer, cache: Path, progress: Progress = silent) -> TokenStore:
    """Return the tokens of ``corpus``, from the cache or encoded now.

    Args:
        corpus: the texts.
        tokenizer: how to encode them.
        cache: the folder for the result.
        progress: called with the stage ``"tokens"``.

    Raises:
        DataError: if a file of the corpus has changed since it was indexed.
        OutputError: if the cache cannot be written, or as soon as it is clear that the disk will not hold the tokens.
    """
    folder = cache / f"tokens-{corpus.key[:16]}-{tokenizer.key[:16]}"
    return TokenStore(folder, stored(folder, partial(_write, corpus, tokenizer, progress)))


def open_tokens(folder: Path) -> TokenStore:
    """Map the tokens that `tokenize` stored at ``folder``.

    Raises:
        DataError: if they are gone or torn.
    """
    facts = read_facts(folder)
    if facts is None:
        raise DataError(f"the tokens {folder} are gone from the cache, or torn: prepare them again, as --resume does")
    return TokenStore(folder, facts)


def _write(corpus: Corpus, tokenizer: Tokenizer, progress: Progress, folder: Path) -> Facts:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    num_tokens = done_bytes = 0
    with (folder / _TOKENS_FILE).open("wb") as tokens_file, (folder / _ENDS_FILE).open("wb") as ends_file:
        for batch, num_bytes in _batches(corpus):
            tokens, ends = _encoded(batch, tokenizer)
            tokens_file.write(np.array(tokens, dtype).data)
            ends_file.write((np.array(ends, np.int64) + num_tokens).data)
            num_tokens, done_bytes = num_tokens + len(tokens), done_bytes + num_bytes
            progress("tokens", done_bytes, corpus.num_bytes)
            left_share = corpus.num_bytes / done_bytes - 1
            require_space(folder, int(left_share * (num_tokens * dtype.itemsize + ends_file.tell())))
    return {"dtype": dtype.name}


def _batches(corpus: Corpus) -> Iterator[tuple[list[tuple[str, bool]], int]]:
    """Yield pieces, about 1 MiB together, and their size in bytes."""
    batch, num_bytes = [], 0
    for piece, is_last in corpus.pieces():
        batch.append((piece, is_last))
        num_bytes += len(piece.encode())
        if num_bytes >= _BATCH_BYTES:
            yield batch, num_bytes
            batch, num_bytes = [], 0
    if batch:
        yield batch, num_bytes


def _encoded(batch: list[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens of the pieces, the end token after the last of each text, and the places of the end tokens."""
    with tokenizer_threads():
        encodings = tokenizer.backend.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
    tokens: list[int] = []
    ends = []
    for encoding, (_, is_last) in zip(encodings, batch, strict=True):
        tokens += encoding.ids
        if is_last:
            ends.append(len(tokens))
            tokens.append(tokenizer.end_id)
    return tokens, ends
