"""Worker processes that read a list of Python objects.

Each read changes a reference count, so the pages of the list are copied into every worker.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.datasets import dataset_classes, object_list
from plimsoll.diagnose.lint.helpers.source import Hit, Source, is_constant, keyword, last_name, path_of


def hits(source: Source) -> Iterator[Hit]:
    """Find a DataLoader with workers whose data set, a class of this file, holds a list of objects."""
    classes = {one.name: one for one in dataset_classes(source)}
    for call in source.calls:
        if last_name(call.func) != "DataLoader" or not _has_workers(source, call):
            continue
        given = call.args[0] if call.args else keyword(call, "dataset")
        owner = classes.get(_made_of(source, given)) if given is not None else None
        if owner is not None and (attribute := object_list(source, owner)):
            yield Hit(
                call,
                f"every worker copies {owner.name}.{attribute.removeprefix('self.')}, page by page, as it is read",
                "hold bytes and offsets in an array or a memory-mapped file (`plimsoll data index`), not objects",
            )


def _has_workers(source: Source, call: ast.Call) -> bool:
    given = keyword(call, "num_workers")
    return given is not None and _number(source, given) > 0


def _number(source: Source, node: ast.expr, depth: int = 3) -> int:
    """Return the number that an expression evaluates to; 0 if it cannot be determined."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else 0
    if isinstance(node, ast.Call) and source.dotted(node.func) in ("os.cpu_count", "multiprocessing.cpu_count"):
        return 1
    if isinstance(node, ast.Name) and depth:
        given = source.assignments(source.scope(node), node.id) or source.assignments(source.tree, node.id)
        return _number(source, given[-1].value, depth - 1) if given else 0
    if isinstance(node, ast.Attribute):
        option = "--" + node.attr
        for call in source.calls:
            named = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            is_it = any(name.replace("-", "_") == option.replace("-", "_") for name in named)
            default = keyword(call, "default")
            if is_it and last_name(call.func) == "add_argument" and default is not None and depth:
                return _number(source, default, depth - 1)
    return 0


def _made_of(source: Source, node: ast.expr, depth: int = 3) -> str:
    """Return the name of the class that an expression is an instance of; "" if it cannot be determined."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if not depth:
        return ""
    for scope in (source.scope(node), source.tree):
        given = source.assignments(scope, path_of(node))
        above = [one for one in given if one.place is None and not is_constant(one.value, None)]
        if above:
            return _made_of(source, above[-1].value, depth - 1)
    return ""
