"""Lint rules: one module each, with its page in ``docs/rules``. A new rule is a new file and its page.

A module offers ``hits(source) -> Iterable[Hit]``, reads one file's syntax tree, and needs no torch. A rule rather
misses a mistake than reports good code. Code that it cannot see (other files, values at run time) is taken as correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from plimsoll.diagnose.lint.helpers.source import Hit, Source

Hits = Callable[[Source], Iterable[Hit]]


@cache
def every_rule() -> dict[str, Hits]:
    """Return the function that finds the mistakes of each rule, by the rule's name."""
    names = sorted(module.name for module in iter_modules(__path__) if not module.ispkg)
    return {name: import_module(f"{__name__}.{name}").hits for name in names}
