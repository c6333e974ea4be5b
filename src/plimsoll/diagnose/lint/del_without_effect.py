"""`del` of a loop variable. It frees no memory, because the list that is looped over still holds the object."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, last_name, names_bound
from plimsoll.diagnose.lint.helpers.training import is_batch_loop


def hits(source: Source) -> Iterator[Hit]:
    """Find loops whose body only deletes the loop variable."""
    for loop in source.every(ast.For):
        names = names_bound(loop.target)
        statements = [one for one in loop.body if isinstance(one, ast.Delete)]
        others = [one for one in loop.body if one not in statements and not _is_collection(one)]
        deleted = [last_name(target) for one in statements for target in one.targets]
        is_of_list = isinstance(loop.iter, ast.Tuple | ast.List | ast.Name) and not is_batch_loop(source, loop)
        if is_of_list and statements and not others and all(name in names for name in deleted):
            yield Hit(
                statements[0],
                "this deletes only the loop variable: objects in the list or in other variables stay in memory",
                "clear the list (`tensors.clear()`), or write `del a, b` with the original names",
            )


def _is_collection(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and last_name(node.value.func) in ("collect", "empty_cache")
    )
