"""Gradients clipped while they are scaled. Their norm is too large by a factor of 65,536, so every step is clipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, last_name
from plimsoll.diagnose.lint.helpers.training import backwards


def hits(source: Source) -> Iterator[Hit]:
    """Find gradient clipping after a scaled backward pass, in a file without `unscale_`."""
    for call in source.calls:
        if last_name(call.func) not in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
            continue
        scope = source.scope(call)
        if "accelerator" in source.dotted(call.func):
            continue
        above = [
            one.call for one in backwards(source) if source.scope(one.call) is scope and one.call.lineno < call.lineno
        ]
        if not above or not _is_scaled(above[-1]):
            continue
        if any(last_name(one.func) in ("unscale_", "unscale_gradients") for one in source.calls):
            continue
        if any(_steps_scaled(one) for one in source.calls):
            yield Hit(
                call,
                "the gradients are still multiplied by the loss scale: clipping reduces them to almost nothing",
                "write `scaler.unscale_(optimizer)` before it",
                severity="error",
            )


def _is_scaled(call: ast.Call) -> bool:
    """Return whether a backward pass starts from a scaled loss: ``scaler.scale(loss).backward()``."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Call) and last_name(owner.func) == "scale"


def _steps_scaled(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    return "scaler" in last_name(call.func.value).lower()
