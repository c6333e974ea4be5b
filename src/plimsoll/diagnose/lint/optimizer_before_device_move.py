"""An optimizer that creates its states before its model moves to the device. The states stay on the old device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, last_name, path_of
from plimsoll.diagnose.lint.helpers.training import is_model

_STATES_AT_ONCE = {"Adagrad"}  # torch.optim.Adagrad makes its sums in __init__, other optimizers in their first step


def hits(source: Source) -> Iterator[Hit]:
    """Find models that move to a device after their optimizer was created, in the same function.

    Only optimizers that allocate their states at construction count.
    """
    for call in source.calls:
        is_move = (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in ("to", "cuda")
            and is_model(source, call.func.value)
        )
        if not is_move or isinstance(source.parent(call), ast.Attribute) or source.loops(call):
            continue
        scope, model = source.scope(call), path_of(call.func.value)  # type: ignore[attr-defined]
        for other in source.own(scope, ast.Call):
            if other.lineno < call.lineno and _has_states(other, model):
                yield Hit(
                    call,
                    "the states of the optimizer were made before the model moved, and stay on the other device",
                    "move the model first, then make the optimizer and load its states",
                    severity="error",
                )
                break


def _has_states(call: ast.Call, model: str) -> bool:
    if last_name(call.func) in _STATES_AT_ONCE:
        return any(path_of(getattr(getattr(part, "func", None), "value", None)) == model for part in call.args)
    return False
