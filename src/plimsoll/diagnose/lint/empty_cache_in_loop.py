"""`torch.cuda.empty_cache()` in every batch. It frees no memory in use, and slows down the next allocations."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Loop, Source, last_name
from plimsoll.diagnose.lint.helpers.training import batch_loop, is_batch_loop, is_forward, is_model

_BUILDS = {"from_pretrained", "from_config", "load_state_dict", "build_model", "create_model", "load_model"}


def hits(source: Source) -> Iterator[Hit]:
    """Find calls of `empty_cache` in loops over batches, also in functions that such a loop calls."""
    for call in source.calls:
        if last_name(call.func) != "empty_cache" or not source.dotted(call.func).endswith("cuda.empty_cache"):
            continue
        if any(isinstance(above, ast.ExceptHandler) for above in source.ancestors(call)):
            continue
        loop = batch_loop(source, call) or _computing_loop(source, call)
        if loop is not None and not _builds(source, loop):
            yield Hit(
                call,
                "the allocator's cache is emptied in every batch, and allocated again: this saves no memory",
                "leave it out; against fragmentation, set PYTORCH_ALLOC_CONF=expandable_segments:True",
            )


def _computing_loop(source: Source, call: ast.Call) -> Loop | None:
    """Return the innermost loop around a call, if the loop also calls a model.

    ``None`` if the call is in no loop, or that loop calls no model or contains a loop over batches.
    """
    loop = next(iter(source.loops(call)), None)
    if loop is None or any(is_batch_loop(source, inner) for inner in source.own(loop, ast.For, ast.While)):
        return None
    return loop if any(is_forward(source, one) for one in source.own(loop, ast.Call)) else None


def _builds(source: Source, loop: Loop) -> bool:
    """Return whether every iteration builds its own model, as in benchmarks."""
    deleted = [target for node in source.own(loop, ast.Delete) for target in node.targets]
    is_dropped = any(is_model(source, target) for target in deleted if isinstance(target, ast.expr))
    return is_dropped or any(last_name(call.func) in _BUILDS for call in source.own(loop, ast.Call))
