"""Attributes of one object, set while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attributes(instance: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of one object, and give it back those that it had itself."""
    before = {name: vars(instance)[name] for name in values if name in vars(instance)}
    vars(instance).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(instance).pop(name, None)
        vars(instance).update(before)
