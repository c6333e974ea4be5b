"""Detection of gradient accumulation in a file: a backward pass for every micro-batch, a step after several of them.

Two forms are found: `if (i + 1) % n == 0: optimizer.step()` in the loop of the backward pass, and a loop over
micro-batches that is followed by the step. Not counted: accumulation by a library (`accelerator.accumulate`,
DeepSpeed's engine), and two optimizers that take turns (GANs).
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import NamedTuple

from plimsoll.diagnose.lint.helpers.source import Loop, Source, is_constant, keyword, last_name, names_in
from plimsoll.diagnose.lint.helpers.training import Backward, backwards, steps

_WEIGHT = re.compile(r"scale|weight|coef|inv|norm|frac|ratio")
_COUNTED = re.compile(r"accum|micro|virtual|update_freq|grad_steps|sync", re.IGNORECASE)


class Accumulation(NamedTuple):
    """One loop in which gradients add up over micro-batches.

    Attributes:
        loop: the loop of the backward pass.
        backward: the backward pass.
        step: the call of the optimizer's step.
        condition: the ``if`` around the step; ``None`` if the step follows the loop.
    """

    loop: Loop
    backward: Backward
    step: ast.Call
    condition: ast.If | None


@lru_cache(maxsize=4)
def accumulations(source: Source) -> list[Accumulation]:
    """Return every accumulation of a file, one for each backward pass."""
    counts = "accumulate(" in source.text or "gradient_accumulation_steps=" in source.text or "deepspeed" in source.text
    passes = [one for one in backwards(source) if not (one.divides and counts)]
    found = [_conditional(source, one) or _nested(source, one) for one in passes]
    return [one for one in found if one is not None]


def _conditional(source: Source, backward: Backward) -> Accumulation | None:
    loop = next(iter(source.loops(backward.call)), None)
    if loop is None or _is_managed(source, backward):
        return None
    within = [step for step in steps(source) if source.loops(step)[:1] == [loop]]
    conditions = {step: _condition(source, step, loop) for step in within}
    if not within or not all(conditions.values()):
        return None  # an optimizer that steps after every batch
    for step, condition in conditions.items():
        assert condition is not None
        holds_backward = any(source.is_in_body(one.call, condition.body) for one in backwards(source))
        if not holds_backward and not source.is_in_body(backward.call, condition.orelse):
            return Accumulation(loop, backward, step, condition)
    return None


def _condition(source: Source, step: ast.Call, loop: Loop) -> ast.If | None:
    """Return the `if` around an optimizer step, within the loop, whose test counts batches, such as ``i % n == 0``.

    ``None`` if there is no such `if`.
    """
    for above in source.ancestors(step):
        if above is loop:
            return None
        if isinstance(above, ast.If) and source.is_in_body(step, above.body) and _counts(above.test):
            return above
    return None


def _counts(test: ast.expr) -> bool:
    has_rest = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test))
    names = {last_name(node) for node in ast.walk(test)}
    return has_rest or any(_COUNTED.search(name) for name in names)


def _is_managed(source: Source, backward: Backward) -> bool:
    """Return whether a backward pass is in a ``with accumulate(...)`` block of a library that counts micro-batches."""
    return any(
        isinstance(above, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) == "accumulate"
            for item in above.items
        )
        for above in source.ancestors(backward.call)
    )


def _nested(source: Source, backward: Backward) -> Accumulation | None:
    loops = source.loops(backward.call)
    if not loops or _is_managed(source, backward):
        return None
    inner, outer = loops[0], loops[1] if len(loops) > 1 else None
    if any(source.is_in(step, inner) for step in steps(source)):
        return None
    scope = source.scope(inner)
    for step in steps(source):
        is_behind = source.scope(step) is scope and step.lineno > inner.lineno
        if is_behind and source.loops(step)[:1] == ([outer] if outer is not None else []):
            return Accumulation(inner, backward, step, None)
    return None


def is_named_so(source: Source, found: Accumulation) -> bool:
    """Return whether a name in the header of the accumulation's ``for`` loop suggests that it counts micro-batches."""
    if isinstance(found.loop, ast.While):
        return False
    names = {last_name(node) for node in ast.walk(found.loop.iter)} | {last_name(found.loop.target)}
    return any(_COUNTED.search(name) for name in names)


def is_normalised(source: Source, found: Accumulation) -> bool:
    """Return whether the loss needs no division, or is divided itself or through a value from which it is computed."""
    scope = source.scope(found.backward.call)
    if _divides(found.backward.loss):
        return True
    todo, seen = names_in(found.backward.loss), set[str]()
    while todo - seen:
        name = (todo - seen).pop()
        seen.add(name)
        for given in source.assignments(scope, name):
            if isinstance(given.statement, ast.AugAssign) and isinstance(given.statement.op, ast.Div | ast.Mult):
                return True
            if _divides(given.value) or _divides_within(source, given.value):
                return True
            if re.search(r"loss|scaled|obj|err", name):
                todo |= {one for one in names_in(given.value) if re.search(r"loss|scaled|obj|err", one)}
    if _divides_within(source, found.backward.loss):
        return True
    losses = [one for one in source.calls if source.class_of(one) or source.scope(one) in (scope, source.tree)]
    return any(_is_other_way(call) for call in losses) or _scales_gradients(source, scope)


def _divides(node: ast.expr) -> bool:
    return any(_is_division(inner) for inner in ast.walk(node))


def _is_division(node: ast.AST) -> bool:
    """Return whether a node divides, or multiplies by a name such as ``weight`` or with ``mul``, which may divide."""
    if isinstance(node, ast.BinOp):
        is_weighted = any(_WEIGHT.search(last_name(part)) for part in (node.left, node.right))
        return isinstance(node.op, ast.Div) or (isinstance(node.op, ast.Mult) and is_weighted)
    return isinstance(node, ast.Call) and last_name(node.func) in ("div", "div_", "true_divide", "mul", "mul_")


def _divides_within(source: Source, node: ast.expr) -> bool:
    """Return whether an expression calls a function of this file that contains a division."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    functions = [function for call in calls if (function := source.called(call)) is not None]
    return any(
        _divides(one.value) for function in functions for one in source.own(function, ast.Return) if one.value
    ) or any(_divides(one.value) for function in functions for one in source.own(function, ast.Assign))


def _is_other_way(call: ast.Call) -> bool:
    """Return whether a call creates or computes a loss that is a sum, which needs no division."""
    return is_constant(keyword(call, "reduction"), "sum") or is_constant(keyword(call, "size_average"), False)


def _scales_gradients(source: Source, scope: ast.AST) -> bool:
    """Return whether a function divides or multiplies gradients in place."""
    for node in source.own(scope, ast.AugAssign):
        if isinstance(node.op, ast.Div | ast.Mult) and last_name(node.target) == "grad":
            return True
    calls = [call for call in source.own(scope, ast.Call) if last_name(call.func) in ("div_", "mul_")]
    return any("grad" in ast.dump(call.func) for call in calls)
