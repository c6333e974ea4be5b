"""Training and evaluation code in a file: backward calls, optimizer steps, loops over batches, gradient modes.

An object is recognised by the methods called on it (``x.backward()``, ``x.parameters()``), or else by a customary name
(``optimizer``, ``train_loader``).
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import NamedTuple

from plimsoll.diagnose.lint.helpers.source import (
    Function,
    Loop,
    Scope,
    Source,
    is_constant,
    keyword,
    last_name,
    names_bound,
    path_of,
)

_LOADER = re.compile(
    r"loader|dataloader|batches|minibatch|(?:train|val|valid|dev|test|eval|data|batch|epoch|text)_?(?:iter|iterator|gen|generator|dl|ds|set|data)"
    r"|^(?:dl|iterator|dataset|data|batch_iter|data_iter)$|get_batch|bucketiterator|iterate_batches"
)
_WRAPPERS = {"enumerate", "tqdm", "trange", "zip", "islice", "iter", "reversed", "track", "prefetch", "ProgressBar"}
_OPTIMIZER = re.compile(r"optim|^opt(?:_?[a-z0-9]{1,3})?$")
_OPTIMIZER_CLASS = re.compile(
    r"^(?:Adam\w*|SGD|RMSprop|Adagrad|Adadelta|Adafactor|LBFGS|ASGD|Rprop|NAdam|RAdam|BertAdam|Lion|LAMB)$"
)
_BACKWARD_OWN = {"backward", "manual_backward"}
_SELF_DIVIDING = re.compile(r"accelerator|engine|deepspeed|model_engine", re.IGNORECASE)
_GRAD_OFF = re.compile(r"no_grad|inference_mode")
_HOOKS_WITHOUT_GRAD = re.compile(r"^(?:validation|test|predict)_(?:step|epoch_end|batch_end)$|^on_(?:validation|test)_")
_MODEL = re.compile(
    r"(?:^|_)(?:model|net|network|encoder|decoder|bert|roberta|gpt2?|lstm|gru|rnn|transformer|classifier|generator|"
    r"discriminator|backbone|mlp|cnn|t5|student|teacher|seq2seq|net[gd]|llm)[0-9]*$",
    re.IGNORECASE,
)
_EVALUATION = re.compile(
    r"(?:^|_)(?:eval|evaluate|evaluation|valid|validate|validation|val|test|testing|infer|inference|predict|prediction|"
    r"predictions|generate|sample|translate|greedy|score|perplexity|accuracy|bleu|dev)(?:_|$)",
    re.IGNORECASE,
)
_MODEL_CALLS = {
    "parameters",
    "named_parameters",
    "train",
    "eval",
    "zero_grad",
    "state_dict",
    "gradient_checkpointing_enable",
}
_NOT_MODEL = re.compile(r"optim|sched|scaler|loader|criterion|tokenizer|trainer|metric", re.IGNORECASE)


class Backward(NamedTuple):
    """One backward pass in a file.

    Attributes:
        call: the call that starts it.
        loss: the expression from which it starts.
        divides: whether a library divides the loss by the number of micro-batches.
    """

    call: ast.Call
    loss: ast.expr
    divides: bool


@lru_cache(maxsize=4)
def backwards(source: Source) -> list[Backward]:
    """Return every backward pass of a file."""
    return [found for call in source.calls if (found := _backward(source, call)) is not None]


def _backward(source: Source, call: ast.Call) -> Backward | None:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _BACKWARD_OWN:
        return None
    owner, name = call.func.value, path_of(call.func.value)
    divides = bool(_SELF_DIVIDING.search(name))
    if call.func.attr == "manual_backward" or divides or last_name(owner) == "fabric":
        return Backward(call, call.args[0], divides) if call.args else None
    if isinstance(owner, ast.Call):
        is_scaling = last_name(owner.func) in ("scale", "scale_loss") and owner.args  # scaler.scale(loss).backward()
        is_above = isinstance(owner.func, ast.Name) and owner.func.id == "super"
        return None if is_above else Backward(call, owner.args[0] if is_scaling else owner, divides=False)
    is_definition = name == "self" or (source.class_of(call) is not None and last_name(owner) in ("ctx", "cls"))
    return None if is_definition else Backward(call, _scaled(source, call, owner), divides=False)


def _scaled(source: Source, call: ast.Call, owner: ast.expr) -> ast.expr:
    """Return the loss of a backward call.

    For ``scaled.backward()`` inside apex's ``with amp.scale_loss(loss, optimizer) as scaled:``, this is ``loss``.
    """
    for above in source.ancestors(call):
        if isinstance(above, ast.With):
            for item in above.items:
                given = item.context_expr
                if not isinstance(given, ast.Call) or last_name(given.func) != "scale_loss" or not given.args:
                    continue
                if item.optional_vars is not None and path_of(item.optional_vars) == path_of(owner):
                    return given.args[0]
    return owner


@lru_cache(maxsize=4)
def optimizers(source: Source) -> set[str]:
    """Return the names of the optimizers in a file, as paths such as ``self.optimizer``."""
    found = set()
    for node in source.every(ast.Assign, ast.AnnAssign):
        if isinstance(node.value, ast.Call) and _OPTIMIZER_CLASS.match(last_name(node.value.func)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name for target in targets for name in names_bound(target)}
    return found


def is_optimizer(source: Source, node: ast.expr) -> bool:
    """Return whether an expression is an optimizer."""
    name = last_name(node).lower()
    return path_of(node) in optimizers(source) or bool(_OPTIMIZER.search(name) and "sched" not in name)


@lru_cache(maxsize=4)
def steps(source: Source) -> list[ast.Call]:
    """Return every call of an optimizer's ``step``, also through a gradient scaler."""
    return [call for call in source.calls if _is_step(source, call)]


