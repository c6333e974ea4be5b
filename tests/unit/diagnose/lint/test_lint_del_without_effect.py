"""`del` that frees nothing."""

import pytest

from lint_snippets import lines, marked, names
from plimsoll.diagnose.lint.del_without_effect import hits

SNIPPETS = {
    "list": r"""
        for tensor in tensors:
            del tensor  # <-
    """,
    "names": r"""
        for tensor in (a, b, c):
            del tensor  # <-
            gc.collect()
    """,
    "last-of-a-pass": r"""
        for tensor in tensors:
            process(tensor)
            del tensor
    """,
    "batches": r"""
        for batch in loader:
            del batch
    """,
    "keys": r"""
        for key in keys:
            del table[key]
    """,
}


@pytest.mark.parametrize(**names(SNIPPETS))
def test_what_is_marked_is_found_and_nothing_else(code):
    assert lines(hits, code) == marked(code)
