"""Which line of the user's made a storage, by its address: for as long as it lives it is the last that was made there.

Seen below autograd are the results of ops of 64 KiB and more that share no storage with what the op was given. Each op
costs a walk over the frames, some 10 to 20 microseconds, so it is for a search and not for every training. Gradients on
CUDA are made in another thread and are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.memory.accumulate import accumulating_in_place

_LEAST_BYTES = 64 << 10
_MOST_ADDRESSES = 200_000


class Births(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes lines while it is active; ``line_of`` is asked for the line of a frame and its callers."""

    def __init__(self, line_of: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[int, str] = {}
        self._line_of = line_of
        self._run = accumulating_in_place(lambda op, args, kwargs: op(*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an op and note what it made."""
        result = self._run(func, args, kwargs or {})
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor) and one.layout is torch.strided:
                self._note(one, args)
        return result

    def _note(self, made: Tensor, args: tuple[Any, ...]) -> None:
        storage = made.untyped_storage()
        if storage.nbytes() < _LEAST_BYTES:
            return
        address = storage.data_ptr()
        given = (one for one in args if isinstance(one, Tensor) and one.layout is torch.strided)
        if any(one.untyped_storage().data_ptr() == address for one in given):
            return
        if len(self.lines) >= _MOST_ADDRESSES:
            self.lines.pop(next(iter(self.lines)))
        self.lines[address] = self._line_of()
