"""A batch that runs through the model several times before a step: it looks like accumulation but saves no memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.accumulation import Accumulation, accumulations
from plimsoll.diagnose.lint.helpers.source import Hit, Source, last_name, names_bound, names_in
from plimsoll.diagnose.lint.helpers.training import is_forward, zero_grads


def hits(source: Source) -> Iterator[Hit]:
    """Find loops over a range in which every iteration has the same input."""
    for found in accumulations(source):
        if found.condition is None and _is_the_same(source, found):
            yield Hit(
                found.loop,
                "every pass of this loop computes the same batch: it needs as much memory as before, and more time",
                "split the batch (`for part in batch.split(size)`), or take the next batch in each pass",
                severity="error",
            )


def _is_the_same(source: Source, found: Accumulation) -> bool:
    loop = found.loop
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call) or last_name(loop.iter.func) != "range":
        return False
    if any(source.is_in(call, loop) for call in zero_grads(source)):
        return False
    calls = source.own(loop, ast.Call)
    forwards = [call for call in calls if is_forward(source, call)]
    changing = set(names_bound(loop.target)) | _bound_within(source, loop)
    given = {
        name
        for call in forwards
        for part in (*call.args, *(one.value for one in call.keywords))
        for name in names_in(part)
    }
    has_input = bool(forwards) and all(call.args or call.keywords for call in forwards)
    return (
        has_input and not given & changing and not any(last_name(call.func) in ("next", "get_batch") for call in calls)
    )


def _bound_within(source: Source, loop: ast.AST) -> set[str]:
    """Return the names that assignments and inner loops in the body of a loop bind."""
    found = {name for node in source.own(loop, ast.Assign) for target in node.targets for name in names_bound(target)}
    found |= {name for node in source.own(loop, ast.AugAssign) for name in names_bound(node.target)}
    return found | {name for node in source.own(loop, ast.For) for name in names_bound(node.target)}
