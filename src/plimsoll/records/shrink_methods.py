"""What may be asked of the ways to make a model smaller: their options, the values these take, and where they stand.

It is here, and not beside the methods (`plimsoll.weights.shrink`), so that what is mistyped is refused before torch is
imported. What depends on the model (how many layers there are to keep) is refused by the method itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from plimsoll.errors import WeightsError
from plimsoll.records.job import near
from plimsoll.records.plan import Choice, Pin, Value

Stage = Literal["structure", "values"]
"""``structure``: other shapes, which can be trained on and made smaller again. ``values``: the same shapes in fewer
bits, which comes last."""

Importance = Literal["magnitude", "taylor", "activation"]

IMPORTANCES: tuple[Importance, ...] = ("magnitude", "taylor", "activation")

SHARE = 0.25
"""What is taken away where nobody says how much."""


class Option(NamedTuple):
    """What is taken where an option is left out (``None``: nothing), and what is wrong with a value, in words."""

    default: Value | None
    fault: Callable[[str, object], str | None]


@dataclass(frozen=True)
class Asked:
    """What may be asked of a method.

    Attributes:
        stage: where it stands in a chain.
        options: by name; the first is what ``method=value`` on a command line means.
        one_of: options of which a choice has one at most.
    """

    stage: Stage
    options: Mapping[str, Option] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Value | None]:
        """What is taken where an option is left out."""
        return {name: option.default for name, option in self.options.items()}


def share_fault(name: str, value: object) -> str | None:
    """Return a sentence where a value is no share, of more than nothing and less than all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return f"`{name}` {value} is not the share that is taken away: give a number between 0 and 1, such as 0.25"
    return None


def value_fault(known: Sequence[Value], name: str, value: object) -> str | None:
    """Return a sentence where a value is none of some."""
    if any(type(value) is type(one) and value == one for one in known):
        return None
    listed = ", ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in known)
    return f"`{name}` cannot be {value}: give one of {listed}"


def count_fault(name: str, value: object) -> str | None:
    """Return a sentence where a value is no whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"`{name}` {value} is not a number of them: give a whole number from 1 on"
    return None


def _one_of(*known: Value) -> Option:
    """An option with these values, the first of which is taken where it is left out."""
    return Option(known[0], partial(value_fault, known))


_PARTS = Asked("structure", {"share": Option(SHARE, share_fault), "importance": _one_of(*IMPORTANCES)})
_RANK = {"share": Option(None, share_fault), "rank": Option(None, count_fault)}

METHODS: Mapping[str, Asked] = {
    "vocabulary": Asked("structure", {"min_count": Option(1, count_fault)}),
    "layers": Asked(
        "structure",
        {
            "keep": Option(None, count_fault),
            "share": Option(None, share_fault),
            "importance": _one_of("even", *IMPORTANCES),
        },
        one_of=("keep", "share"),
    ),
    "hidden": _PARTS,
    "heads": _PARTS,
    "channels": _PARTS,
    "units": _PARTS,
    "shared_layers": Asked("structure", {"groups": Option(1, count_fault), "start": _one_of("first", "mean")}),
    "low_rank": Asked("structure", {**_RANK, "aware": _one_of(True, False)}, one_of=("share", "rank")),
    "low_rank_embeddings": Asked("structure", _RANK, one_of=("share", "rank")),
    "tied": Asked("structure"),
    "unstructured": Asked("values", {"share": Option(0.5, share_fault)}),
    "two_four": Asked("values"),
    "bf16": Asked("values"),
    "int8_embeddings": Asked("values"),
    "int8": Asked("values"),
    "int4": Asked("values", {"group": _one_of(32, 64, 128), "compute": _one_of("bf16", "fp32")}),
    "dynamic_int8": Asked("values"),
    "float8": Asked("values", {"dynamic": _one_of(False, True)}),
}
"""What may be asked of each method, in the order in which a chain applies them."""


def options_of(choice: Choice) -> dict[str, Value | None]:
    """Return the options of a choice, those that are not given as they are by default."""
    return {**METHODS[choice.technique].defaults, **choice.options}


def options_fault(choice: Choice) -> str | None:
    """Return a sentence that says which option of a choice is wrong whatever the model is, or ``None``."""
    asked = METHODS[choice.technique]
    for name, value in choice.options.items():
        if name not in asked.options:
            takes = ", ".join(f"`{one}`" for one in asked.options) or "no options"
            return f"`{choice.technique}` has no option `{name}` ({value}): it takes {takes}; leave it out"
        fault = asked.options[name].fault(name, value)
        if fault is not None:
            return fault
    given = [f"{name} {choice.options[name]}" for name in asked.one_of if name in choice.options]
    return f"`{choice.technique}` has {' and '.join(given)}: give one of them" if len(given) > 1 else None


def check_method(name: str) -> None:
    """Refuse a name that no method has.

    Raises:
        WeightsError: it names the nearest.
    """
    if name not in METHODS:
        raise WeightsError(f"there is no method `{name}`; {near(name, METHODS)}")


def chain_of(pins: Sequence[Pin]) -> tuple[Choice, ...]:
    """Return the choices that a user wrote, with the names of options that were left out.

    Raises:
        WeightsError: if there is no such method, option or value, or what changes shapes comes behind what changes
            values.
    """
    found: list[Choice] = []
    for pin in pins:
        check_method(pin.technique)
        asked, given = METHODS[pin.technique], dict(pin.options)
        if pin.value is not None:
            given[next(iter(asked.options), "value")] = pin.value
        choice = Choice(technique=pin.technique, options=given)
        fault = options_fault(choice)
        if fault is not None:
            raise WeightsError(f"--method '{choice.in_full}': {fault}")
        if found and METHODS[found[-1].technique].stage == "values" and asked.stage != "values":
            raise WeightsError(
                f"{pin.technique} changes shapes and {found[-1]} the bits of values, which must be last: give "
                f"--method {pin.technique} before --method {found[-1].technique}"
            )
        found.append(choice)
    return tuple(found)
