"""Models that ask whether they are being traced are told that they are not: they would take another way.

transformers (``utils.import_utils.is_tracing``, 5.x) asks whether a tensor is fake, and if so does not look at its
values: it builds the attention mask also where nothing is masked, and then takes another attention kernel. In a
dry run the values of masks and positions are known (`plimsoll.memory.known`), so the way of the real run is open.

A library counts if it is imported when the block begins. Where it has no such function there is nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MODULE, _NAME = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def untraced() -> Iterator[None]:
    """Let fake tensors pass for real ones; undone on exit."""
    module = sys.modules.get(_MODULE)
    asked = getattr(module, _NAME, None)
    if module is None or asked is None:
        yield
        return
    setattr(module, _NAME, lambda value: False)
    try:
        yield
    finally:
        setattr(module, _NAME, asked)
