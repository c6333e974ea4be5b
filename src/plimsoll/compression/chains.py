"""Selection of the chains that a search tries, by an estimate from the measured effect of each choice alone.

A choice is a compression method with values of its options. A chain is a sequence of choices for one model.
Each choice alone was measured: it multiplied the weight bytes by a factor, and raised the loss by a difference. The
estimate for a chain is the product of the factors and the sum of the differences. A negative difference counts as zero.
The estimate only orders the chains. It is wrong for methods that interact: heads and hidden size remove the same
weights, and int8 and int4 exclude each other. So every selected chain is applied to the model, and the result is
measured. A chain has at most one choice per method, in the order of the registry.

Does NOT estimate the effect of recovery training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from plimsoll.records.plan import Choice

Chain = tuple[Choice, ...]

_MOST_STRUCTURES = 3  # methods per chain that change shapes: each makes the estimate worse
_WRONG_BY = 1.1  # factor by which an estimated share may be too large or too small
_MOST_VALUES = 2  # methods per chain that change the bits of weights: one for embeddings, one for linear layers


class Single(NamedTuple):
    """The effect of one choice on the original.

    ``share`` is the remaining share of the weight bytes, and ``lost`` is the increase of the loss. ``order`` is the
    method's position in the registry, which orders the choices of a chain. ``is_last`` is true if the choice changes
    only the bits of weights, not their shapes.
    """

    choice: Choice
    share: float
    lost: float
    order: int
    is_last: bool


class Guess(NamedTuple):
    """A chain with its estimated remaining share of the weight bytes, and its estimated increase of the loss."""

    chain: Chain
    share: float
    lost: float


def guesses(singles: Sequence[Single], most_share: float) -> list[Guess]:
    """Return the chains that may leave at most ``most_share`` of the weight bytes, by increasing estimated loss.

    A chain that is estimated up to 10 % too large is included, since it may fit. If a chain fits for certain, longer
    chains that contain it are left out.
    """
    found = (_guess(parts) for parts in _chains(singles) if _is_least(parts, most_share))
    return sorted(found, key=lambda one: (one.lost, one.share))


def smallest(singles: Sequence[Single]) -> list[Guess]:
    """Return all possible chains of ``singles``, by increasing estimated share of the weight bytes."""
    return sorted((_guess(parts) for parts in _chains(singles)), key=lambda one: (one.share, one.lost))


def varied(ordered: Iterable[Guess], most: int, most_alike: int = 2) -> list[Guess]:
    """Return the first ``most`` of the ordered chains, but at most ``most_alike`` chains of the same methods."""
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
    """Yield every combination of 0 to ``most`` choices of different methods, each in the order of a chain."""
    by_method: dict[int, list[Single]] = {}
    for one in singles:
        by_method.setdefault(one.order, []).append(one)
    for num in range(most + 1):
        for methods in itertools.combinations(sorted(by_method), num):
            yield from (list(picked) for picked in itertools.product(*(by_method[order] for order in methods)))


def _is_least(parts: Sequence[Single], most_share: float) -> bool:
    """Return whether a chain may fit ``most_share`` of the weight bytes, and may exceed it without any one choice.

    Both are tested with the error margin of the estimate.
    """
    shares = [one.share for one in parts]
    whole = math.prod(shares)
    return whole <= most_share * _WRONG_BY and all(whole / share > most_share / _WRONG_BY for share in shares)


def _guess(parts: Sequence[Single]) -> Guess:
    # A choice that was harmless or helpful alone may cost quality in combination.
    lost = sum(max(one.lost, 0.0) for one in parts)
    return Guess(tuple(one.choice for one in parts), math.prod(one.share for one in parts), lost)
