"""Causes of memory use: one module each, with its page in ``docs/causes``. To add a cause, add a module and a page.

A module defines ``findings(evidence) -> tuple[Finding, ...]``, which returns an empty tuple if the cause is absent. It
needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding

Findings = Callable[[Evidence], tuple[Finding, ...]]


def every_cause() -> dict[str, Findings]:
    """Return the ``findings`` function of each cause, by the name of the cause."""
    names = sorted(module.name for module in iter_modules(__path__) if not module.ispkg)
    return {name: import_module(f"{__name__}.{name}").findings for name in names}
