"""A checkpoint on the device that stays alive after the model and the optimizer were loaded from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Given, Hit, Scope, Source, is_constant, keyword, last_name, names_in
from plimsoll.diagnose.lint.helpers.training import backwards, is_optimizer


def hits(source: Source) -> Iterator[Hit]:
    """Find optimizers loaded from a checkpoint on the device, if a variable keeps the checkpoint during training."""
    for call in source.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "load_state_dict" or not call.args:
            continue
        scope = source.scope(call)
        if not is_optimizer(source, call.func.value) or not _trains_after(source, scope, call):
            continue
        for name in names_in(call.args[0]):
            loaded = [one for one in source.assignments(scope, name) if _is_on_device(source, one)]
            if loaded and not _is_let_go(source, scope, name, call):
                yield Hit(
                    call,
                    f"`{name}` holds the optimizer's states on the device a second time, as long as the training runs",
                    f'load with map_location="cpu", and write `del {name}` after this line',
                )


def _is_on_device(source: Source, given: Given) -> bool:
    value = given.value
    if not isinstance(value, ast.Call) or source.dotted(value.func) != "torch.load":
        return False
    place = value.args[1] if len(value.args) > 1 else keyword(value, "map_location")
    if isinstance(place, ast.Call) and source.dotted(place.func) == "torch.device" and place.args:
        place = place.args[0]
    return not is_constant(place, "cpu") and not isinstance(place, ast.Lambda)


def _is_let_go(source: Source, scope: Scope, name: str, call: ast.Call) -> bool:
    deleted = any(
        last_name(target) == name
        for node in source.own(scope, ast.Delete)
        for target in node.targets
        if node.lineno > call.lineno
    )
    return deleted or any(one.statement.lineno > call.lineno for one in source.assignments(scope, name))


def _trains_after(source: Source, scope: Scope, call: ast.Call) -> bool:
    """Return whether a function trains after it has loaded a checkpoint, itself or in a function that it calls."""
    if any(source.scope(one.call) is scope and one.call.lineno > call.lineno for one in backwards(source)):
        return True
    trained = {source.scope(one.call) for one in backwards(source)}
    later = [one for one in source.own(scope, ast.Call) if one.lineno > call.lineno]
    return any(source.called(one) in trained for one in later if source.called(one) is not None)
