"""Gradients clipped while they are scaled: the limit is passed by a factor of 65,536, and every step is clipped."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.diagnose.lint._source import Hit, Source, last_name
from plimsoll.diagnose.lint._training import backwards


def hits(source: Source) -> Iterator[Hit]:
    """Find clipping between a scaled backward pass and the step with no `unscale_` in the same function."""
    for call in source.calls:
        if last_name(call.func) not in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
            continue
        scope = source.scope(call)
        if "accelerator" in source.dotted(call.func):
            continue
        scaled = [one for one in backwards(source) if source.scope(one.call) is scope and _is_scaled(one.call)]
        if not scaled or any(last_name(one.func) in ("unscale_", "unscale_gradients") for one in source.calls):
            continue
        if any(
            last_name(one.func) == "step" and "scaler" in last_name(getattr(one.func, "value", None)).lower()
            for one in source.calls
        ):
            yield Hit(
                call,
                "the gradients are still multiplied by the loss scale: all of them are clipped to almost nothing",
                "write `scaler.unscale_(optimizer)` before it",
                severity="error",
            )


def _is_scaled(call: object) -> bool:
    owner = getattr(getattr(call, "func", None), "value", None)
    return last_name(getattr(owner, "func", None)) == "scale"
