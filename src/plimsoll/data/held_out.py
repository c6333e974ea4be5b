"""Which texts are held out, the others as a stream of their own, and texts that are on both sides all the same.

Held out are whole texts, drawn or the last ones. Of texts that are laid end to end those of each side are laid end to
end by themselves: `ChosenTexts` are the tokens of a store as if it had no others, by a table of where they come from
(16 bytes for each run of neighbours, and 8 a text), memory-mapped. A text that stands on both sides, word for word, is
found by a hash of its tokens, or of its characters where there are no tokens yet. NOT covered: texts that are nearly
the same.

Shapes: D texts, N tokens, R runs of neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.checksums import require_whole
from plimsoll.data import ragged
from plimsoll.data.corpus import Corpus
from plimsoll.data.order import INCREMENT, Order, mixed
from plimsoll.data.tokens import TokenStore
from plimsoll.errors import DataError
from plimsoll.store import Facts, kept_facts, stored

Ints = NDArray[np.int64]
IsHeldOut = Callable[[Ints], NDArray[np.bool_]]

_RECIPE = 1  # raise it when the same choice gives other tokens
_PLACES_FILE, _SHIFTS_FILE, _ENDS_FILE = "places.bin", "shifts.bin", "ends.bin"
_TEXTS_PER_PASS, _TOKENS_PER_PASS = 1 << 18, 1 << 20
_MOST_COMPARED = 1 << 20  # of the held-out texts; 8 MiB of hashes


def num_held_out(num_samples: int, share: float) -> int:
    """Return how many samples a share is: with more than 0 at least one, and at least one is left.

    Raises:
        DataError: if a share is to be held out of fewer than 2 samples.
    """
    if share and num_samples < 2:
        raise DataError(
            f"cannot hold out a share of {share:g} of {num_samples} sample: give more text, a shorter sequence_length, "
            f"or a file for data.validation"
        )
    return min(max(round(num_samples * share), 1), num_samples - 1) if share else 0


def held_out(num_texts: int, share: float, seed: int, is_drawn: bool = True) -> IsHeldOut:
    """Return what says which texts are held out: those that `plimsoll.data.windows.split` holds out.

    Args:
        num_texts: how many there are.
        share: of them, more than 0.
        seed: another seed draws others.
        is_drawn: draw them; else they are the last ones.

    Raises:
        DataError: if there are fewer than 2.
    """
    if num_texts < 2:
        raise DataError(
            f"cannot hold out a share of {share:g} of {num_texts} text, for windows of a text stay on one side: set "
            f"data.unit=line or data.unit=paragraph if it has several, or give a file for data.validation"
        )
    num_validation = num_held_out(num_texts, share)
    if not is_drawn:
        return lambda texts: texts >= num_texts - num_validation
    order = Order(num_texts, seed)
    return lambda texts: order.positions(0, texts) < num_validation


def choice_name(num_texts: int, share: float, seed: int, is_drawn: bool) -> str:
    """Return what tells this choice from others, to be kept under."""
    return f"{num_held_out(num_texts, share)}-{seed if is_drawn else 'last'}"


class ChosenTexts:
    """Some texts of a store as `plimsoll.data.tokens.Tokens`; picklable."""

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
    """The tokens of runs end to end: where each begins among them (R,), and how much farther on it is in the store."""

    def __init__(self, tokens: NDArray[Any], places: Ints, shifts: Ints, num_tokens: int) -> None:
        self._tokens, self._places, self._shifts, self._num_tokens = tokens, places, shifts, num_tokens
        self.dtype = tokens.dtype

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, places: Ints) -> NDArray[Any]:
        runs = np.searchsorted(self._places, places, "right") - 1
        tokens: NDArray[Any] = self._tokens[places + self._shifts[runs]]
        return tokens


def choose_texts(store: TokenStore, name: str, is_chosen: IsHeldOut) -> ChosenTexts:
    """Lay some texts of a store end to end; kept in the cache beside it.

    Args:
        store: the texts.
        name: what the choice is kept under: the same for the same choice.
        is_chosen: which of these texts (given by their numbers) are wanted.

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
    stored(folder, write)
    return ChosenTexts(store, folder)


