"""A recurrent state carried from batch to batch with its graph: the second backward pass fails, or the graph grows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Loop, Source, last_name, names_bound, names_in, path_of
from plimsoll.diagnose.lint.helpers.training import backwards

_STATE = re.compile(r"hid|state|(?:^|_)mems?(?:$|_|ory)|carry|^h[0nctx]?$|^h_|_h$|^c[0nx]?$|context", re.IGNORECASE)
_MESSAGE = "the state is carried to the next batch with its graph: backward fails there, or runs through all batches"


def hits(source: Source) -> Iterator[Hit]:
    """Find states that a training loop or a module feeds back without detaching them."""
    for node in source.every(ast.Assign):
        if not isinstance(node.value, ast.Call) or source.called(node.value) is not None:
            continue
        given = [
            path_of(part)
            for one in (*node.value.args, *(word.value for word in node.value.keywords))
            for part in _parts(one)
        ]
        carried = [name for target in node.targets for name in names_bound(target) if name in given]
        is_apart = any(isinstance(target, ast.Tuple) for target in node.targets)
        names = [name for name in carried if _STATE.search(name.rsplit(".", 1)[-1])]
        if not names or not is_apart:
            continue
        is_kept = (
            _module_keeps(source, node, names[0])
            if names[0].startswith("self.")
            else _loop_keeps(source, node, names[0])
        )
        if is_kept:
            yield Hit(
                node,
                _MESSAGE,
                f"write `{names[0]} = {names[0]}.detach()` before the next pass (for an LSTM: both parts of the tuple)",
                severity="error",
            )


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else [node]


def _loop_keeps(source: Source, node: ast.Assign, name: str) -> bool:
    """Return whether a loop with backward passes keeps the state, and neither detaches nor replaces it."""
    scope = source.scope(node)
    within = [
        loop for loop in source.loops(node) if any(source.loops(one.call)[:1] == [loop] for one in backwards(source))
    ]
    return bool(within) and not _is_renewed(source, scope, within[0], node, name)


def _is_renewed(source: Source, scope: ast.AST, loop: Loop, node: ast.Assign, name: str) -> bool:
    for given in source.assignments(scope, name):
        if given.statement is not node and source.is_in_body(given.statement, loop.body):
            return True
    for inner in source.own(loop, ast.For):
        if name in names_bound(inner.target) or path_of(inner.iter) == name:
            return True  # for part in hidden: part.detach_()
    return any(
        last_name(call.func) in ("detach_", "detach")
        and isinstance(call.func, ast.Attribute)
        and name in names_in(call.func.value)
        for call in source.own(loop, ast.Call)
    )


def _module_keeps(source: Source, node: ast.Assign, name: str) -> bool:
    """Return whether a class keeps the state from call to call, and neither detaches nor replaces it."""
    owner = source.class_of(node)
    if owner is None or last_name(node.value.func) in ("detach", "repackage_hidden"):  # type: ignore[attr-defined]
        return False
    attribute = name.rsplit(".", 1)[-1]
    for other in source.every(ast.Assign, ast.AnnAssign):
        targets = other.targets if isinstance(other, ast.Assign) else [other.target]
        is_it = any(
            bound.rsplit(".", 1)[-1] == attribute and "." in bound
            for target in targets
            for bound in names_bound(target)
        )
        if is_it and other is not node and getattr(source.scope(other), "name", "") != "__init__":
            return False
    return not re.search(rf"{attribute}\S*\.detach|{attribute}\S*\.data\b", source.text)
