"""`torch.load` that puts tensors on the device from which they were saved. That device may be full, or missing."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source, keyword


def hits(source: Source) -> Iterator[Hit]:
    """Find calls of `torch.load` that specify neither a device nor memory mapping."""
    for call in source.calls:
        if source.dotted(call.func) not in ("torch.load", "torch.serialization.load"):
            continue
        is_open = any(one.arg is None for one in call.keywords)  # **kwargs
        if len(call.args) > 1 or is_open or keyword(call, "map_location") or keyword(call, "mmap"):
            continue
        yield Hit(
            call,
            "tensors are loaded onto the device they were saved from, in addition to the model's",
            'write torch.load(path, map_location="cpu", mmap=True, weights_only=True)',
        )
