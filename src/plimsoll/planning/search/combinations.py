"""Construction of combinations: all combinations of known choices, and one with every useful technique."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from plimsoll.planning.search.choices import AvailableChoices
from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.planning.search.near_best import can_follow
from plimsoll.planning.search.surrogate import Column
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import Choices, in_order, technique_of

LEAST_PART = 0.02
"""Share of a peak below which a category is not worth a trace."""

SAME_BYTES = 0.01
"""Share of a need below which a saving is not worth another technique."""

Allows = Callable[[Choices], bool]


@dataclass(frozen=True)
class Combination:
    """All choices except the micro-batch, and the micro-batch sizes, in samples, that are possible with them."""

    choices: Choices
    sizes: Column


def whole(combination: Choices, micro_batch: int) -> Choices:
    """Return the choices of a combination together with a micro-batch of ``micro_batch`` samples."""
    return (micro_batch_choice(micro_batch), *in_order(combination))


def combinations_of(
    available: AvailableChoices, known: Mapping[str, Sequence[Choice]], required: frozenset[str], allows: Allows
) -> list[Combination]:
    """Return every combination of the known choices, with its possible micro-batches."""
    alternatives = [choices if name in required else [None, *choices] for name, choices in known.items()]
    every = {*available.base, *(choice for choices in known.values() for choice in choices)}
    sizes_of = {one: {size for size in available.sizes if allows((micro_batch_choice(size), one))} for one in every}
    found = []
    for picked in product(*alternatives):
        combination = in_order((*available.base, *(choice for choice in picked if choice is not None)))
        if allows(combination):
            sizes = [size for size in available.sizes if all(size in sizes_of[choice] for choice in combination)]
            found += [Combination(combination, np.asarray(sizes))] if sizes else []
    return found


def all_on_top(evaluation: Evaluation, available: AvailableChoices, allows: Allows) -> Choices:
    """Return a combination that can follow an evaluated one and adds every technique that can reduce its peak."""
    size, combination = micro_batch_choice(available.sizes[-1]), evaluation.combination
    rest = {name: options[-1] for name, options in available.options.items() if technique_of(name).is_traced}
    reached = {name: sum(evaluation.parts.get(part, 0) for part in technique_of(name).reaches) for name in rest}
    for name in sorted(rest, key=lambda name: (-reached[name], name)):
        more = in_order((*(choice for choice in combination if choice.technique != name), rest[name]))
        if (
            reached[name] >= LEAST_PART * evaluation.need_bytes
            and allows((size, *more))
            and can_follow(evaluation.combination, more)
        ):
            combination = more
    return combination


def least_of(evaluations: Iterable[Evaluation]) -> Evaluation:
    """Return the leanest evaluation. If needs are nearly equal, prefer the fewest techniques, then the fastest."""
    found = list(evaluations)
    bound = about(min(evaluation.need_bytes for evaluation in found))
    return min(
        (evaluation for evaluation in found if evaluation.need_bytes <= bound),
        key=lambda evaluation: (len(evaluation.combination), evaluation.seconds),
    )


def about(need_bytes: float) -> float:
    """Return the largest need in bytes that counts as equal to ``need_bytes``, which may be negative if guessed."""
    return need_bytes + SAME_BYTES * abs(need_bytes)
