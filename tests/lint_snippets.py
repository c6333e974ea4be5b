"""Snippets for the rules of `plimsoll lint`: a line that is to be found ends in ``# <-``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import dedent

from plimsoll.diagnose.lint.helpers.source import Hit, Source, parse


def marked(code: str) -> list[int]:
    """Return the lines that are marked."""
    return [number for number, line in enumerate(dedent(code).split("\n"), 1) if line.endswith("# <-")]


def lines(hits: Callable[[Source], Iterable[Hit]], code: str) -> list[int]:
    """Return the lines that a rule finds."""
    return sorted({hit.node.lineno for hit in hits(parse(dedent(code)))})


def names(snippets: dict[str, str]) -> dict[str, object]:
    """Return the arguments of `pytest.mark.parametrize` for snippets by name."""
    return {"argnames": "code", "argvalues": list(snippets.values()), "ids": list(snippets)}
