"""Re-entrant checkpointing of inputs that need no gradient: the checkpointed modules are silently not trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Edit, Function, Hit, Source, is_constant, keyword, last_name, path_of
from plimsoll.diagnose.lint.helpers.training import is_without_grad

_NUM_BEFORE_INPUTS = {"torch.utils.checkpoint.checkpoint": 1, "torch.utils.checkpoint.checkpoint_sequential": 2}
_OPTIONS = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "context_fn", "early_stop"}
_IDS = re.compile(r"(?:^|_)(?:ids|idx|tokens|token_ids|input_ids)$")
_NEEDS_NONE = re.compile(rf"{_IDS.pattern}|(?:^|_)(?:mask|positions?|lengths?|bias_mask)$")
_WEIGHTLESS = re.compile(r"^(?:\w*Dropout\w*|Identity|GELU|ReLU|SiLU|Tanh|Flatten)$")
_SAME_VALUES = {
    "to", "float", "half", "bfloat16", "cuda", "cpu", "contiguous", "clone", "view", "reshape", "permute", "transpose",
    "flatten", "unsqueeze", "squeeze",
}  # fmt: skip
_DEEPEST = 8


def hits(source: Source) -> Iterator[Hit]:
    """Find calls of re-entrant checkpointing whose modules get no gradient."""
    if "enable_input_require_grads" in source.text:
        return
    for call in source.calls:
        num_before = _NUM_BEFORE_INPUTS.get(source.dotted(call.func))
        if num_before is None or not _is_reentrant(call) or is_without_grad(source, call):
            continue
        inputs = call.args[num_before:]
        if not inputs or _is_frozen(source, call.args[0]) or not _is_cut_off(source, inputs[0], _DEEPEST):
            continue
        if all(_needs_none(source, other) for other in inputs[1:]):
            yield Hit(
                call,
                "re-entrant checkpointing of an input that needs no gradient: the checkpointed modules get none and "
                "are not trained",
                "write use_reentrant=False",
                severity="error",
                edits=_edits(source, call),
            )


def _is_reentrant(call: ast.Call) -> bool:
    """Return whether a call of checkpointing is re-entrant, which it is by default."""
    if any(isinstance(one, ast.Starred) for one in call.args) or {one.arg for one in call.keywords} - _OPTIONS:
        return False
    given = keyword(call, "use_reentrant")
    return given is None or is_constant(given, True)


def _edits(source: Source, call: ast.Call) -> tuple[Edit, ...]:
    given = keyword(call, "use_reentrant")
    return (Edit(*source.span(given), "False"),) if given is not None else ()


def _is_cut_off(source: Source, node: ast.expr, depth: int) -> bool:
    """Return whether a tensor certainly needs no gradient.

    An expression that cannot be followed to its value may need one, so the result is ``False``.
    """
    if depth <= 0:
        return False
    if isinstance(node, ast.Name):
        return _is_name_cut_off(source, node, depth)
    if isinstance(node, ast.BinOp):
        return _is_cut_off(source, node.left, depth - 1) and _needs_none(source, node.right)
    return isinstance(node, ast.Call) and _is_call_cut_off(source, node, depth)


def _is_call_cut_off(source: Source, call: ast.Call, depth: int) -> bool:
    of = call.func
    if isinstance(of, ast.Attribute) and of.attr == "detach":
        return True
    if isinstance(of, ast.Attribute) and of.attr in _SAME_VALUES:
        return _is_cut_off(source, of.value, depth - 1)
    if _is_frozen(source, of):
        return all(_needs_none(source, one) for one in call.args) and not call.keywords
    return len(call.args) == 1 and _is_weightless(source, of) and _is_cut_off(source, call.args[0], depth - 1)


def _is_name_cut_off(source: Source, node: ast.Name, depth: int) -> bool:
    scope, here = source.scope(node), source.statement(node)
    if re.search(rf"\b{node.id}\.(?:requires_grad_\((?!False)|requires_grad\s*=\s*True|retain_grad)", source.text):
        return False
    above = [
        one
        for one in source.assignments(scope, node.id)
        if one.statement is not here and one.statement.lineno < here.lineno
    ]
    if not above:
        return _is_argument(scope, node.id) and _IDS.search(node.id) is not None
    return all(
        one.place is None
        and not isinstance(one.statement, ast.AugAssign)
        and (_is_in_no_grad(source, one.statement) or _is_cut_off(source, one.value, depth - 1))
        for one in above
    )


def _is_in_no_grad(source: Source, statement: ast.stmt) -> bool:
    """Return whether a statement is in a ``no_grad`` or ``inference_mode`` block, so gradients are certainly off.

    `is_without_grad` also returns ``True`` if they are only possibly off.
    """
    around = [
        item.context_expr
        for above in source.ancestors(statement)
        if isinstance(above, ast.With)
        for item in above.items
    ]
    return any(isinstance(one, ast.Call) and last_name(one.func) in ("no_grad", "inference_mode") for one in around)


def _is_argument(scope: ast.AST, name: str) -> bool:
    return isinstance(scope, Function) and name in {one.arg for one in (*scope.args.args, *scope.args.kwonlyargs)}


def _needs_none(source: Source, node: ast.expr) -> bool:
    """Return whether an expression certainly needs no gradient: it is a number, or is named like ids or a mask."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Call) and source.dotted(node.func).startswith("math."):
        return True
    return isinstance(node, ast.Name | ast.Attribute) and _NEEDS_NONE.search(last_name(node)) is not None


