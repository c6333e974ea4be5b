"""A loss or an output that is kept with its graph, in a sum or a list that outlives the batch.

After `backward()`, the tensors saved by the graph are freed, but some nodes of the graph stay for each batch. Without a
backward pass (in an evaluation), or with `retain_graph=True`, the activations of all batches stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import (
    Edit,
    Function,
    Hit,
    Loop,
    Source,
    last_name,
    names_bound,
    names_in,
    path_of,
)
from plimsoll.diagnose.lint.helpers.training import (
    backwards,
    batch_loop,
    is_forward,
    is_named_evaluation,
    is_of_a_module,
    is_without_grad,
)
from plimsoll.diagnose.lint.helpers.values import Value, value_of

_COLLECTING = {"append", "appendleft", "extend", "insert", "add"}


def hits(source: Source) -> Iterator[Hit]:
    """Find sums, lists and dicts that get a tensor with its graph in every batch."""
    for node, added, keeper in _growing(source):
        kept = _kept(source, node, added)
        if kept is None or _is_fed_back(source, node, path_of(keeper)):
            continue
        if not _is_a_sum_to_go_back_from(source, node, path_of(keeper)):
            yield _hit(source, node, added, kept)


def _growing(source: Source) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr, ast.expr]]:
    """Yield each statement that adds a value to a sum or container, the added value, and the sum or container."""
    for node in source.every(ast.AugAssign):
        if isinstance(node.op, ast.Add):
            yield node, node.value, node.target.value if isinstance(node.target, ast.Subscript) else node.target
    for assigned in source.every(ast.Assign):
        if (added := _added(assigned)) is not None:
            yield assigned, added, assigned.targets[0]
    for call in source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in _COLLECTING and call.args:
            yield call, call.args[-1], call.func.value


def _is_fed_back(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether a model in the loop receives the sum as input, as in numerical integration."""
    forwards = [
        call for loop in source.loops(node)[:1] for call in source.own(loop, ast.Call) if is_forward(source, call)
    ]
    return any(name in names_in(call) for call in forwards)


def _added(node: ast.Assign) -> ast.expr | None:
    """Return the value that a statement such as ``total = total + loss`` adds; ``None`` for other statements."""
    if len(node.targets) != 1 or not isinstance(node.value, ast.BinOp) or not isinstance(node.value.op, ast.Add):
        return None
    name, left, right = path_of(node.targets[0]), path_of(node.value.left), path_of(node.value.right)
    if not name or name not in (left, right):
        return None
    return node.value.right if name == left else node.value.left


def _kept(source: Source, node: ast.stmt | ast.expr, value: ast.expr) -> Value | None:
    """Return the added value if it has a graph and outlives an iteration of a loop over batches, otherwise ``None``."""
    found = value_of(source, value)
    if found is None or not found.has_graph or is_without_grad(source, node):
        return None
    if _in_module_forward(source, node):
        return None
    loop = batch_loop(source, node, depth=0) or _computing_loop(source, node)
    return found if loop is not None and not _begins_in(source, node, loop) else None


def _computing_loop(source: Source, node: ast.AST) -> Loop | None:
    """Return the innermost loop around a node, if the loop calls a model; ``None`` otherwise."""
    loop = next(iter(source.loops(node)), None)
    if loop is None:
        return None
    bound = names_bound(loop.target) if isinstance(loop, ast.For) else []  # for layer in layers: x = layer(x)
    calls = [call for call in source.own(loop, ast.Call) if is_forward(source, call)]
    return loop if any(path_of(call.func) not in bound for call in calls) else None


def _in_module_forward(source: Source, node: ast.AST) -> bool:
    """Return whether a node is in a method of a model or loss. Such methods add up terms for a backward pass."""
    functions = [above for above in source.ancestors(node) if isinstance(above, Function)]
    return any(
        one.name in ("forward", "compute_loss", "training_step") or is_of_a_module(source, one) for one in functions
    )


