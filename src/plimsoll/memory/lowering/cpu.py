"""Lowering to the CPU: most ops run as traced.

Packed sequences are replaced because they cannot be traced directly. Results of some kernels are corrected because
their sizes differ from the fake ones.
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
    """`Lowering` to the processor that runs the trace."""

    name = "cpu"
    kind: Literal["cpu", "cuda"] = "cpu"
    device = "cpu"
    made = staticmethod(tensors_of)

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._names: dict[Any, str] = {}

    def loaded(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    @contextmanager
    def active(self, note: Note) -> Iterator[None]:
        """Replace ops that read values of fake tensors until the context exits."""
        with (
            foreach_as_on(("cuda", "xpu")),
            fake_modules_can_be_converted(),
            kernels_replaced({**LINEAR, **PACKING, **PACKED_RNN}),
            OnePlace(),
        ):
            yield

    def run_with(self, run: Run) -> Run:
        """Wrap the function that executes an op, so that results have the sizes of the CPU kernels."""
        return corrected(run)

    def on_host(self, tensor: Tensor) -> bool:
        """Return False, because the CPU has only one memory."""
        return False

    def unwritten(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Return the workspace of oneDNN's LSTM layer and its bytes that are never written; ``None`` for other ops."""
        return unwritten_workspace(args, result) if op is _LSTM_LAYER else None

    def scratch_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
        """Return the scratch memory of an op's kernel as a single block."""
        name = self._names.get(op)
        if name is None:
            name = self._names[op] = str(op)
        num_bytes = scratch_bytes(name, args, kwargs, self._num_threads)
        return Scratch((num_bytes,)) if num_bytes else NO_SCRATCH
