"""Tokenizers, and a corpus stored as tokens."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from plimsoll.records.former import warn_of_former


def __getattr__(name: str) -> Any:
    """Return an attribute that this module had in earlier versions: ``open_tokens``, ``tokenize`` or ``TokenStore``."""
    if name not in {"TokenStore", "open_tokens", "tokenize"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_of_former(f"plimsoll.data.tokens.{name}", f"plimsoll.data.tokens.store.{name}")
    return getattr(import_module(f"{__name__}.store"), name)
