"""Evaluation that records a graph, although no backward pass uses it. It takes at least twice the memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Loop, Scope, Source, is_constant, last_name
from plimsoll.diagnose.lint.helpers.training import (
    backwards,
    is_batch_loop,
    is_forward,
    is_model,
    is_named_evaluation,
    is_of_a_module,
    is_without_grad,
    iterated,
    steps,
)

_HELD_OUT = re.compile(
    r"(?:^|_)(?:val|valid|validation|dev|test|eval|evaluation|heldout)(?:_|loader|iter|data|set|$)", re.IGNORECASE
)
_TRAINS = re.compile(r"^(?:train|is_train|training|is_training|optimizer|optim|opt|train_mode|do_train)$")
_NEEDS_GRAD = {"grad", "requires_grad_", "backward", "manual_backward", "functional_call", "jacobian", "vjp", "attack"}


def hits(source: Source) -> Iterator[Hit]:
    """Find forward passes in evaluation loops with gradients on."""
    scopes: list[Scope] = [source.tree, *source.every(ast.FunctionDef, ast.AsyncFunctionDef)]
    for scope in scopes:
        if is_of_a_module(source, scope) or _may_train(scope):
            continue
        calls = _evaluations(source, scope)
        for call in calls if isinstance(scope, ast.Module) else calls[:1]:  # one fix per function
            yield Hit(
                call,
                "evaluation with gradients on: every activation is saved for a backward pass that never runs",
                "put `with torch.no_grad():` (or torch.inference_mode()) around the loop, or decorate the function",
            )


def _evaluations(source: Source, scope: Scope) -> list[ast.Call]:
    """Return, for each outermost evaluation loop, its first forward pass with gradients on."""
    loops: list[Loop] = source.own(scope, ast.For, ast.AsyncFor, ast.While)
    outermost = (loop for loop in loops if not any(_is_evaluation(source, scope, one) for one in source.loops(loop)))
    return [call for loop in outermost if (call := _forward_of(source, scope, loop)) is not None]


def _forward_of(source: Source, scope: Scope, loop: Loop) -> ast.Call | None:
    if not _is_evaluation(source, scope, loop) or _goes_back(source, loop):
        return None
    forwards = (call for call in source.own(loop, ast.Call) if is_forward(source, call) and source.loops(call))
    return next((call for call in forwards if not is_without_grad(source, call)), None)


def _is_evaluation(source: Source, scope: Scope, loop: Loop) -> bool:
    mode = _mode_before(source, scope, loop)
    if mode is not None:
        return mode == "eval"
    if _HELD_OUT.search(iterated(loop)):
        return True
    return is_named_evaluation(scope) and (is_batch_loop(source, loop) or not isinstance(loop, ast.While))


def _mode_before(source: Source, scope: Scope, loop: Loop) -> str | None:
    """Return the mode, ``"train"`` or ``"eval"``, to which a model was last set before a loop runs.

    The function is searched above the loop and at the start of the loop. ``None`` if it sets no mode.
    """
    end = max(loop.lineno, next((inner.lineno for inner in source.own(loop, ast.For, ast.While)), loop.body[0].lineno))
    found = None
    for call in source.own(scope, ast.Call):
        is_mode = isinstance(call.func, ast.Attribute) and call.func.attr in ("train", "eval")
        if is_mode and call.lineno <= end and is_model(source, call.func.value):  # type: ignore[attr-defined]
            outer = source.loops(call)
            if outer and outer[0] is not loop and outer[0] not in source.loops(loop):
                continue  # of another loop
            is_off = call.func.attr == "eval" or (call.args and is_constant(call.args[0], False))  # type: ignore[attr-defined]
            found = "eval" if is_off else "train"
    return found


def _goes_back(source: Source, loop: Loop) -> bool:
    if any(source.is_in(found.call, loop) for found in backwards(source)) or any(
        source.is_in(one, loop) for one in steps(source)
    ):
        return True
    calls = source.own(loop, ast.Call)
    if any(last_name(call.func) in _NEEDS_GRAD for call in calls):
        return True
    functions = [function for call in calls if (function := source.called(call)) is not None]
    return any(source.is_in(found.call, function) for function in functions for found in backwards(source))


def _may_train(scope: Scope) -> bool:
    if isinstance(scope, ast.Module):
        return False
    arguments = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
    return any(_TRAINS.match(one.arg) for one in arguments)
