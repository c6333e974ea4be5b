"""Samples that a Dataset moves to the device one by one: unsafe in workers, and slower than from pinned memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.datasets import dataset_classes
from plimsoll.diagnose.lint.helpers.source import Hit, Source, keyword, last_name

_METHODS = {"__getitem__", "__getitems__", "__iter__"}
_DEVICE = re.compile(r"device|cuda|gpu", re.IGNORECASE)


def hits(source: Source) -> Iterator[Hit]:
    """Find moves to a device in the samples that a Dataset returns."""
    for owner in dataset_classes(source):
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name not in _METHODS:
                continue
            for call in source.own(method, ast.Call):
                if _moves(source, call):
                    yield Hit(
                        call,
                        "each sample is copied to the device separately, and each worker makes a CUDA context",
                        "return CPU tensors and move the whole batch in the training loop, with pin_memory=True",
                    )


def _moves(source: Source, call: ast.Call) -> bool:
    name = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and name == "cuda":
        return not source.dotted(call.func).startswith("torch.")
    given = [*call.args[:1], keyword(call, "device")] if name == "to" else [keyword(call, "device")]
    return any(one is not None and _is_device(source, one) for one in given)


def _is_device(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith(("cuda", "mps", "xpu"))
    if isinstance(node, ast.Call) and source.dotted(node.func) == "torch.device":
        return bool(node.args) and _is_device(source, node.args[0])
    return bool(_DEVICE.search(last_name(node)))