def _is_frozen(source: Source, module: ast.expr) -> bool:
    """Return whether the file turns off the gradients of a module, and never turns them on again."""
    name = re.escape(last_name(module))
    if not name or not path_of(module):
        return False
    turned = re.compile(rf"\b{name}(?:\.weight)?\.requires_grad(?:_\((?P<call>[^)]*)\)|\s*=\s*(?P<given>\w+))")
    states = [(found["call"] or found["given"] or "").strip() for found in turned.finditer(source.text)]
    if any(state != "False" for state in states):
        return False
    return bool(states) or _is_made_frozen(source, module) or _is_frozen_in_a_loop(source, last_name(module))


def _is_made_frozen(source: Source, module: ast.expr) -> bool:
    """Return whether an expression creates a module whose weights get no gradient.

    Examples are ``nn.Embedding(...).requires_grad_(False)`` and ``from_pretrained``, which freezes by default.
    """
    values = _values(source, module)
    return bool(values) and all(
        isinstance(value, ast.Call)
        and (
            (last_name(value.func) == "requires_grad_" and bool(value.args) and is_constant(value.args[0], False))
            or (
                last_name(value.func) == "from_pretrained"
                and "Embedding" in path_of(value.func)
                and len(value.args) == 1
                and keyword(value, "freeze") is None
            )
        )
        for value in values
    )


def _is_frozen_in_a_loop(source: Source, name: str) -> bool:
    """Return whether a loop such as ``for p in self.embed.parameters(): p.requires_grad = False`` freezes a module."""
    for loop in source.every(ast.For):
        of = loop.iter
        if not (isinstance(of, ast.Call) and last_name(of.func) == "parameters" and isinstance(of.func, ast.Attribute)):
            continue
        if last_name(of.func.value) == name and isinstance(loop.target, ast.Name):
            written = source.written(loop)
            if re.search(rf"\b{loop.target.id}\.requires_grad(?:_\(False\)|\s*=\s*False)", written):
                return True
    return False


def _is_weightless(source: Source, module: ast.expr) -> bool:
    values = _values(source, module)
    return bool(values) and all(isinstance(one, ast.Call) and _WEIGHTLESS.match(last_name(one.func)) for one in values)


def _values(source: Source, module: ast.expr) -> list[ast.expr]:
    """Return the values that the file assigns to a name, or to an attribute of a class."""
    path, owner = path_of(module), source.class_of(module)
    return [
        node.value
        for node in source.every(ast.Assign)
        if any(path_of(target) == path for target in node.targets) and source.class_of(node) is owner
    ]
