"""Causes of memory use: one module each, with its page in ``docs/causes``. A new cause is a new file and its page.

A module offers ``findings(evidence) -> tuple[Finding, ...]``, which is empty if the cause is absent, and needs no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding

Findings = Callable[[Evidence], tuple[Finding, ...]]


def every_cause() -> dict[str, Findings]:
    """Return the function that finds each cause, by the cause's name."""
    names = sorted(module.name for module in iter_modules(__path__) if not module.ispkg)
    return {name: import_module(f"{__name__}.{name}").findings for name in names}
