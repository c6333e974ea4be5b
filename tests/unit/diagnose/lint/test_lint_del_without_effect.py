"""`del` that frees nothing."""

from lint_snippets import found_where_marked
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

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
