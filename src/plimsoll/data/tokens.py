"""A corpus as one flat file of tokens, each text followed by the end token, and the place where each text ends.

Texts are encoded once (encoding is hundreds of times slower than reading), in batches of about 1 MiB of text on all
cores, so the memory needed does not depend on the corpus; long texts are cut into pieces where that changes no token,
see `Corpus.pieces`. Every 16 MiB of text what is done so far is synced and noted in a journal: after Ctrl-C, a kill or
a full disk the next call goes on from there, to the same bytes. Tokens are stored in the smallest unsigned type that
holds the vocabulary. No special tokens are added but the end token: a ``[CLS]`` or ``<s>`` that a tokenizer's template
would put around a text is NOT stored.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.corpus import Corpus
from plimsoll.data.tokenizer import tokenizer_threads
from plimsoll.records.base import write_atomically
from plimsoll.store import Facts, Progress, kept_facts, require_space, silent, stored

if TYPE_CHECKING:
    import tokenizers

    from plimsoll.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20
_SHARD_BYTES = 16 << 20
_END_BYTES = 8
_TOKENS_FILE, _ENDS_FILE, _JOURNAL_FILE = "tokens.bin", "ends.bin", "done.json"


class Tokens(Protocol):
    """Tokens of texts end to end, as a `TokenStore` has them, wherever they are."""

    @property
    def tokens(self) -> NDArray[Any]:
        """The tokens of all texts, the end token after each."""
        ...

    @property
    def ends(self) -> NDArray[np.int64]:
        """The place of the end token of each text."""
        ...


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
    """Return the tokens of ``corpus``, from the cache or encoded now; what an earlier call has done is not done again.

    Args:
        corpus: the texts.
        tokenizer: how to encode them.
        cache: the folder for the result.
        progress: called with the stage ``"tokens"``.

    Raises:
        DataError: if a file of the corpus has changed since it was indexed.
        OutputError: if the cache cannot be written, or as soon as it is clear that the disk will not hold the tokens.
    """
    folder = tokens_folder(corpus, tokenizer, cache)
    return TokenStore(folder, stored(folder, partial(_write, corpus, tokenizer, progress), goes_on=True))


def tokens_folder(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> Path:
    """Return where `tokenize` keeps the tokens."""
    return cache / f"tokens-{corpus.key[:16]}-{tokenizer.key[:16]}"


def open_tokens(folder: Path) -> TokenStore:
    """Map the tokens that `tokenize` stored at ``folder``.

    Raises:
        DataError: if they are gone or torn.
    """
    return TokenStore(folder, kept_facts(folder, "tokens"))


class _Batch(NamedTuple):
    """Some pieces, whether each is the last of its text, and their size."""

    pieces: list[str]
    are_last: list[bool]
    num_bytes: int


class _Done(NamedTuple):
    """How much is written: whole texts, the pieces of the text that goes on, tokens, and bytes of text."""

    texts: int = 0
    open_pieces: int = 0
    tokens: int = 0
    bytes: int = 0


class _Writing:
    """The files of a store that is being written, and the journal of how much of them is on the disk for sure."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder, self._dtype = folder, dtype
        self.done = self._noted()
        self._noted_bytes = self.done.bytes

    def __enter__(self) -> _Writing:
        self._tokens = self._opened(_TOKENS_FILE, self.done.tokens * self._dtype.itemsize)
        self._ends = self._opened(_ENDS_FILE, self.done.texts * _END_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._ends.close()

    @property
    def num_file_bytes(self) -> int:
        """What the files take so far."""
        return self.done.tokens * self._dtype.itemsize + self.done.texts * _END_BYTES

    def add(self, batch: _Batch, encodings: list[tokenizers.Encoding], end_id: int) -> None:
        """Write the tokens of some pieces, with the end token after the last piece of each text."""
        tokens = array("I")
        ends = array("q")
        open_pieces = self.done.open_pieces
        for encoding, is_last in zip(encodings, batch.are_last, strict=True):
            tokens.fromlist(encoding.ids)
            open_pieces += 1
            if is_last:
                ends.append(self.done.tokens + len(tokens))
                tokens.append(end_id)
                open_pieces = 0
        self._tokens.write(np.frombuffer(tokens, np.uint32).astype(self._dtype).data)
        self._ends.write(ends)
        texts, _, num_tokens, num_bytes = self.done
        self.done = _Done(texts + len(ends), open_pieces, num_tokens + len(tokens), num_bytes + batch.num_bytes)
        if self.done.bytes - self._noted_bytes >= _SHARD_BYTES:
            self._note()

    def _noted(self) -> _Done:
        """Return what the journal says, and nothing if the files have less than that."""
        try:
            done = _Done(*json.loads((self._folder / _JOURNAL_FILE).read_bytes()))
            sizes_bytes = [(self._folder / name).stat().st_size for name in (_TOKENS_FILE, _ENDS_FILE)]
        except (FileNotFoundError, ValueError, TypeError):
            return _Done()
        has_all = sizes_bytes[0] >= done.tokens * self._dtype.itemsize and sizes_bytes[1] >= done.texts * _END_BYTES
        return done if has_all else _Done()

    def _note(self) -> None:
        for file in (self._tokens, self._ends):
            file.flush()
            os.fsync(file.fileno())
        write_atomically(self._folder / _JOURNAL_FILE, json.dumps(self.done).encode(), "cache folder")
        self._noted_bytes = self.done.bytes

    def _opened(self, name: str, num_good_bytes: int) -> BinaryIO:
        file = (self._folder / name).open("ab")
        file.truncate(num_good_bytes)
        return file


def _write(corpus: Corpus, tokenizer: Tokenizer, progress: Progress, folder: Path) -> Facts:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with _Writing(folder, dtype) as writing:
        pieces = islice(corpus.pieces(writing.done.texts), writing.done.open_pieces, None)
        for batch, encodings in _encoded_ahead(_batches(pieces), tokenizer):
            writing.add(batch, encodings, tokenizer.end_id)
            # Rows of a table have more bytes than their texts; a file that is one text has no other measure.
            share = max(writing.done.bytes / corpus.num_bytes, writing.done.texts / len(corpus))
            progress("tokens", round(share * corpus.num_bytes), corpus.num_bytes)
            require_space(folder, int((1 / share - 1) * writing.num_file_bytes))
    (folder / _JOURNAL_FILE).unlink(missing_ok=True)
    return {"dtype": dtype.name}


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[_Batch]:
    """Yield pieces, about 1 MiB together."""
    texts: list[str] = []
    are_last: list[bool] = []
    num_bytes = 0
    for piece, is_last in pieces:
        texts.append(piece)
        are_last.append(is_last)
        num_bytes += len(piece) if piece.isascii() else len(piece.encode())
        if num_bytes >= _BATCH_BYTES:
            yield _Batch(texts, are_last, num_bytes)
            texts, are_last, num_bytes = [], [], 0
    if texts:
        yield _Batch(texts, are_last, num_bytes)


def _encoded_ahead(
    batches: Iterator[_Batch], tokenizer: Tokenizer
) -> Iterator[tuple[_Batch, list[tokenizers.Encoding]]]:
    """Yield each batch with its tokens; the next is being encoded meanwhile, for the library lets go of Python."""
    encode = partial(tokenizer.backend.encode_batch_fast, add_special_tokens=False)
    with tokenizer_threads(), ThreadPoolExecutor(1) as executor:
        before: tuple[_Batch, Future[list[tokenizers.Encoding]]] | None = None
        for batch in batches:
            current = batch, executor.submit(encode, batch.pieces)
            if before is not None:
                yield before[0], before[1].result()
            before = current
        if before is not None:
            yield before[0], before[1].result()
