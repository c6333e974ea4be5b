"""Which mixes there are of some techniques, and the mix that leaves nothing out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from plimsoll.planning.search.evaluation import Look
from plimsoll.planning.search.near_best import can_follow
from plimsoll.planning.search.options import Menu
from plimsoll.planning.search.surrogate import Column
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import Choices, in_order, technique_of

LEAST_PART = 0.02
"""Of a peak: what is less is not worth a trace."""

SAME_BYTES = 0.01
"""Of a need: not worth another technique."""

Allows = Callable[[Choices], bool]


@dataclass(frozen=True)
class Mix:
    """Choices but for the micro-batch, and the sizes (samples) it can have with them."""

    choices: Choices
    sizes: Column


def whole(mix: Choices, micro_batch: int) -> Choices:
    """The choices of a mix with a micro-batch of so many samples."""
    return (micro_batch_choice(micro_batch), *in_order(mix))


def mixes_of(menu: Menu, known: Mapping[str, Sequence[Choice]], required: frozenset[str], allows: Allows) -> list[Mix]:
    """Return every mix of the choices that are known, with the sizes it can have."""
    menus = [choices if name in required else [None, *choices] for name, choices in known.items()]
    every = {*menu.base, *(choice for choices in known.values() for choice in choices)}
    sizes_of = {one: {size for size in menu.sizes if allows((micro_batch_choice(size), one))} for one in every}
    found = []
    for picked in product(*menus):
        mix = in_order((*menu.base, *(choice for choice in picked if choice is not None)))
        if allows(mix):
            sizes = [size for size in menu.sizes if all(size in sizes_of[choice] for choice in mix)]
            found += [Mix(mix, np.asarray(sizes))] if sizes else []
    return found


def all_on_top(look: Look, menu: Menu, allows: Allows) -> Choices:
    """Return a mix that can follow another, with every technique on top that reaches what its peak is made of."""
    size, mix = micro_batch_choice(menu.sizes[-1]), look.mix
    rest = {name: options[-1] for name, options in menu.options.items() if technique_of(name).is_traced}
    reached = {name: sum(look.parts.get(part, 0) for part in technique_of(name).reaches) for name in rest}
    for name in sorted(rest, key=lambda name: (-reached[name], name)):
        more = in_order((*(choice for choice in mix if choice.technique != name), rest[name]))
        if reached[name] >= LEAST_PART * look.need_bytes and allows((size, *more)) and can_follow(look.mix, more):
            mix = more
    return mix


def least_of(looks: Iterable[Look]) -> Look:
    """What needs least; of those that need about as little, the one of the fewest techniques, then the fastest."""
    found = list(looks)
    bound = about(min(look.need_bytes for look in found))
    return min((look for look in found if look.need_bytes <= bound), key=lambda look: (len(look.mix), look.seconds))


def about(need_bytes: float) -> float:
    """What is taken for as little as a need, of which a guess may be below 0."""
    return need_bytes + SAME_BYTES * abs(need_bytes)
