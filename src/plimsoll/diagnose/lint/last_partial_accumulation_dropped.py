"""Accumulation that steps only every n-th batch: gradients of leftover batches are lost, or added to the next epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.accumulation import Accumulation, accumulations
from plimsoll.diagnose.lint.helpers.source import Hit, Source, last_name
from plimsoll.diagnose.lint.helpers.training import iterated, steps, zero_grads

_ENDLESS = re.compile(r"^(?:range|count|cycle|repeat|infinite\w*|inf_\w+|endless\w*)$")


def hits(source: Source) -> Iterator[Hit]:
    """Find a loop over a loader that does not handle leftover batches."""
    seen = set[ast.AST]()
    for found in accumulations(source):
        condition = found.condition
        if condition is None or condition in seen or not _leaves_some(source, found, condition):
            continue
        seen.add(condition)
        yield Hit(
            condition,
            "the batches after the last full group make gradients that no step of this epoch uses",
            "add `or i + 1 == len(loader)` to the condition, or step once more after the loop",
        )


def _leaves_some(source: Source, found: Accumulation, condition: ast.If) -> bool:
    loop = found.loop
    if isinstance(loop, ast.While) or not iterated(loop) or (_ENDLESS.match(iterated(loop)) and not _is_of_data(loop)):
        return False
    if any(isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) for node in ast.walk(condition.test)):
        return False
    names = {last_name(node) for node in ast.walk(condition.test)}
    has_end = any(re.search(r"last|final|end|remain|sync|is_update|should|boundary", name) for name in names)
    if has_end or any(
        isinstance(node, ast.Call) and last_name(node.func) == "len" for node in ast.walk(condition.test)
    ):
        return False
    outer = source.loops(loop)
    after = [
        step
        for step in steps(source)
        if source.scope(step) is source.scope(loop)
        and (step.lineno > (loop.end_lineno or 0) or (source.is_in(step, loop) and step is not found.step))
        and source.loops(step) in (outer, [loop, *outer])
        and not source.is_in(step, condition)
    ]
    wiped = [
        call for call in zero_grads(source) if source.loops(call)[:1] == [loop] and not source.is_in(call, condition)
    ]
    return not after and not wiped


def _is_of_data(loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a loop's range covers the data, as in ``range(len(samples) // batch_size)``."""
    calls = (node for node in ast.walk(loop.iter) if isinstance(node, ast.Call))
    return iterated(loop) == "range" and any(last_name(call.func) == "len" for call in calls)
