"""Every text is padded to the maximum length, so that short texts take as much memory and time as the longest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, is_constant, last_name

_NOT_TOKENIZERS = {"add_argument", "Field", "field", "dict", "Argument", "Option"}


def hits(source: Source) -> Iterator[Hit]:
    """Find `padding="max_length"` and `pad_to_max_length=True` in calls, and `enable_padding(length=...)`."""
    for call in source.calls:
        if last_name(call.func) in _NOT_TOKENIZERS:
            continue
        for given in call.keywords:
            is_new = given.arg == "padding" and _is_maximum(source, given.value)
            is_old = given.arg == "pad_to_max_length" and is_constant(given.value, True)
            is_fixed = last_name(call.func) == "enable_padding" and given.arg == "length"
            is_of_tokenizers = is_fixed and not is_constant(given.value, None)
            if (is_new or is_old or is_of_tokenizers) and not _has_fixed_shapes(source, call):
                yield Hit(
                    given,
                    "every text is padded to the maximum length: short texts cost as much as the longest",
                    "pad in the collate function to the longest of the batch (transformers.DataCollatorWithPadding)",
                )


def _is_maximum(source: Source, node: ast.expr) -> bool:
    """Return whether an expression is ``"max_length"`` or a constant of the module with this value."""
    if isinstance(node, ast.Name):
        given = source.assignments(source.tree, node.id)
        return len(given) == 1 and given[0].place is None and is_constant(given[0].value, "max_length")
    return is_constant(node, "max_length")


def _has_fixed_shapes(source: Source, call: ast.Call) -> bool:
    """Return whether a call is under a test for a device such as a TPU.

    Such a device compiles a program for each shape, so padding to a fixed length is right.
    """
    tests = [above.test for above in source.ancestors(call) if isinstance(above, ast.If | ast.IfExp)]
    return any(re.search(r"xla|tpu|hpu|neuron", source.written(test), re.IGNORECASE) for test in tests)
