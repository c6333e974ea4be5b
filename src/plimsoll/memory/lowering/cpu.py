"""The CPU as target: what is traced is what runs, but for packed sequences, which cannot be traced as they are, and for
kernels whose results are larger or smaller than torch says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from plimsoll.memory.lowering.base import (
    LINEAR,
    NO_SCRATCH,
    Note,
    Run,
    Scratch,
    fake_modules_can_be_converted,
    foreach_as_on,
    kernels_replaced,
    tensors_of,
)
from plimsoll.memory.lowering.cpu_kernels import corrected
from plimsoll.memory.lowering.cpu_scratch import scratch_bytes
from plimsoll.memory.lowering.mkldnn_rnn import unwritten_workspace
from plimsoll.memory.lowering.packed_rnn import PACKED_RNN
from plimsoll.memory.lowering.packing import PACKING
from plimsoll.memory.lowering.places import OnePlace

_LSTM_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


class CpuLowering:
    """`Lowering` onto the processor that traces."""

    name = "cpu"
    kind: Literal["cpu", "cuda"] = "cpu"
    device = "cpu"
    made = staticmethod(tensors_of)

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._names: dict[Any, str] = {}

    def loaded(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it is."""
        return tensor

    @contextmanager
    def active(self, note: Note) -> Iterator[None]:
        """Replace what reads the values of fake tensors."""
        with (
            foreach_as_on(("cuda", "xpu")),
            fake_modules_can_be_converted(),
            kernels_replaced({**LINEAR, **PACKING, **PACKED_RNN}),
            OnePlace(),
        ):
            yield

    def run_with(self, run: Run) -> Run:
        """Give results the size that the CPU's kernels give them."""
        return corrected(run)

    def on_host(self, tensor: Tensor) -> bool:
        """Return that there is one place only."""
        return False

    def unwritten(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Say how much of the workspace of an LSTM layer of oneDNN is never written."""
        return unwritten_workspace(args, result) if op is _LSTM_LAYER else None

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
        """Count what the kernel takes while it runs, beside its results: one size for all of it."""
        name = self._names.get(op)
        if name is None:
            name = self._names[op] = str(op)
        num_bytes = scratch_bytes(name, args, kwargs, self._num_threads)
        return Scratch((num_bytes,)) if num_bytes else NO_SCRATCH
