"""Which chains of methods are worth making: a guess from what each method did alone, which only orders them.

Alone, each choice has shrunk the weights by a factor and raised the loss by a difference. A chain is guessed to shrink
them by the product and to raise the loss by the sum; both are wrong where methods meet (heads and hidden size remove
the same weights, int8 and int4 exclude each other), so every chain that is taken is made and measured. A chain has one
choice of a method at most, in the order of the registry.

Does NOT guess what training gives back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from plimsoll.records.plan import Choice

Chain = tuple[Choice, ...]

_MOST_STRUCTURES = 3  # methods that change shapes, in one chain: the guess gets worse with each
_WRONG_BY = 1.1  # the share of a chain, as far as it is a guess
_MOST_VALUES = 2  # methods that change the bits of values: of embeddings, and of linear layers


class Single(NamedTuple):
    """What one choice did to the original.

    ``share`` is of the bytes of the weights that are left, ``lost`` how much the loss rose. ``order`` is the method's
    place in a chain; ``is_last`` says that it changes values only.
    """

    choice: Choice
    share: float
    lost: float
    order: int
    is_last: bool


class Guess(NamedTuple):
    """A chain, and what is expected of it."""

    chain: Chain
    share: float
    lost: float


def guesses(singles: Sequence[Single], most_share: float) -> list[Guess]:
    """Return the chains that may leave no more than ``most_share`` of the bytes, the least loss first.

    What is guessed to be a little too large is among them. Where a chain is sure to fit, the same chain with more in it
    is not listed.
    """
    found = (_guess(parts) for parts in _chains(singles) if _is_least(parts, most_share))
    return sorted(found, key=lambda one: (one.lost, one.share))


def smallest(singles: Sequence[Single]) -> list[Guess]:
    """Return all chains, those first that are expected to leave the least."""
    return sorted((_guess(parts) for parts in _chains(singles)), key=lambda one: (one.share, one.lost))


def varied(ordered: Iterable[Guess], most: int, most_alike: int = 2) -> list[Guess]:
    """Take the first ``most``, of those with the same methods no more than ``most_alike``."""
    taken: list[Guess] = []
    alike: dict[tuple[str, ...], int] = {}
    for one in ordered:
        methods = tuple(choice.technique for choice in one.chain)
        if alike.get(methods, 0) < most_alike:
            taken.append(one)
            alike[methods] = alike.get(methods, 0) + 1
        if len(taken) == most:
            break
    return taken


def _chains(singles: Sequence[Single]) -> Iterator[list[Single]]:
    usable = [one for one in singles if math.isfinite(one.lost)]
    structures = [one for one in usable if not one.is_last]
    endings = list(_combinations([one for one in usable if one.is_last], _MOST_VALUES))
    for begin, end in itertools.product(_combinations(structures, _MOST_STRUCTURES), endings):
        if begin or end:
            yield [*begin, *end]


def _combinations(singles: Sequence[Single], most: int) -> Iterator[list[Single]]:
    """Choices of up to ``most`` different methods, in the order of a chain; also none."""
    by_method: dict[int, list[Single]] = {}
    for one in singles:
        by_method.setdefault(one.order, []).append(one)
    for num in range(most + 1):
        for methods in itertools.combinations(sorted(by_method), num):
            yield from (list(picked) for picked in itertools.product(*(by_method[order] for order in methods)))


def _is_least(parts: Sequence[Single], most_share: float) -> bool:
    """Whether it may fit, and may not without one of its parts."""
    shares = [one.share for one in parts]
    whole = math.prod(shares)
    return whole <= most_share * _WRONG_BY and all(whole / share > most_share / _WRONG_BY for share in shares)


def _guess(parts: Sequence[Single]) -> Guess:
    # What did no harm alone, or good, may do harm beside others.
    lost = sum(max(one.lost, 0.0) for one in parts)
    return Guess(tuple(one.choice for one in parts), math.prod(one.share for one in parts), lost)
