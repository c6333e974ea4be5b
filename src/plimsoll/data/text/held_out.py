"""Held-out texts, the training texts and held-out texts as separate streams, and texts that occur in both.

Whole texts are held out: random texts, or the last texts. If texts are stored end to end, the texts of each side
(training or held-out) form a stream: `ChosenTexts` provides its tokens. The places of these texts in the store are in
memory-mapped tables: 16 bytes per run of neighbouring texts, and 8 bytes per text. A text that occurs literally on both
sides is found by a hash of its characters. Not handled: nearly identical texts.

Shapes: D texts, N tokens, R runs of neighbouring texts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from plimsoll.data.batches.order import Order
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.tokens.store import TokenStore
from plimsoll.errors import DataError
from plimsoll.files.checksums import require_whole
from plimsoll.files.store import Facts, Store, kept, kept_facts
from plimsoll.records.job import Job

Ints = NDArray[np.int64]
IsChosen = Callable[[Ints], NDArray[np.bool_]]

_RECIPE = 1  # increase it when the same choice gives other tokens
_PLACES_FILE, _SHIFTS_FILE, _ENDS_FILE = "places.bin", "shifts.bin", "ends.bin"
_TEXTS_PER_PASS = 1 << 18
_MOST_COMPARED = 1 << 20  # held-out texts; 8 MiB of hashes


def num_held_out(num_samples: int, share: float) -> int:
    """Return the number of samples to hold out: at least 1 if ``share`` is above 0, and at most all but 1.

    Args:
        num_samples: the number of all samples.
        share: the fraction of the samples to hold out, from 0 to 1.

    Raises:
        DataError: if a share is to be held out of fewer than 2 samples.
    """
    if share and num_samples < 2:
        raise DataError(
            f"cannot hold out a share of {share:g} of {num_samples} sample: give more text, a shorter sequence_length, "
            f"or a file for data.validation"
        )
    return min(max(round(num_samples * share), 1), num_samples - 1) if share else 0


class Side(NamedTuple):
    """The training or the held-out texts: a name for cache keys, a test of text indices, and the number of texts."""

    name: str
    is_chosen: IsChosen
    num_texts: int


def sides(num_texts: int, share: float, seed: int, is_drawn: bool = True) -> tuple[Side, Side]:
    """Return the training and the held-out texts, chosen as by `plimsoll.data.samples.windows.split`.

    Args:
        num_texts: the number of all texts.
        share: the fraction of the texts to hold out, more than 0.
        seed: the seed of the random choice.
        is_drawn: whether held-out texts are drawn at random; otherwise they are the last texts.

    Raises:
        DataError: if there are fewer than 2 texts.
    """
    if num_texts < 2:
        raise DataError(
            f"cannot hold out a share of {share:g} of {num_texts} text, because windows of a text stay on one side: "
            f"set data.unit=line or data.unit=paragraph if it has several, or give a file for data.validation"
        )
    num_validation, order = num_held_out(num_texts, share), Order(num_texts, seed)

    def is_held_out(texts: Ints) -> NDArray[np.bool_]:
        return order.positions(0, texts) < num_validation if is_drawn else texts >= num_texts - num_validation

    name = f"{num_validation}-{seed if is_drawn else 'last'}"
    return (
        Side(f"train-{name}", lambda texts: ~is_held_out(texts), num_texts - num_validation),
        Side(f"validation-{name}", is_held_out, num_validation),
    )


class ChosenTexts:
    """The tokens of some texts of a store, with the interface `plimsoll.data.tokens.store.Tokens`; picklable."""

    def __init__(self, store: TokenStore, folder: Path) -> None:
        facts = kept_facts(folder, "chosen texts")
        require_whole(folder)
        self.store, self.folder = store, folder
        places, shifts = (np.asarray(np.memmap(folder / name, np.int64, "r")) for name in (_PLACES_FILE, _SHIFTS_FILE))
        self.tokens = _Joined(store.tokens, places, shifts, facts["num_tokens"])
        self.ends: Ints = np.memmap(folder / _ENDS_FILE, np.int64, "r")

    def __reduce__(self) -> tuple[Any, ...]:
        return ChosenTexts, (self.store, self.folder)


class _Joined:
    """Runs of consecutive tokens of a store, joined end to end.

    ``places`` (R,) are the starts of the runs in this stream. The place of a token plus the entry of its run in
    ``shifts`` (R,) is its place in the store.
    """

    def __init__(self, tokens: NDArray[Any], places: Ints, shifts: Ints, num_tokens: int) -> None:
        self._tokens, self._places, self._shifts, self._num_tokens = tokens, places, shifts, num_tokens
        self.dtype = tokens.dtype

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, places: Ints) -> NDArray[Any]:
        runs = np.searchsorted(self._places, places, "right") - 1
        tokens: NDArray[Any] = self._tokens[places + self._shifts[runs]]
        return tokens


@kept
def choose_texts(store: TokenStore, name: str, is_chosen: IsChosen) -> Store[ChosenTexts]:
    """Return some texts of a store as one stream, from the cache folder that holds ``store``, or selected now.

    Args:
        store: the tokens of all texts.
        name: the cache name of the selection, equal for equal selections.
        is_chosen: the predicate that maps the indices of texts, (D,) int64, to (D,) bool.

    Raises:
        OutputError: if the cache cannot be written.
    """

    def write(folder: Path) -> Facts:
        num_tokens = last_stop = 0
        with ExitStack() as files:
            names = (_PLACES_FILE, _SHIFTS_FILE, _ENDS_FILE)
            places_file, shifts_file, ends_file = (files.enter_context((folder / name).open("wb")) for name in names)
            for first in range(0, len(store.ends), _TEXTS_PER_PASS):
                texts_D = np.arange(first, min(first + _TEXTS_PER_PASS, len(store.ends)))
                texts_D = texts_D[is_chosen(texts_D)]
                if not len(texts_D):
                    continue
                starts_D, stops_D = np.where(texts_D > 0, store.ends[texts_D - 1] + 1, 0), store.ends[texts_D] + 1
                places_D = num_tokens + np.cumsum(stops_D - starts_D)
                begins_run_D = starts_D != np.concatenate(([last_stop if num_tokens else -1], stops_D[:-1]))
                begins_D = places_D - (stops_D - starts_D)
                places_file.write(begins_D[begins_run_D].data)
                shifts_file.write((starts_D - begins_D)[begins_run_D].data)
                ends_file.write((places_D - 1).data)
                num_tokens, last_stop = int(places_D[-1]), int(stops_D[-1])
        return {"num_tokens": num_tokens}

    folder = store.folder.with_name(f"{store.folder.name}-texts-{_RECIPE}-{name}")
    return Store(folder, write, lambda folder, _: ChosenTexts(store, folder))


def signatures(corpus: Corpus) -> Iterator[tuple[Ints, NDArray[np.uint64]]]:
    """Yield the indices of texts and a hash of the characters of each text, in order.

    White space around a text is ignored (a file ends with a newline, a row does not), and blank texts are left out.
    The memory needed is one piece of a text (`Corpus.pieces`) and the white space before it.
    """
    texts, hashes, number = array("q"), array("Q"), 0
    hasher, white = xxhash.xxh3_64(), ""
    is_blank = True
    for piece, is_last in corpus.pieces():
        inside = piece.lstrip() if is_blank else white + piece
        ink = inside.rstrip()
        if ink:
            hasher.update(ink.encode())
        is_blank, white = is_blank and not ink, inside[len(ink) :]
        if not is_last:
            continue
        if not is_blank:
            texts.append(number)
            hashes.append(hasher.intdigest())
        number, is_blank, white = number + 1, True, ""
        hasher.reset()
        if len(texts) >= _TEXTS_PER_PASS:
            yield np.array(texts, np.int64), np.array(hashes, np.uint64)
            texts, hashes = array("q"), array("Q")
    if texts:
        yield np.array(texts, np.int64), np.array(hashes, np.uint64)


def num_on_both_sides(
    held: Iterable[tuple[Ints, NDArray[np.uint64]]], trained: Iterable[tuple[Ints, NDArray[np.uint64]]]
) -> int:
    """Return how many of the first million held-out texts are also training texts.

    Args:
        held: the indices and hashes of held-out texts.
        trained: the indices and hashes of training texts.
    """
    hashes: list[NDArray[np.uint64]] = []
    for _, some in held:
        hashes.append(some[: _MOST_COMPARED - sum(map(len, hashes))])
    wanted, nums = np.unique(np.concatenate(hashes), return_counts=True) if hashes else (np.empty(0, np.uint64), None)
    is_found = np.zeros(len(wanted), np.bool_)
    for _, some in trained:
        is_found |= np.isin(wanted, some)
    return 0 if nums is None else int(nums[is_found].sum())


@kept
def num_repeated(corpus: Corpus, job: Job, other: Corpus | None, cache: Path) -> Store[int]:
    """Return the number of held-out texts of a job that are also training texts, from the cache or counted now.

    Args:
        corpus: the training texts, of which a share is held out if ``other`` is ``None``.
        job: the job, which defines the share and how the held-out texts are chosen.
        other: the validation texts, if they have separate files.
        cache: the folder for the result.

    Raises:
        OutputError: if the cache cannot be written.
    """
    share = job.data.validation

    def write(_: Path) -> Facts:
        if other is not None:
            return {"num": num_on_both_sides(signatures(other), signatures(corpus))}
        assert isinstance(share, float), share
        training, held = sides(len(corpus), share, job.seed, job.draws_held_out)
        return {"num": num_on_both_sides(*(only(side.is_chosen, signatures(corpus)) for side in (held, training)))}

    choice = (share, job.seed, job.draws_held_out) if other is None else other.key
    name = hashlib.sha256(repr((corpus.key, choice)).encode()).hexdigest()[:16]
    return Store(cache / f"repeated-texts-{name}", write, lambda _, facts: int(facts["num"]))


def said_of_repeated(num_texts: int) -> Iterator[str]:
    """Yield a message that ``num_texts`` held-out texts are also training texts, if there are any."""
    if num_texts:
        are = "is a training text" if num_texts == 1 else "are training texts"
        yield f"{num_texts:,} of the held-out texts {are}, too, word for word: metrics on them measure memorization"


def only(
    is_wanted: IsChosen, found: Iterable[tuple[Ints, NDArray[np.uint64]]]
) -> Iterator[tuple[Ints, NDArray[np.uint64]]]:
    """Yield the indices and hashes of the texts for which ``is_wanted`` holds."""
    for texts, hashes in found:
        wanted = is_wanted(texts)
        yield texts[wanted], hashes[wanted]


def refuse_same_files(train: Corpus, validation: Corpus) -> None:
    """Raise if a validation file is also a training file, by any path or link.

    Raises:
        DataError: if a file is in both.
    """
    own = {_identity(path): path for path in train.paths}
    for path in validation.paths:
        same = own.get(_identity(path))
        if same is not None:
            through = "" if same == path else f" (as {same}, the same file)"
            raise DataError(
                f"the validation text {path} is among the training texts{through}, so nothing would be held out: move "
                "it out of data.train, or hold out a share, such as data.validation=0.1"
            )


def _identity(path: Path) -> tuple[int, int] | str:
    """Return the device and inode of a file, or its path as a string if it does not exist."""
    try:
        status = path.stat()
    except OSError:  # a remote file, or a name that is not a path
        return str(path)
    return status.st_dev, status.st_ino
