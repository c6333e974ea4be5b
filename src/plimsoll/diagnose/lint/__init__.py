"""Lint rules: one module each, with its page in ``docs/rules``. To add a rule, add a module and a page.

A module defines ``hits(source) -> Iterable[Hit]``, which reads the syntax tree of one file. It needs no torch. To avoid
reports on good code, a rule assumes that other files and values at run time are correct. So it misses some mistakes.
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
    """Return the ``hits`` function of each lint rule, by the name of the rule."""
    names = sorted(module.name for module in iter_modules(__path__) if not module.ispkg)
    return {name: import_module(f"{__name__}.{name}").hits for name in names}
