"""Values of expressions: a loss or a model's output, with or without its graph, on the device or on the host.

A name has the value of its last assignment above its use, in the same function. A call of a function of the same file
is followed into its returned value, to a limited depth. Expressions that cannot be followed have no value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from plimsoll.diagnose.lint.helpers.source import (
    Function,
    Given,
    Source,
    keyword,
    last_name,
    names_bound,
    names_in,
    path_of,
)
from plimsoll.diagnose.lint.helpers.training import backwards, is_forward, is_without_grad

_LOSS_CALL = re.compile(
    r"(?:^|_)(?:criterion|loss|loss_fn|loss_fct|loss_func|loss_function|lossfn|crit|objective)(?:_[a-z0-9]+)?$|"
    r"^(?:cross_entropy|nll_loss|mse_loss|l1_loss|kl_div|binary_cross_entropy\w*|smooth_l1_loss|ce_loss|bce_loss)$|"
    r"(?:CrossEntropyLoss|NLLLoss|MSELoss|BCELoss|BCEWithLogitsLoss)$",
    re.IGNORECASE,
)
_LOSS_NAME = re.compile(r"(?:^|_)loss(?:es)?(?:_[a-z0-9]+)?$|^loss_|^(?:err[dg]?|ce|nll|mse)$", re.IGNORECASE)
_HOST_CALLS = {"float", "int", "str", "len", "round", "bool", "format"}
_LEAVES_GRAPH = {"item", "tolist", "numpy", "detach", "detach_", "data"}
_LEAVES_DEVICE = {"item", "tolist", "numpy", "cpu"}
_INDICES = {
    "argmax",
    "argmin",
    "argsort",
    "eq",
    "ne",
    "gt",
    "lt",
    "ge",
    "le",
    "multinomial",
    "round",
    "sign",
    "bool",
    "long",
    "int",
    "topk_ids",
}
_NO_VALUE = {
    "shape", "size", "dtype", "device", "ndim", "numel", "dim", "item", "tolist", "backward", "keys", "grad_fn", "type",
    "decode", "batch_decode", "state_dict", "parameters", "named_parameters", "zero_grad", "step", "eval", "train",
}  # fmt: skip
_LIKE_TORCH = {"gather", "gather_for_metrics", "Variable", "softmax", "sigmoid"}
_WITH_INDICES = {"max", "min", "topk", "sort", "median", "mode", "kthvalue"}
_DEEPEST = 12
_HOP = 4  # depth used up by following a call into a function

Kind = Literal["loss", "output"]


@dataclass(frozen=True)
class Value:
    """The result of a forward pass that an expression holds.

    Attributes:
        kind: whether it is a loss or an output.
        has_graph: whether it keeps its graph alive.
        is_on_device: whether it is on the device.
    """

    kind: Kind
    has_graph: bool = True
    is_on_device: bool = True


def value_of(source: Source, node: ast.expr, depth: int = _DEEPEST) -> Value | None:
    """Return whether an expression is a loss or a model output, with or without its graph, on or off the device.

    The result is ``None`` if the file does not show that it is one of them. ``depth`` limits how far names are
    followed.
    """
    if depth <= 0:
        return None
    if isinstance(node, ast.Name):
        return _of_name(source, node, depth)
    if isinstance(node, ast.Attribute):
        return _of_attribute(source, node, depth)
    if isinstance(node, ast.Call):
        return _of_call(source, node, depth)
    found = _best(value_of(source, part, depth - 1) for part in _parts(node))
    return replace(found, has_graph=False) if found is not None and isinstance(node, ast.Compare) else found


def _parts(node: ast.expr) -> list[ast.expr]:
    """Return the subexpressions whose values determine the value of an expression."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript | ast.Starred | ast.NamedExpr | ast.Await):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Compare):
        return [node.left]
    return node.elts if isinstance(node, ast.Tuple | ast.List) else node.values if isinstance(node, ast.Dict) else []


def _of_name(source: Source, node: ast.Name, depth: int) -> Value | None:
    scope, here = source.scope(node), source.statement(node)
    given = [one for one in source.assignments(scope, node.id) if one.statement is not here]
    above = [one for one in given if one.statement.lineno <= node.lineno]
    if not above:
        is_backwarded = any(
            path_of(one.loss) == node.id and source.scope(one.call) is scope for one in backwards(source)
        )
        return Value("loss") if not given and is_backwarded and _LOSS_NAME.search(node.id) else None
    last = 1
    while isinstance(above[-last].statement, ast.AugAssign) and last < len(above):
        last += 1  # after `loss /= n` it is still the loss; after `total += loss` it also holds the summand
    found = _best(_of_given(source, one, depth) for one in above[-last:])
    if found is None or _is_a_number_beside(source, above[-1], node.id):
        return None
    if found.has_graph and is_without_grad(source, above[-1].statement):
        found = replace(found, has_graph=False)
    return _by_name(found, node.id)


