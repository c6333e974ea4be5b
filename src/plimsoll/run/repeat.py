"""Whether a pass can be done again: the first one runs twice from the same state, and must come to the same.

An out-of-memory error is survived by doing a step again from where it began. That is right only if all state that the
step reads is put back (`plimsoll.run.undo`), and who looks for state may overlook some. So before the first step goes
on, its first micro-batch goes forward and backward, everything is put back, and it goes again: loss, gradients and what
the pass has written must be the same. What differs beyond rounding has state that nobody sees; the modules in which it
enters are found by two more passes.

Kernels that add in any order (atomics, on a GPU) give another rounding each time; that is let through and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_MOST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_MOST_NAMES = 3


class Print(NamedTuple):
    """What a tensor holds, without a copy of it: a hash of its bits, and its norm."""

    bits: int
    norm: float


def print_of(tensor: Tensor) -> Print:
    """Take a print, in no more memory than two numbers."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.coalesce().values()
    if not dense.is_floating_point():
        return Print(int(torch.hash_tensor(dense)), 0.0)
    return Print(int(torch.hash_tensor(dense)), float(torch.linalg.vector_norm(dense, dtype=torch.float32)))


class Repeat:
    """Runs the first micro-batch of a training twice, and knows what came of it.

    Attributes:
        reason: why no step can be done again, or ``None``.
        is_exact: whether both passes had the same bits; ``None`` before the first.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.reason: str | None = None
        self.is_exact: bool | None = None
        self._parameters = parameters

    def check(self, one_pass: Callable[[], Tensor], put_back: Callable[[], None], model: nn.Module) -> None:
        """Compare two passes from the state of now, which ``put_back`` goes back to; it is as before afterwards.

        Args:
            one_pass: forward and, where gradients are compared, backward of one micro-batch; returns the loss.
            put_back: puts back all that a pass changes, gradients too.
            model: whose modules are named where the passes differ.
        """
        first, second = self._prints(one_pass, put_back), self._prints(one_pass, put_back)
        self.is_exact = [one.bits for one in first] == [other.bits for other in second]
        if self.is_exact or all(map(_is_rounding, first, second, strict=True)):
            return
        with _noting_outputs(model) as outputs:
            kept = []
            for _ in range(2):
                self._prints(one_pass, put_back)
                kept.append(dict(outputs))
                outputs.clear()
        self.reason = _said(first[0], second[0], _names_of_differing(*kept))
