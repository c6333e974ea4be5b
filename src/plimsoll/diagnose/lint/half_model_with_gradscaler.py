"""A float16 model under a GradScaler. The scaler refuses to unscale float16 gradients, or small updates are lost."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, is_constant, keyword, last_name, names_bound, path_of
from plimsoll.diagnose.lint.helpers.training import is_model, is_without_grad

_HALF = {"torch.float16", "torch.half"}


def hits(source: Source) -> Iterator[Hit]:
    """Find `.half()` and similar calls on a model, in a file that scales its loss."""
    if not _scales(source) or "peft" in source.text:
        return
    frozen = _frozen(source)
    for call in source.calls:
        if _is_for_inference(source, call):
            continue
        if (path := _halved(source, call)) is not None and path not in frozen:
            yield Hit(
                call,
                'the weights are float16 under a GradScaler: it raises "Attempting to unscale FP16 gradients"',
                "leave the model in float32; torch.autocast computes in float16 by itself",
                severity="error",
            )


def _scales(source: Source) -> bool:
    made = [call for call in source.calls if last_name(call.func) in ("GradScaler", "ShardedGradScaler")]
    is_off = [is_constant(keyword(call, "enabled"), False) for call in made]
    return bool(made) and not all(is_off) and any(last_name(call.func) == "scale" for call in source.calls)


def _is_for_inference(source: Source, call: ast.Call) -> bool:
    """Return whether a conversion is for inference: ``eval()`` is in the same chain of calls, or gradients are off."""
    chain = [above for above in source.ancestors(call) if isinstance(above, ast.Attribute)]
    return any(one.attr == "eval" for one in chain) or is_without_grad(source, call)


def _halved(source: Source, call: ast.Call) -> str | None:
    """Return the name of the model that a call converts to float16, such as ``self.model``.

    ``None`` if the call does not convert a model.
    """
    name = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and name in ("half", "to"):
        owner = call.func.value
        if last_name(source.parent(call)) == "float":
            return None  # .half().float() only rounds the weights
        types = [*call.args, keyword(call, "dtype")]
        if name == "to" and not any(source.dotted(one) in _HALF for one in types):
            return None
        if isinstance(owner, ast.Call):  # Net().half(), Net().cuda().half()
            return _bound(source, call) if _is_made(source, owner) else None
        return path_of(owner) if is_model(source, owner) else None
    if name == "from_pretrained" and "Model" in path_of(call.func):
        types = [keyword(call, "torch_dtype"), keyword(call, "dtype")]
        return _bound(source, call) if any(source.dotted(one) in _HALF for one in types) else None
    return None


def _is_made(source: Source, call: ast.Call) -> bool:
    while (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("cuda", "to", "train")
        and isinstance(call.func.value, ast.Call)
    ):
        call = call.func.value
    name = last_name(call.func)
    classes = {one.name for one in source.every(ast.ClassDef) if any(last_name(base) == "Module" for base in one.bases)}
    return name in classes or name == "from_pretrained"


def _bound(source: Source, call: ast.Call) -> str:
    statement = source.statement(call)
    names = (
        [name for target in statement.targets for name in names_bound(target)]
        if isinstance(statement, ast.Assign)
        else []
    )
    return names[0] if names else ""


def _frozen(source: Source) -> set[str]:
    """Return the names of models that are not trained, as paths such as ``self.teacher``.

    They are in evaluation mode, or their parameters need no gradient.
    """
    called = [call.func for call in source.calls if isinstance(call.func, ast.Attribute)]
    trained = {path_of(func.value) for func in called if func.attr in ("train", "parameters", "named_parameters")}
    return {path_of(func.value) for func in called if func.attr in ("eval", "requires_grad_")} - trained