def signatures(store: TokenStore) -> Iterator[tuple[Ints, NDArray[np.uint64]]]:
    """Yield the numbers of texts and a hash of the tokens of each, in order; texts without a token are left out."""
    text, carried, num_tokens = 0, np.uint64(0), len(store.tokens)
    for begin in range(0, num_tokens, _TOKENS_PER_PASS):
        stop = min(begin + _TOKENS_PER_PASS, num_tokens)
        last = int(np.searchsorted(store.ends, stop - 1))
        ends_D = np.asarray(store.ends[text : last + 1])
        starts_D = np.concatenate(([store.ends[text - 1] + 1 if text else 0], ends_D[:-1] + 1))
        first_D = np.maximum(starts_D, begin)
        lengths_D = np.minimum(ends_D + 1, stop) - first_D
        places_N = np.repeat(first_D - starts_D, lengths_D) + ragged.positions(lengths_D)
        tokens_N = np.asarray(store.tokens[begin:stop]).astype(np.uint64)
        hashes_N = mixed(tokens_N + (places_N.astype(np.uint64) + np.uint64(1)) * np.uint64(INCREMENT))
        sums_D = np.add.reduceat(hashes_N, np.cumsum(lengths_D) - lengths_D)
        sums_D[:1] += carried
        num_done = last - text + (int(ends_D[-1]) < stop)
        carried = np.uint64(0) if num_done > last - text else sums_D[-1]
        has_token_D = ends_D[:num_done] > starts_D[:num_done]
        yield (text + np.arange(num_done))[has_token_D], sums_D[:num_done][has_token_D]
        text += num_done


def signatures_of_texts(corpus: Corpus) -> Iterator[tuple[Ints, NDArray[np.uint64]]]:
    """Yield the numbers of texts and a hash of the characters of each, in order."""
    for first in range(0, len(corpus), 1024):
        texts = corpus.read_range(first, min(first + 1024, len(corpus)))
        hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
        yield first + np.arange(len(texts)), np.frombuffer(b"".join(hashes), np.uint64)


def num_on_both_sides(
    held: Iterable[tuple[Ints, NDArray[np.uint64]]], trained: Iterable[tuple[Ints, NDArray[np.uint64]]]
) -> int:
    """Return how many held-out texts are training texts, too; of very many, how many of the first million.

    Args:
        held: the numbers and hashes of held-out texts.
        trained: those of training texts.
    """
    hashes: list[NDArray[np.uint64]] = []
    for _, some in held:
        hashes.append(some[: _MOST_COMPARED - sum(map(len, hashes))])
    wanted, nums = np.unique(np.concatenate(hashes), return_counts=True) if hashes else (np.empty(0, np.uint64), None)
    is_found = np.zeros(len(wanted), np.bool_)
    for _, some in trained:
        is_found |= np.isin(wanted, some)
    return 0 if nums is None else int(nums[is_found].sum())


def only(
    is_wanted: IsHeldOut, found: Iterable[tuple[Ints, NDArray[np.uint64]]]
) -> Iterator[tuple[Ints, NDArray[np.uint64]]]:
    """Yield the numbers and hashes of some texts."""
    for texts, hashes in found:
        wanted = is_wanted(texts)
        yield texts[wanted], hashes[wanted]


def refuse_same_files(train: Corpus, validation: Corpus) -> None:
    """Refuse a validation file that is a training file, by whatever path or link.

    Raises:
        DataError: if there is one.
    """
    own = {_identity(path): path for path in train.paths}
    for path in validation.paths:
        same = own.get(_identity(path))
        if same is not None:
            through = "" if same == path else f" (there it is {same}, the same file)"
            raise DataError(
                f"the validation text {path} is among the training texts{through}, so nothing would be held out: move "
                "it to where data.train does not reach, or have a share held out, such as data.validation=0.1"
            )


def _identity(path: Path) -> tuple[int, int] | str:
    """What tells a file from others under all its names."""
    try:
        status = path.stat()
    except OSError:  # it is elsewhere, or known by a name
        return str(path)
    return status.st_dev, status.st_ino
