"""Workspace of oneDNN's LSTM layer, saved for backward on the CPU and missing from torch's fake version.

Source: ``src/cpu/rnn/rnn_utils.{hpp,cpp}`` of oneDNN 3.x (``set_workspace_sizes``, ``set_offsets``, ``get_good_ld``).
The workspace contains the gates and hidden states of every step, and the states and their gradients for one more step
and layer. Each part begins on a new page. torch calls oneDNN once per layer and direction. The tests check the sizes
against torch 2.13 on x86-64.

These are allocated bytes. Some of these bytes are never written, so fewer are resident. A left-to-right layer uses
its input and output in place (``skip_src_layer_copy``, ``skip_dst_layer_copy``), and a right-to-left layer copies both.
The workspace has cell states for two layers, but forward writes only the cell states of one. Likewise, backward writes
the state gradients of only one. The written pages of the tensor were measured around each call, for five shapes in
float32 and bfloat16 (AVX-512, oneDNN 3.12). The rules agree with them to 0.2 MiB.

Does NOT apply to other libraries (Arm Compute Library).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_PAGE_BYTES, _LINE_BYTES = 4096, 64


class _Parts(NamedTuple):
    """Size in bytes of each part of a workspace. All parts except ``gates`` and ``hidden`` are for two layers."""

    gates: int
    hidden: int
    states: int
    cells: int
    layer_gradients: int
    step_gradients: int
    cell_gradients: int


def workspace_bytes(num_steps: int, batch_size: int, num_inputs: int, hidden_size: int, element_bytes: int) -> int:
    """Return the workspace bytes of one layer in one direction. Gradients of states are float32 in any precision."""
    return sum(_parts(num_steps, batch_size, num_inputs, hidden_size, element_bytes))


def unwritten_workspace(args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
    """Return the workspace of a forward call and its bytes that are never written; ``None`` without workspace."""
    workspace = result[3]
    if workspace is None:
        return None
    parts, is_reverse = _parts_of(args), args[7]
    written_bytes = parts.gates + parts.cells // 2 + (parts.states if is_reverse else 0)
    return workspace, sum(parts) - written_bytes


def written_in_backward_bytes(args: tuple[Any, ...]) -> int:
    """Return the workspace bytes that backward writes and forward has not written."""
    parts = _parts_of(args)
    return parts.layer_gradients + (parts.step_gradients + parts.cell_gradients) // 2


def with_workspace(result: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of the fake forward of a layer with the workspace that the real one saves for backward.

    If gradients are disabled, the workspace is ``None``.
    """
    if not torch.is_grad_enabled():
        return *result[:3], None
    return *result[:3], args[0].new_empty(sum(_parts_of(args)), dtype=torch.uint8)


def with_separate_biases(result: Any, args: tuple[Any, ...]) -> Any:
    """Make the gradients of a layer's two biases separate tensors."""
    return *result[:4], torch.empty_like(result[3]), *result[5:]


def _parts_of(args: tuple[Any, ...]) -> _Parts:
    """Return the parts for the arguments of ``mkldnn_rnn_layer(input, w_ih, w_hh, ...)`` or of its backward."""
    num_steps, batch_size, num_inputs = args[0].shape
    return _parts(num_steps, batch_size, num_inputs, args[2].shape[1], args[0].element_size())


def _parts(num_steps: int, batch_size: int, num_inputs: int, hidden_size: int, element_bytes: int) -> _Parts:
    cells, states = num_steps * batch_size, 2 * (num_steps + 1) * batch_size
    widest = max(num_inputs, hidden_size)
    parts = (
        cells * _leading(4 * hidden_size, element_bytes) * element_bytes,
        cells * _leading(hidden_size, element_bytes) * element_bytes,
        states * _leading(widest, element_bytes) * element_bytes,
        states * hidden_size * element_bytes,
        states * _leading(widest, 4) * 4,
        states * _leading(widest, 4) * 4,
        states * hidden_size * 4,
    )
    return _Parts(*(_rounded(part_bytes, _PAGE_BYTES) for part_bytes in parts))


def _leading(num_elements: int, element_bytes: int) -> int:
    """Return the padded length of a matrix row in elements: whole cache lines, but not a multiple of 256 elements."""
    per_line = _LINE_BYTES // element_bytes
    rounded = _rounded(num_elements, per_line)
    return rounded + per_line if rounded % 256 == 0 else rounded


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
