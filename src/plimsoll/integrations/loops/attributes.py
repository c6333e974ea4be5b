"""Temporary attributes of an object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attributes(instance: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of an object inside a block, and restore the original ones afterwards."""
    before = {name: vars(instance)[name] for name in values if name in vars(instance)}
    vars(instance).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(instance).pop(name, None)
        vars(instance).update(before)
