"""Gradients that are cleared for every micro-batch, so that only the last gradient counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.accumulation import Accumulation, accumulations, is_named_so
from plimsoll.diagnose.lint.helpers.source import Hit, Source
from plimsoll.diagnose.lint.helpers.training import zero_grads


def hits(source: Source) -> Iterator[Hit]:
    """Find calls of `zero_grad()` in a loop over micro-batches, whose gradients should add up."""
    seen = set[ast.AST]()
    for found in accumulations(source):
        if found.condition is None and not is_named_so(source, found) and not _is_plain_nesting(source, found):
            continue
        for call in zero_grads(source):
            if call not in seen and source.loops(call)[:1] == [found.loop] and not _is_conditional(source, call, found):
                seen.add(call)
                yield Hit(
                    call,
                    "gradients are cleared for every micro-batch: only the last one before the step counts",
                    "clear them only after optimizer.step(), at the same place",
                    severity="error",
                )


def _is_conditional(source: Source, call: ast.Call, found: Accumulation) -> bool:
    """Return whether some micro-batches skip a call, because it is under a condition within the loop."""
    for above in source.ancestors(call):
        if above is found.loop:
            return False
        if isinstance(above, ast.If | ast.IfExp | ast.ExceptHandler | ast.Lambda):
            return True
    return True


def _is_plain_nesting(source: Source, found: Accumulation) -> bool:
    """Return whether the optimizer step is in one of the three statements after the loop."""
    holder = source.parent(found.loop)
    body: list[ast.stmt] = next(
        (part for part in (getattr(holder, "body", []), getattr(holder, "orelse", [])) if found.loop in part), []
    )
    behind = body[body.index(found.loop) + 1 :] if found.loop in body else []
    return any(source.is_in_body(found.step, [one]) for one in behind[:3])