def _is_a_number_beside(source: Source, given: Given, name: str) -> bool:
    """Return whether a name is bound to one of several results of a call, while ``backward`` runs from another.

    Such a name is probably a number for a log, not a tensor with a graph.
    """
    if given.place is None or not isinstance(given.value, ast.Call) or is_forward(source, given.value):
        return False
    if not isinstance(given.statement, ast.Assign):
        return False
    scope = source.scope(given.statement)
    needed = {one for found in backwards(source) if source.scope(found.call) is scope for one in names_in(found.loss)}
    bound = {one for target in given.statement.targets for one in names_bound(target)}
    return name not in needed and bool(needed & bound)


def _of_given(source: Source, given: Given, depth: int) -> Value | None:
    """Return the value that an assignment gives to one name. The name may be one of several targets of an unpacking."""
    value, place = given.value, given.place
    if place is None:
        return value_of(source, value, depth - 1)
    if isinstance(value, ast.Call):
        function = source.called(value)
        if function is not None:
            return _returned(source, function, depth, place)
        if place and last_name(value.func) in _WITH_INDICES:
            found = value_of(source, value, depth - 1)
            return found and replace(found, has_graph=False)
    if isinstance(value, ast.Tuple) and place < len(value.elts):
        value = value.elts[place]
    return value_of(source, value, depth - 1)


def _best(found: Iterable[Value | None]) -> Value | None:
    """Return the value that keeps the most memory alive; ``None`` if no value is known."""
    return max((one for one in found if one), key=lambda value: (value.has_graph, value.is_on_device), default=None)


def _by_name(value: Value, name: str) -> Value:
    return replace(value, kind="loss") if value.kind == "output" and _LOSS_NAME.search(name) else value


def _of_attribute(source: Source, node: ast.Attribute, depth: int) -> Value | None:
    if node.attr in _NO_VALUE:
        return None
    found = value_of(source, node.value, depth - 1)
    if found is None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            scope = source.scope(node)
            above = [one for one in source.assignments(scope, path_of(node)) if one.statement.lineno < node.lineno]
            return _of_given(source, above[-1], depth) if above else None
        return None
    if node.attr == "data":
        return replace(found, has_graph=False)
    return replace(found, kind="loss") if node.attr == "loss" else found


def _of_call(source: Source, call: ast.Call, depth: int) -> Value | None:
    name, dotted = last_name(call.func), source.dotted(call.func)
    is_of_host = isinstance(call.func, ast.Name) and name in _HOST_CALLS
    if is_of_host or dotted.startswith(("numpy.", "np.", "sklearn.", "tensorflow.", "math.")):
        return None
    if is_forward(source, call):
        return Value("output")
    if (function := source.called(call)) is not None:
        return _returned(source, function, depth)
    if isinstance(call.func, ast.Attribute) and (found := value_of(source, call.func.value, depth - 1)) is not None:
        return _of_method(found, call, name)
    if _LOSS_CALL.search(name) and not dotted.startswith("self.log"):
        return Value("loss") if call.args or call.keywords else None
    is_of_torch = dotted.startswith(("torch.", "F.")) or name in _LIKE_TORCH
    return _of_torch(source, call, name, depth) if is_of_torch else None


def _of_method(found: Value, call: ast.Call, name: str) -> Value | None:
    if name in ("item", "tolist", "numpy") or name in _NO_VALUE:
        return None
    if name in _LEAVES_GRAPH or name in _INDICES:
        found = replace(found, has_graph=False)
    moves_to_cpu = name == "to" and any(
        isinstance(one, ast.Constant) and one.value == "cpu" for one in (*call.args, keyword(call, "device"))
    )
    if name in _LEAVES_DEVICE or moves_to_cpu:
        found = replace(found, is_on_device=False)
    return found


def _of_torch(source: Source, call: ast.Call, name: str, depth: int) -> Value | None:
    if name in ("no_grad", "grad", "tensor", "zeros_like", "ones_like", "rand_like", "save"):
        return None
    best = _best(value_of(source, part, depth - 1) for part in call.args)
    return best and (replace(best, has_graph=False) if name in _INDICES else best)


def _returned(source: Source, function: Function, depth: int, place: int | None = None) -> Value | None:
    """Return the value that a function of the file returns; ``None`` if it is not known.

    Args:
        source: the file.
        function: the function, which must have a single ``return``.
        depth: how far names are followed.
        place: the index of the value in a returned tuple; ``None`` if the tuple is not unpacked.
    """
    given = [one.value for one in source.own(function, ast.Return) if one.value is not None]
    if len(given) != 1 or isinstance(given[0], ast.Dict):
        return None
    value = given[0]
    if isinstance(value, ast.Tuple):
        if place is None or place >= len(value.elts):
            return None
        value = value.elts[place]
    found = value_of(source, value, depth - _HOP)
    return replace(found, has_graph=False) if found is not None and is_without_grad(source, value) else found
