"""Augmentation of tokens when samples are read: masking, deletion and swaps, different in each epoch.

The same seed gives the same changes. Each draw is a function of the seed, the epoch, the sample and the position in it
(`plimsoll.data.batches.order`). The rest of the batch has no influence. Operations are vectorized over the tokens of a
batch. If words have tags, whole words are deleted and swapped. Special tokens, including the end token, are neither
changed nor moved, and no sample becomes empty.

Augmentation of words and synonyms is in `plimsoll.data.batches.augment_text`. Not handled: labels of tokens together
with ``token_function``.

Shapes: B samples; N tokens of all samples together (fewer after deletion).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.batches.order import sample_keys, uniform
from plimsoll.data.samples import ragged
from plimsoll.errors import DataError
from plimsoll.records.augmentation import Augmentation

_DELETE, _SWAP, _DISTANCE, _MASK = range(4)  # purposes of draws

Ints = NDArray[np.int64]


class TokenAugmentation:
    """The part of an `Augmentation` that changes tokens; picklable.

    Args:
        config: the changes and their probabilities.
        seed: a different seed draws different changes.
        special_ids: tokens that are not changed or moved: all special tokens, such as the end token and padding.
        mask_id: the id of the token that replaces masked tokens.
        sequence_length: the maximum number of tokens that ``token_function`` may return for a sample.

    Raises:
        DataError: if masking is on but there is no mask token, or ``token_function`` cannot be imported.
    """

    def __init__(
        self, config: Augmentation, seed: int, special_ids: Sequence[int], mask_id: int | None, sequence_length: int
    ) -> None:
        self._mask_id = -1 if mask_id is None else mask_id
        if config.mask and mask_id is None:
            raise DataError(
                f"mask = {config.mask:g} needs a mask token and this tokenizer has none: name one of its tokens as "
                f"`mask_token` in its tokenizer_config.json, or use `delete`"
            )
        self.config, self._seed = config, seed
        self._special_ids, self._sequence_length = np.array(special_ids, np.int64), sequence_length
        self._function = UserFunction(config.token_function, "token_function") if config.token_function else None

    def apply(  # noqa: PLR0917 -- the parts of a batch
        self,
        tokens_N: Ints,
        labels_N: Ints | None,
        lengths_B: Ints,
        ids: Ints,
        epoch: int,
        begins_N: NDArray[np.bool_] | None = None,
    ) -> tuple[Ints, Ints | None, Ints]:
        """Return the changed tokens (N,), labels (N,) and lengths (B,).

        Labels move with their tokens, but are never masked.

        Args:
            tokens_N: the tokens of all samples, end to end, int64.
            labels_N: one label for each token, or ``None``.
            lengths_B: the number of tokens of each sample, at least 1.
            ids: the indices of the samples (B,).
            epoch: a different epoch draws different changes.
            begins_N: whether each token begins a word. The first token of each sample must begin a word. If given,
                whole words are deleted and swapped.

        Raises:
            DataError: if ``token_function`` does not return 1 to ``sequence_length`` token ids.
        """
        keys_B = sample_keys(self._seed, epoch, ids)
        is_free_N = ~np.isin(tokens_N, self._special_ids)
        if begins_N is None:
            order_N, lengths_B = self._order(keys_B, is_free_N, lengths_B)
        else:
            begins_W = np.flatnonzero(begins_N)
            sizes_W = np.diff(begins_W, append=len(tokens_N))
            nums_B = np.add.reduceat(begins_N, _begins(lengths_B), dtype=np.int64)
            order_W, nums_B = self._order(keys_B, np.logical_and.reduceat(is_free_N, begins_W), nums_B)
            order_N = ragged.places(begins_W[order_W], sizes_W[order_W])
            lengths_B = np.add.reduceat(sizes_W[order_W], _begins(nums_B))
        tokens_N, labels_N = tokens_N[order_N], None if labels_N is None else labels_N[order_N]
        if self.config.mask:
            is_masked_N = is_free_N[order_N] & (uniform(keys_B, _MASK, lengths_B) < self.config.mask)
            tokens_N = np.where(is_masked_N, self._mask_id, tokens_N)
        if self._function:
            tokens_N, lengths_B = self._called(self._function, tokens_N, lengths_B, keys_B)
        return tokens_N, labels_N, lengths_B

    def _order(self, keys_B: NDArray[np.uint64], is_free_N: NDArray[np.bool_], lengths_B: Ints) -> tuple[Ints, Ints]:
        """Return the old index of each element after deletion and swaps (N,), and the new sample lengths (B,)."""
        order_N = np.arange(len(is_free_N))
        if self.config.delete:
            kept_N = ~is_free_N | spared(uniform(keys_B, _DELETE, lengths_B), self.config.delete, is_free_N, lengths_B)
            order_N, lengths_B = order_N[kept_N], np.add.reduceat(kept_N, _begins(lengths_B), dtype=np.int64)
        if self.config.swap:
            moves_N = swap_places(keys_B, is_free_N[order_N], lengths_B, self.config.swap, self.config.swap_distance)
            order_N = order_N[moves_N]
        return order_N, lengths_B

    def _called(
        self, function: UserFunction, tokens_N: Ints, lengths_B: Ints, keys_B: NDArray[np.uint64]
    ) -> tuple[Ints, Ints]:
        rows = np.split(tokens_N, np.cumsum(lengths_B)[:-1])
        changed = [self._checked(function(row, key)) for row, key in zip(rows, keys_B.tolist(), strict=True)]
        return np.concatenate(changed), np.array([len(row) for row in changed])

    def _checked(self, result: Any) -> Ints:
        row = np.asarray(result)
        if row.ndim != 1 or not 1 <= len(row) <= self._sequence_length or row.dtype.kind not in "iu" or row.min() < 0:
            raise DataError(
                f"token_function {self.config.token_function} returned {result!r}: return 1 to {self._sequence_length} "
                f"token numbers, as a list or an array of integers"
            )
        return row.astype(np.int64)


class UserFunction:
    """A user's function, imported by its name ``module:function``.

    It is called with a sample and, if it has a parameter ``seed``, a seed.

    Raises:
        DataError: if the function cannot be imported.
    """

    def __init__(self, name: str, field: str) -> None:
        self._name, self._field = name, field
        module, _, function = name.partition(":")
        try:
            self._function: Callable[..., Any] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise DataError(
                f"{field} = {name} cannot be imported ({error}): check the name, and run from the folder of the module "
                f"or set PYTHONPATH to it"
            ) from None
        self._takes_seed = "seed" in inspect.signature(self._function).parameters

    def __reduce__(self) -> tuple[Any, ...]:
        return UserFunction, (self._name, self._field)

    def __call__(self, sample: Any, key: int) -> Any:
        """Return the result for a sample; ``key`` is the seed, which depends on the sample and the epoch."""
        return self._function(sample, seed=key) if self._takes_seed else self._function(sample)


def spared(
    draws_N: NDArray[np.float64], share: float, is_free_N: NDArray[np.bool_], lengths_B: Ints
) -> NDArray[np.bool_]:
    """Return whether each element (N,) may be deleted, but is kept because its draw is at least ``share``.

    ``is_free_N`` marks the elements that may be deleted. At least one of them is kept in each sample, even if all draws
    are lower.
    """
    draws_N = np.where(is_free_N, draws_N, -1.0)
    highest_N = np.repeat(np.maximum.reduceat(draws_N, _begins(lengths_B)), lengths_B)
    is_spared_N: NDArray[np.bool_] = is_free_N & ((draws_N >= share) | (draws_N == highest_N))
    return is_spared_N


def swap_places(
    keys_B: NDArray[np.uint64], is_free_N: NDArray[np.bool_], lengths_B: Ints, share: float, distance: int
) -> Ints:
    """Return the order of elements after swaps (N,): entry ``i`` is the old index of the element that is now at ``i``.

    Each free element moves, with probability ``share``, behind one of the next free elements of the same sample.

    Args:
        keys_B: the keys of the samples, from `sample_keys`.
        is_free_N: whether each element may move.
        lengths_B: the number of elements of each sample.
        share: the probability that an element moves.
        distance: the maximum number of free elements that an element moves past.
    """
    free = np.flatnonzero(is_free_N)
    is_hit = uniform(keys_B, _SWAP, lengths_B)[free] < share
    num_passed = 1 + np.floor(uniform(keys_B, _DISTANCE, lengths_B)[free] * distance)
    nums_B = np.add.reduceat(is_free_N, _begins(lengths_B), dtype=np.int64)
    last = np.repeat(np.cumsum(nums_B) - 1, nums_B)
    ranks = np.arange(len(free))
    wanted = np.minimum(np.where(is_hit, ranks + num_passed + 0.5, ranks), last + 0.5)
    places_N = np.arange(len(is_free_N))
    places_N[free] = free[np.argsort(wanted, kind="stable")]
    return places_N


def _begins(lengths_B: Ints) -> Ints:
    return np.cumsum(lengths_B) - lengths_B
