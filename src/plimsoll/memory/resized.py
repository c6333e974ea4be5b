"""Storages that are resized in place, which no op says: how FSDP2 frees gathered parameters and takes them back.

Covers ``tensor.untyped_storage().resize_(...)``, whoever calls it from Python. Does NOT see ``tensor.resize_``, which
is an op, nor what C++ resizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``note`` with each storage that was resized while the block runs, in this process."""
    inherited = "resize_" not in vars(torch.UntypedStorage)
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = before(storage, num_bytes)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if inherited:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
