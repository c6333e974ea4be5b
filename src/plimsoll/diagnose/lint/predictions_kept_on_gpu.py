"""Outputs of all batches that are collected on the device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, last_name, path_of
from plimsoll.diagnose.lint.helpers.training import batch_loop, is_without_grad
from plimsoll.diagnose.lint.helpers.values import Value, value_of


def hits(source: Source) -> Iterator[Hit]:
    """Find lists and concatenations that grow by a tensor on the device in every batch."""
    if not _uses_device(source):
        return
    for call in source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "extend") and call.args:
            if _grows(source, call, call.args[0]):
                yield _hit(call)
        elif last_name(call.func) in ("cat", "concat", "hstack", "vstack", "nested_concat") and call.args:
            statement = source.statement(call)
            joined = call.args[0].elts if isinstance(call.args[0], ast.Tuple | ast.List) else call.args
            if isinstance(statement, ast.Assign) and len(joined) > 1 and len(statement.targets) == 1:
                is_itself = path_of(joined[0]) and path_of(joined[0]) == path_of(statement.targets[0])
                if is_itself and any(_grows(source, call, part) for part in joined[1:]):
                    yield _hit(call)


def _grows(source: Source, node: ast.expr, value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and last_name(value.func) in ("mean", "sum") and not value.args:
        return False  # a single number per batch takes little memory
    found: Value | None = value_of(source, value)
    if found is None or not found.is_on_device or found.kind == "loss":
        return False
    if found.has_graph and not is_without_grad(source, node):
        return False  # reported by loss_graph_kept
    loop = batch_loop(source, node, depth=0)
    if loop is None:
        return False
    keeper = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    made = source.assignments(source.scope(node), path_of(keeper)) if keeper is not None else []
    return not any(source.is_in_body(one.statement, loop.body) for one in made)


def _hit(call: ast.Call) -> Hit:
    return Hit(
        call,
        "the outputs of all batches are kept on the device",
        "write .cpu() after each, or compute the metric that you need batch by batch",
    )


def _uses_device(source: Source) -> bool:
    return bool(re.search(r"\.cuda\(|\.to\(|device|accelerat|Accelerator|cuda", source.text))
