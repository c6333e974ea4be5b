"""Gradient accumulation that sums mean losses without dividing them by the number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.accumulation import accumulations, is_named_so, is_normalised
from plimsoll.diagnose.lint.helpers.source import Hit, Source


def hits(source: Source) -> Iterator[Hit]:
    """Find gradient accumulation whose loss is never divided."""
    done = {found.loop for found in accumulations(source) if is_normalised(source, found)}
    for found in accumulations(source):
        if found.backward.divides or (found.condition is None and not is_named_so(source, found)):
            continue
        if found.loop not in done:
            yield Hit(
                found.backward.call,
                "the gradients of several micro-batches are summed, and no loss is divided by their number",
                "write `(loss / accumulation_steps).backward()`, or weight each by its share of the tokens",
            )
