"""Recurrent language models, classifiers and taggers on `torch.nn`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from plimsoll.records.former import warn_of_former


def __getattr__(name: str) -> Any:
    """Return a name of the module `recurrent` that this package has replaced, and warn that the name has moved."""
    if name not in {"RecurrentLanguageModel", "build_recurrent", "load_recurrent"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_of_former(f"plimsoll.models.recurrent.{name}", f"plimsoll.models.recurrent.model.{name}")
    return getattr(import_module(f"{__name__}.model"), name)
