"""`backward(retain_graph=True)` although no other backward pass uses the same graph."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, is_constant, keyword, last_name
from plimsoll.diagnose.lint.helpers.training import backwards


def hits(source: Source) -> Iterator[Hit]:
    """Find `retain_graph=True` in the last backward pass of a loop or a function."""
    for found in backwards(source):
        if not is_constant(keyword(found.call, "retain_graph"), True):
            continue
        if is_constant(keyword(found.call, "create_graph"), True) or _is_used_again(source, found.call):
            continue
        yield Hit(
            found.call,
            "the graph and its saved tensors stay in memory after the backward pass, which otherwise frees them",
            "leave retain_graph out; if torch then reports a second backward, detach the tensors that are carried over",
        )


def _is_used_again(source: Source, call: ast.Call) -> bool:
    """Return whether another backward pass or ``autograd.grad`` follows in the same iteration of the loop."""
    scope, loop = source.scope(call), source.loops(call)[:1]
    others = [one.call for one in backwards(source) if one.call is not call]
    others += [one for one in source.calls if source.dotted(one.func).endswith("autograd.grad")]
    for other in others:
        if source.scope(other) is not scope:
            continue
        is_later = (other.lineno, other.col_offset) > (call.lineno, call.col_offset)
        if is_later and (source.loops(other)[:1] == loop or not loop or source.is_in(other, loop[0])):
            return True
    inner = source.loops(call)
    return bool(inner) and isinstance(inner[0], ast.For) and last_name(inner[0].iter) in ("losses", "loss_list")
