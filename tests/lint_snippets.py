"""Snippets for the rules of `plimsoll lint`; the lines to find end in ``# <-``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import dedent

import pytest

from plimsoll.diagnose.lint.helpers.source import Hit, Source, parse


def marked(code: str) -> list[int]:
    """Return the marked lines."""
    return [number for number, line in enumerate(dedent(code).split("\n"), 1) if line.endswith("# <-")]


def lines(hits: Callable[[Source], Iterable[Hit]], code: str) -> list[int]:
    """Return the lines that a rule finds."""
    return sorted({hit.node.lineno for hit in hits(parse(dedent(code)))})


def found_where_marked(hits: Callable[[Source], Iterable[Hit]], snippets: dict[str, str]) -> Callable[[str], None]:
    """Make a test of named snippets: the marked lines are found, and no others."""

    @pytest.mark.parametrize("code", snippets.values(), ids=snippets.keys())
    def test(code: str) -> None:
        assert lines(hits, code) == marked(code)

    return test
