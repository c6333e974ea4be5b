"""Support for the names of the previous release: renamed fields of records and renamed arguments.

They are accepted for one release. `docs/architecture.md` has the table of old and new names.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(fields: Mapping[str, Any], former_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields with former names replaced by current names. ``former_names`` maps former to current names.

    Raises:
        ValueError: if a field is given under both names.
    """
    for former in former_names.keys() & fields.keys():
        if former_names[former] in fields:
            raise ValueError(f"{former} and {former_names[former]} are the same field: give one of them")
    return {former_names.get(name, name): value for name, value in fields.items()}


def former_arguments(**former_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that accepts former names of keyword arguments, with a `DeprecationWarning`.

    Args:
        former_names: current names by former name, as keyword arguments.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for former in former_names.keys() & kwargs.keys():
                if former_names[former] in kwargs:
                    raise TypeError(f"{former} and {former_names[former]} are the same argument: give one of them")
                warn_of_former(f"the argument {former}", former_names[former])
                kwargs[former_names[former]] = kwargs.pop(former)
            return function(*args, **kwargs)

        return called

    return decorated


def warn_of_former(what: str, name: str) -> None:
    """Warn that ``what`` was renamed to ``name``."""
    warnings.warn(f"{what} was renamed to {name}", DeprecationWarning, stacklevel=3)
