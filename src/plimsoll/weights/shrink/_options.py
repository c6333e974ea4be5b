"""The options of a choice, with the defaults of a method, and what is wrong with them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.records.plan import Choice

Value = str | float | int | bool


def options_of(choice: Choice, defaults: Mapping[str, Value | None]) -> dict[str, Value | None]:
    """Return the options, those that are not given as they are by default."""
    return {**defaults, **choice.options}


def unknown_option(choice: Choice, known: Mapping[str, Value | None]) -> str | None:
    """Return a sentence where an option is none of a method's."""
    for name, value in choice.options.items():
        if name not in known:
            takes = ", ".join(f"`{one}`" for one in known) or "no options"
            return f"`{choice.technique}` has no option `{name}` ({value}): it takes {takes}; leave it out"
    return None


def share_fault(name: str, value: object) -> str | None:
    """Return a sentence where a value is no share, of more than nothing and less than all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        return f"`{name}` {value} is not the share that is taken away: give a number between 0 and 1, such as 0.25"
    return None


def value_fault(name: str, value: object, known: Sequence[Value]) -> str | None:
    """Return a sentence where a value is none of some."""
    if any(type(value) is type(one) and value == one for one in known):
        return None
    listed = ", ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in known)
    return f"`{name}` {value} is none there is: give one of {listed}"


def count_fault(name: str, value: object, least: int = 1) -> str | None:
    """Return a sentence where a value is no whole number of at least so many."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return f"`{name}` {value} is not a number of them: give a whole number from {least} on"
    return None