def _begins_in(source: Source, node: ast.stmt | ast.expr, loop: Loop) -> bool:
    """Return whether the container or sum is created anew in every iteration of the loop."""
    keeper = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    if keeper is None:
        keeper = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    while isinstance(keeper, ast.Subscript):
        keeper = keeper.value
    name = path_of(keeper)
    given = [one.statement for one in source.assignments(source.scope(node), name) if one.statement is not node]
    fresh = [one for one in given if not isinstance(one, ast.AugAssign) and source.is_in_body(one, loop.body)]
    return any(
        one.lineno < node.lineno and not (isinstance(one, ast.Assign) and name in _names_added(one)) for one in fresh
    )


def _names_added(node: ast.Assign) -> set[str]:
    return names_in(node.value) if isinstance(node.value, ast.BinOp) else set()


def _is_a_sum_to_go_back_from(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether a backward pass starts from the sum or container, so that its graphs are needed.

    The backward pass may be in the same function, in another method of the class, or in a caller.
    """
    scope = source.scope(node)
    todo, needed = [found.loss for found in backwards(source) if source.scope(found.call) is scope], set[str]()
    for loss in todo:
        for one in names_in(loss) - needed:
            needed.add(one)
            todo += [given.value for given in source.assignments(scope, one) if given.place is None]
    if name in needed or (name.startswith("self.") and _class_goes_back(source, node, name)):
        return True
    if not any(one.value is not None and name in names_in(one.value) for one in source.own(scope, ast.Return)):
        return False
    is_part_of_a_model = not todo and not is_named_evaluation(scope) and not _evaluates(source, scope)
    return is_part_of_a_model or any(_goes_back(source, call) for call in source.callers(scope))


def _class_goes_back(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether an attribute is used in the loss of a backward pass, or in another method that runs one.

    Only the class that contains ``node`` is searched. ``name`` is the attribute as a path, such as ``self.total``.
    """
    owner, scope = source.class_of(node), source.scope(node)
    if owner is None:
        return False
    parts: list[ast.AST] = [found.loss for found in backwards(source) if source.scope(found.call) is scope]
    parts += [
        one for one in owner.body if one is not scope and any(source.is_in(b.call, one) for b in backwards(source))
    ]
    return any(path_of(one) == name for part in parts for one in ast.walk(part) if isinstance(one, ast.Attribute))


def _evaluates(source: Source, scope: ast.AST) -> bool:
    """Return whether a function sets a model to evaluation mode."""
    return any(last_name(call.func) == "eval" and not call.args for call in source.own(scope, ast.Call))


def _goes_back(source: Source, call: ast.Call) -> bool:
    """Return whether the function around a call runs a backward pass from the value that the call returns."""
    scope = source.scope(call)
    names = {
        name
        for one in source.own(scope, ast.Assign)
        if source.is_in(call, one)
        for target in one.targets
        for name in names_in(target)
    }
    return any(names & names_in(found.loss) for found in backwards(source) if source.scope(found.call) is scope)


def _hit(source: Source, node: ast.stmt | ast.expr, value: ast.expr, kept: Value) -> Hit:
    scope = source.scope(node)
    is_trained = any(source.scope(found.call) is scope for found in backwards(source))
    what = "the loss" if kept.kind == "loss" else "the output"
    stays = "some nodes of it per batch, and the tensor" if is_trained else "all of every batch's activations"
    edits: tuple[Edit, ...] = ()
    if isinstance(value, ast.Name | ast.Attribute) or (
        isinstance(value, ast.Call) and last_name(value.func) != "float"
    ):
        end = source.span(value)[1]
        edits = (Edit(end, end, ".detach()"),)
    return Hit(
        node,
        f"{what} is kept with its graph from batch to batch: {stays} stay in memory",
        "write .item() for a number, or .detach() for a tensor",
        severity="warning" if is_trained else "error",
        edits=edits,
    )
