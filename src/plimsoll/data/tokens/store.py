"""A corpus as one flat file of tokens, with an end token after each text and the position of each end.

Encoding is hundreds of times slower than reading, so each text is encoded only once. Texts are encoded in batches of
about 1 MiB on all cores, so the memory needed does not depend on the corpus. Long texts are split into pieces where
this changes no token, see `Corpus.pieces`.

After every 16 MiB of text, the files are synced and the progress is written to a journal. After Ctrl-C, a kill or a
full disk, the next call resumes from the journal and writes identical bytes. Tokens are stored in the smallest unsigned
type that holds the vocabulary.

Special tokens around a text (``[CLS]``, ``<s>``) are stored only if texts are read end to end (``is_stream``), once per
text. Otherwise they are added to each window when it is read (`plimsoll.data.samples.text_windows`). For words with
tags, the same pass writes a label for each token (`plimsoll.data.samples.tags`). If windows end at borders, it also
writes a mark for each token (`plimsoll.data.samples.borders`).
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.samples import ragged
from plimsoll.data.samples.borders import Piece, marked_pieces, marks_of
from plimsoll.data.samples.tags import NO_LABEL, Encoded, WordEncoder, tagged_words
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.tokens.template import NO_TEMPLATE, Template
from plimsoll.data.tokens.tokenizer import tokenizer_threads
from plimsoll.files.checksums import checked, require_whole
from plimsoll.files.store import Facts, Progress, Store, kept, kept_facts, require_space, silent
from plimsoll.records.base import write_atomically

if TYPE_CHECKING:
    import tokenizers

    from plimsoll.data.tokens.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20
_SHARD_BYTES = 16 << 20
_END_BYTES = 8
_WORD = "a"  # put before a piece from inside a text if the tokenizer needs it
_TOKENS_FILE, _ENDS_FILE, _LABELS_FILE, _MARKS_FILE = "tokens.bin", "ends.bin", "labels.bin", "marks.bin"
_JOURNAL_FILE = "done.json"


_Piece = tuple[Any, bool, int]  # the input of the encoder, whether it is the last of its text, and its size in bytes


class Tokens(Protocol):
    """Tokens of texts end to end, as in a `TokenStore`, from any source."""

    @property
    def tokens(self) -> Any:
        """The tokens of all texts, each followed by the end token; supports ``len`` and indexing with arrays."""
        ...

    @property
    def ends(self) -> NDArray[np.int64]:
        """The index in `tokens` of the end token of each text."""
        ...


class TokenStore:
    """The tokens of a corpus, memory-mapped. It is picklable: unpickling maps the files again.

    Text ``i`` is ``tokens[ends[i - 1] + 1 : ends[i]]`` (from 0 for the first); ``tokens[ends[i]]`` is the end token. If
    words have tags, ``labels`` holds for each token an index into ``tag_names``, or -100, and ``num_lost_words`` counts
    the words without a token. ``marks`` exist only if `tokenize` was called with ``borders``.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder = folder
        require_whole(folder / _ENDS_FILE)  # checked as a whole, because it is also searched
        self.tokens: NDArray[Any] = checked(folder / _TOKENS_FILE, facts["dtype"])
        self.ends: NDArray[np.int64] = np.memmap(folder / _ENDS_FILE, np.int64, "r")
        self.labels: NDArray[Any] | None = None
        self.tag_names: tuple[str, ...] = tuple(facts.get("tag_names", ()))
        self.num_lost_words: int = facts.get("num_lost_words", 0)
        if self.tag_names:
            self.labels = checked(folder / _LABELS_FILE, facts["label_type"])
        self._has_marks: bool = facts.get("has_marks", False)

    @property
    def marks(self) -> NDArray[np.uint8]:
        """The borders at which each token begins, as bits of a byte: see `plimsoll.data.samples.borders.MARKS`."""
        assert self._has_marks, self.folder
        return checked(self.folder / _MARKS_FILE, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_tokens, (self.folder,)


@kept
def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    progress: Progress = silent,
    *,
    is_stream: bool = False,
    borders: bool = False,
) -> Store[TokenStore]:
    """Return the tokens of ``corpus``, from the cache or encoded now. An interrupted call is resumed.

    Args:
        corpus: the texts.
        tokenizer: the tokenizer that encodes them.
        cache: the folder for the result.
        progress: called with the stage ``"tokens"``, and the done and total bytes of text.
        is_stream: whether texts are read end to end, each with the special tokens of the tokenizer around it. The last
            special token after a text then replaces the end token.
        borders: whether windows may end at borders; this takes one more byte per token.

    Raises:
        DataError: if a file of the corpus has changed since it was indexed.
        OutputError: if the cache cannot be written, or as soon as it is clear that the tokens do not fit on the disk.
    """
    kinds = {"-words": bool(corpus.tag_counts), "-stream": is_stream and tokenizer.template != NO_TEMPLATE}
    kind = "".join(name for name, is_so in (kinds | {"-borders": borders}).items() if is_so)
    folder = cache / f"tokens-{corpus.key[:16]}-{tokenizer.key[:16]}{kind}"
    write = partial(_write, corpus, tokenizer, progress, tokenizer.template if is_stream else NO_TEMPLATE, borders)
    return Store(folder, write, TokenStore, goes_on=True)


