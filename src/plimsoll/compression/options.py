"""Checks of the options of ``plimsoll shrink``, before the model or data are loaded. Does not import torch."""

from __future__ import annotations

from plimsoll.errors import InputError
from plimsoll.records.units import parse_bytes


def require_consistent(  # noqa: PLR0917 -- options of one command
    target: str | None,
    methods: list[str] | None,
    forbids: list[str] | None,
    recover: int,
    budget: str | None,
    tries: int,
    samples: int | None,
) -> None:
    """Refuse options that contradict each other, and numbers out of range.

    The arguments are the values of the options ``--target``, ``--method``, ``--forbid``, ``--recover``, ``--budget``,
    ``--tries`` and ``--samples``, with ``None`` for an absent option.

    Raises:
        InputError: if two options conflict, or a number is out of range; the message names the option to change.
    """
    if target is not None and methods:
        raise InputError(f"--method {methods[0]} fixes the chain, --target {target} searches for one: give one of them")
    if methods and forbids:
        raise InputError(f"--method {methods[0]} fixes the chain: leave out --forbid {forbids[0]}")
    if recover < 0:
        raise InputError(f"--recover {recover} is not a number of steps: give 0 or more")
    if budget is not None and not recover:
        raise InputError(f"--budget {budget} applies only to training: give --recover too, or leave out --budget")
    for option, number in (("--tries", tries), ("--samples", samples)):
        if number is not None and number < 1:
            raise InputError(f"{option} {number} leaves nothing to measure: give 1 or more")


def target_bytes_of(target: str | None) -> int | None:
    """Return the size in ``--target`` in bytes; ``None`` if the option is absent.

    Raises:
        InputError: if the text is not a size in bytes.
    """
    try:
        return None if target is None else parse_bytes(target)
    except InputError as error:
        raise InputError(f"--target: {error}") from None