def _is_step(source: Source, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    return is_optimizer(source, call.func.value) or "scaler" in last_name(call.func.value).lower()


@lru_cache(maxsize=4)
def zero_grads(source: Source) -> list[ast.Call]:
    """Return every call that clears gradients, such as ``optimizer.zero_grad()``."""
    return [
        call
        for call in source.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "zero_grad"
        and (is_optimizer(source, call.func.value) or is_model(source, call.func.value))
    ]


@lru_cache(maxsize=4)
def _models(source: Source) -> set[str]:
    found = {
        path_of(call.func.value)
        for call in source.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in _MODEL_CALLS
    }
    classes = {
        node.name for node in source.every(ast.ClassDef) if any(last_name(base) == "Module" for base in node.bases)
    }
    for node in source.every(ast.Assign):
        if isinstance(node.value, ast.Call):
            made = last_name(node.value.func)
            if (
                (made == "from_pretrained" and re.search(r"Model|ForPreTraining|For[A-Z]", path_of(node.value.func)))
                or made in classes
                or made in ("DataParallel", "DistributedDataParallel")
            ):
                found |= {name for target in node.targets for name in names_bound(target)}
    return {name for name in found if name and name != "self" and not _NOT_MODEL.search(name)}


def is_model(source: Source, node: ast.expr) -> bool:
    """Return whether an expression is a model: its parameters are used, or its name is typical of models."""
    name = path_of(node)
    if not name or _NOT_MODEL.search(name):
        return False
    is_of_another = isinstance(node, ast.Attribute) and path_of(node.value) not in ("self", "args", "model")
    return name in _models(source) or (not is_of_another and bool(_MODEL.search(last_name(node))))


def is_forward(source: Source, call: ast.Call) -> bool:
    """Return whether a call is a forward pass of a model: ``model(...)``, ``self.model.forward(...)``."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr in ("forward", "module") and is_model(source, func.value):
        return True
    made = source.dotted(func)
    if isinstance(func, ast.Name) and (func.id in source.functions or func.id[:1].isupper() or "." in made):
        return False
    return is_model(source, func)


def is_batch_loop(source: Source, loop: Loop) -> bool:
    """Return whether a loop is over batches.

    It is if its iterable is named like a loader, or if it directly contains a backward pass.
    """
    if not isinstance(loop, ast.While) and _LOADER.search(_iterated(loop.iter).lower()):
        return True
    if any(source.loops(found.call)[:1] == [loop] for found in backwards(source)):
        return True
    stepping = {source.scope(found.call) for found in backwards(source) if not source.loops(found.call)}
    calls = (call for call in source.own(loop, ast.Call) if source.loops(call)[:1] == [loop])
    return any(source.called(call) in stepping for call in calls)


def _iterated(node: ast.expr) -> str:
    """Return the name of the object that a loop goes through, without wrappers such as `enumerate` or `tqdm`."""
    while isinstance(node, ast.Call) and node.args and last_name(node.func) in _WRAPPERS:
        node = node.args[0]
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _iterated(node.value) if not isinstance(node.value, ast.Name) else node.value.id
    return last_name(node)


def iterated(loop: Loop) -> str:
    """Return the name of the object that a ``for`` loop goes through; "" for a ``while`` loop."""
    return "" if isinstance(loop, ast.While) else _iterated(loop.iter)


def batch_loop(source: Source, node: ast.AST, depth: int = 2) -> Loop | None:
    """Return the loop over batches that runs a node; ``None`` if none is found.

    The loop is around the node, or around a call of the function that contains the node.
    """
    for loop in source.loops(node):
        if is_batch_loop(source, loop):
            return loop
    scope = source.scope(node)
    if depth and not isinstance(scope, ast.Module):
        for call in source.callers(scope):
            if (found := batch_loop(source, call, depth - 1)) is not None:
                return found
    return None


def is_named_evaluation(scope: Scope) -> bool:
    """Return whether a function is named like an evaluation. Test functions of pytest do not count."""
    return isinstance(scope, Function) and bool(_EVALUATION.search(scope.name)) and not scope.name.startswith("test_")


def is_of_a_module(source: Source, scope: Scope) -> bool:
    """Return whether a function is a method of a model, so that its callers decide whether gradients are on."""
    above = source.parent(scope)
    return isinstance(above, ast.ClassDef) and any(
        re.search(r"Module|Model$|PreTrained", last_name(base)) for base in above.bases
    )


def is_without_grad(source: Source, node: ast.AST, depth: int = 3) -> bool:
    """Return whether gradients are off at a node, or possibly off.

    They are turned off around the node, by a lasting switch before it, or at all calls of its function.
    """
    if any(_is_off_in(source, above) for above in source.ancestors(node)):
        return True
    scope = source.scope(node)
    switches = [*source.own(scope, ast.Call), *source.own(source.tree, ast.Call)]
    if any(_switches_off(source, call, node) for call in switches):
        return True
    callers = source.callers(scope)
    return bool(callers) and depth > 0 and all(is_without_grad(source, call, depth - 1) for call in callers)


def _is_off_in(source: Source, above: ast.AST) -> bool:
    """Return whether a node around other code turns gradients off: a `with`, a decorator or a Lightning hook."""
    if isinstance(above, ast.With | ast.AsyncWith):
        return any(_turns_off(source, item.context_expr) for item in above.items)
    if isinstance(above, Function | ast.ClassDef):
        is_hook = isinstance(above, Function) and bool(_HOOKS_WITHOUT_GRAD.search(above.name))
        return is_hook or any(_turns_off(source, decorator) for decorator in above.decorator_list)
    return False


def _turns_off(source: Source, node: ast.expr) -> bool:
    made = node.func if isinstance(node, ast.Call) else node
    name = source.dotted(made)
    if _GRAD_OFF.search(name):
        return not (isinstance(node, ast.Call) and node.args and is_constant(node.args[0], False))
    if isinstance(node, ast.IfExp):
        return _turns_off(source, node.body) or _turns_off(source, node.orelse)
    return name.endswith("set_grad_enabled") and isinstance(node, ast.Call) and not _is_true(node)


def _switches_off(source: Source, call: ast.Call, node: ast.AST) -> bool:
    """Return whether a call is ``torch.set_grad_enabled(False)`` as a statement above a node.

    As a statement, it stays in effect. As a context manager, it does not.
    """
    is_switch = source.dotted(call.func).endswith("set_grad_enabled") and not _is_true(call)
    return is_switch and isinstance(source.parent(call), ast.Expr) and call.lineno <= getattr(node, "lineno", 0)


def _is_true(call: ast.Call) -> bool:
    given = call.args[0] if call.args else keyword(call, "mode")
    return is_constant(given, True)