def open_tokens(folder: Path) -> TokenStore:
    """Map the tokens that `tokenize` stored at ``folder``.

    Raises:
        DataError: if the tokens are missing or damaged.
    """
    return TokenStore(folder, kept_facts(folder, "tokens"))


class _Batch(NamedTuple):
    """Some pieces of texts, whether each is the last of its text, and the size of all pieces in bytes."""

    pieces: list[Any]
    are_last: list[bool]
    num_bytes: int


class _Done(NamedTuple):
    """The finished amount: whole texts, pieces of the unfinished text, tokens, bytes of text, words without a token."""

    texts: int = 0
    open_pieces: int = 0
    tokens: int = 0
    bytes: int = 0
    lost_words: int = 0


class _Writing:
    """The files of a store being written, and the journal of the amount that is synced to disk."""

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], label_type: np.dtype[Any] | None, borders: bool, around: Template
    ) -> None:
        self._folder, self._around = folder, around
        self._types = {_TOKENS_FILE: dtype}
        if label_type is not None:
            self._types[_LABELS_FILE] = label_type
        if borders:
            self._types[_MARKS_FILE] = np.dtype(np.uint8)
        self.done = self._noted()
        self._noted_bytes = self.done.bytes

    def __enter__(self) -> _Writing:
        self._files = {name: self._opened(name, num_bytes) for name, num_bytes in self._num_bytes(self.done).items()}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def num_file_bytes(self) -> int:
        """The current size of the files in bytes."""
        return sum(self._num_bytes(self.done).values())

    def add(self, batch: _Batch, encoded: Encoded) -> None:
        """Write the tokens of some pieces, with the special tokens around each text."""
        texts, open_pieces, num_tokens, num_bytes, num_lost_words = self.done
        are_last = np.array(batch.are_last)
        are_first = np.concatenate(([not open_pieces], are_last[:-1]))
        stops = np.cumsum(encoded.lengths)
        prefix, suffix = map(len, self._around)
        # For each piece: the special tokens before it, then those after it.
        places = np.stack((stops - encoded.lengths, stops), axis=1).ravel()
        nums = np.stack((are_first * prefix, are_last * suffix), axis=1).ravel()
        added = np.repeat(places, nums)
        which = ragged.places(np.tile([0, prefix], len(stops)), nums)
        tokens = np.insert(encoded.tokens, added, np.array([*self._around.prefix, *self._around.suffix])[which])
        self._append(_TOKENS_FILE, tokens)
        ends = (stops + np.cumsum(nums)[1::2] - 1)[are_last]
        self._files[_ENDS_FILE].write((ends + num_tokens).data)
        if encoded.labels is not None:
            self._append(_LABELS_FILE, np.insert(encoded.labels, added, NO_LABEL))
        if encoded.marks is not None:
            self._append(_MARKS_FILE, np.insert(encoded.marks, added, 0))
        num_open = len(are_last) - 1 - int(np.flatnonzero(are_last)[-1]) if len(ends) else open_pieces + len(are_last)
        self.done = _Done(
            texts + len(ends),
            num_open,
            num_tokens + len(tokens),
            num_bytes + batch.num_bytes,
            num_lost_words + encoded.num_lost_words,
        )
        if self.done.bytes - self._noted_bytes >= _SHARD_BYTES:
            self._note()

    def _append(self, name: str, values: NDArray[Any]) -> None:
        self._files[name].write(values.astype(self._types[name]).data)

    def _num_bytes(self, done: _Done) -> dict[str, int]:
        """Return the size in bytes of each file for an amount of finished work."""
        sizes = {name: done.tokens * dtype.itemsize for name, dtype in self._types.items()}
        return sizes | {_ENDS_FILE: done.texts * _END_BYTES}

    def _noted(self) -> _Done:
        """Return the finished amount in the journal; zeros if a file is shorter than the journal records."""
        try:
            done = _Done(*json.loads((self._folder / _JOURNAL_FILE).read_bytes()))
            wanted = self._num_bytes(done).items()
            has_all = all((self._folder / name).stat().st_size >= num_bytes for name, num_bytes in wanted)
        except (FileNotFoundError, ValueError, TypeError):
            return _Done()
        return done if has_all else _Done()

    def _note(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        write_atomically(self._folder / _JOURNAL_FILE, json.dumps(self.done).encode(), "cache folder")
        self._noted_bytes = self.done.bytes

    def _opened(self, name: str, num_good_bytes: int) -> BinaryIO:
        file = (self._folder / name).open("ab")
        file.truncate(num_good_bytes)
        return file


def _write(  # noqa: PLR0917 -- the arguments of `tokenize`
    corpus: Corpus, tokenizer: Tokenizer, progress: Progress, template: Template, borders: bool, folder: Path
) -> Facts:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    num_tags = len(corpus.tag_counts)
    label_type = np.promote_types(np.int8, np.min_scalar_type(-num_tags)) if num_tags else None
    around = Template(template.prefix, template.suffix or (tokenizer.end_id,))
    with _Writing(folder, dtype, label_type, borders, around) as writing:
        if num_tags:
            words = islice(tagged_words(corpus, writing.done.texts), writing.done.open_pieces, None)
            pieces: Iterator[_Piece] = ((piece, piece.is_last, piece.num_bytes) for piece in words)
            encode: Callable[[list[Any]], Encoded] = WordEncoder(tokenizer.backend).labelled
        else:
            marked = marked_pieces(corpus.pieces(writing.done.texts), borders)
            texts = islice(marked, writing.done.open_pieces, None)
            pieces = ((piece, piece.is_last, _num_bytes_of(piece.text)) for piece in texts)
            encode = partial(TextEncoder(tokenizer.backend).encode, with_marks=borders)
        for batch, encoded in _encoded_ahead(_batches(pieces), encode):
            writing.add(batch, encoded)
            # Bytes alone underestimate, because table rows have more bytes than their texts. The number of texts alone
            # does not work for a file that is one text.
            share = max(writing.done.bytes / corpus.num_bytes, writing.done.texts / len(corpus))
            progress("tokens", round(share * corpus.num_bytes), corpus.num_bytes)
            require_space(folder, int((1 / share - 1) * writing.num_file_bytes))
    (folder / _JOURNAL_FILE).unlink(missing_ok=True)
    facts: Facts = {"dtype": dtype.name, "has_marks": borders}
    if label_type is not None:
        names = list(corpus.tag_counts)
        facts |= {"label_type": label_type.name, "tag_names": names, "num_lost_words": writing.done.lost_words}
    return facts


def _num_bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _batches(pieces: Iterable[_Piece]) -> Iterator[_Batch]:
    """Yield pieces of texts, about 1 MiB at a time."""
    texts: list[Any] = []
    are_last: list[bool] = []
    num_bytes = 0
    for piece, is_last, num_piece_bytes in pieces:
        texts.append(piece)
        are_last.append(is_last)
        num_bytes += num_piece_bytes
        if num_bytes >= _BATCH_BYTES:
            yield _Batch(texts, are_last, num_bytes)
            texts, are_last, num_bytes = [], [], 0
    if texts:
        yield _Batch(texts, are_last, num_bytes)


class TextEncoder:
    """Encoder of texts, and of pieces of longer texts, with the same tokens as in the whole text.

    Some tokenizers put a space before each input. A piece from inside a text is then encoded after a word, and the
    tokens of that word are removed.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @cached_property
    def _before(self) -> tuple[str, int]:
        """The text to put before a piece from inside a text, and its number of tokens."""
        texts = f"{_WORD} b", _WORD, " b"
        both, word, rest = (self._backend.encode(text, add_special_tokens=False).ids for text in texts)
        is_needed = both != word + rest and both[: len(word)] == word
        return (_WORD, len(word)) if is_needed else ("", 0)

    def encode(self, pieces: Sequence[Piece], with_marks: bool = False) -> Encoded:
        """Return the tokens of some pieces and, if ``with_marks``, a border mark for each token."""
        encode = self._backend.encode_batch if with_marks else self._backend.encode_batch_fast  # fast: no offsets
        before = [("", 0) if piece.is_first else self._before for piece in pieces]
        texts = [word + piece.text for (word, _), piece in zip(before, pieces, strict=True)]
        encodings = encode(texts, add_special_tokens=False)
        tokens, lengths, marks = array("I"), [], [np.empty(0, np.uint8)]
        for piece, encoding, (word, left_out) in zip(pieces, encodings, before, strict=True):
            ids = encoding.ids[left_out:] if left_out else encoding.ids
            tokens.fromlist(ids)
            lengths.append(len(ids))
            if with_marks:
                marks.append(marks_of(encoding.offsets[left_out:], piece.begins, len(word)))
        flat = np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32)
        return Encoded(flat, np.array(lengths, np.int64), marks=np.concatenate(marks) if with_marks else None)


def _encoded_ahead(
    batches: Iterator[_Batch], encode: Callable[[list[Any]], Encoded]
) -> Iterator[tuple[_Batch, Encoded]]:
    """Yield each batch with its tokens while a thread encodes the next batch (``tokenizers`` releases the GIL)."""
    with tokenizer_threads(), ThreadPoolExecutor(1) as executor:
        before: tuple[_Batch, Future[Encoded]] | None = None
        for batch in batches:
            current = batch, executor.submit(encode, batch.pieces)
            if before is not None:
                yield before[0], before[1].result()
            before = current
        if before is not None:
            yield before[0], before[1].result()
