"""What an LSTM layer of oneDNN keeps for its backward pass on the CPU: a workspace that its fake version leaves out.

Source: ``src/cpu/rnn/rnn_utils.{hpp,cpp}`` of oneDNN 3.x (``set_workspace_sizes``, ``set_offsets``, ``get_good_ld``):
the gates and hidden states of every step, the states and their gradients of one step and one layer more, each from a
page of its own. torch calls oneDNN once per layer and direction. Checked against torch 2.13 on x86-64 in the tests.

Those are the bytes of the tensor; a part of them is never written, so that less is resident. The layer that reads from
left to right reads its input and writes its output where they are (``skip_src_layer_copy``, ``skip_dst_layer_copy``),
the other copies both. Of two layers' cell states one is written, in the backward pass likewise. Counted as pages of the
tensor around each call, five shapes, float32 and bfloat16, to 0.2 MiB (AVX-512, oneDNN 3.12).

It does NOT hold for other libraries (Arm Compute Library).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_PAGE_BYTES, _LINE_BYTES = 4096, 64


class _Parts(NamedTuple):
    """The bytes of each part of a workspace; states and cells are those of two layers."""

    gates: int
    hidden: int
    states: int
    cells: int
    layer_gradients: int
    step_gradients: int
    cell_gradients: int


def workspace_bytes(num_steps: int, batch_size: int, num_inputs: int, hidden_size: int, element_bytes: int) -> int:
    """Count the workspace of one layer in one direction; gradients of states are float32 in any precision."""
    return sum(_parts(num_steps, batch_size, num_inputs, hidden_size, element_bytes))


def unwritten_workspace(args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
    """Of the arguments and results of a layer's forward: its workspace and what is not written of it, if it has one."""
    workspace = result[3]
    if workspace is None:
        return None
    parts, is_reverse = _parts_of(args), args[7]
    written_bytes = parts.gates + parts.cells // 2 + (parts.states if is_reverse else 0)
    return workspace, sum(parts) - written_bytes


def written_in_backward_bytes(args: tuple[Any, ...]) -> int:
    """Count what a layer's backward, given its arguments, writes of the workspace that its forward left as it was."""
    parts = _parts_of(args)
    return parts.layer_gradients + (parts.step_gradients + parts.cell_gradients) // 2


def with_workspace(result: Any, args: tuple[Any, ...]) -> Any:
    """Let a layer's fake forward keep what the real one keeps."""
    if not torch.is_grad_enabled():
        return *result[:3], None
    return *result[:3], args[0].new_empty(sum(_parts_of(args)), dtype=torch.uint8)


def with_separate_biases(result: Any, args: tuple[Any, ...]) -> Any:
    """Let the gradients of a layer's two biases be two tensors."""
    return *result[:4], torch.empty_like(result[3]), *result[5:]


def _parts_of(args: tuple[Any, ...]) -> _Parts:
    """Of ``mkldnn_rnn_layer(input, w_ih, w_hh, ...)``; the backward begins with the same tensors."""
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
    """The elements of a row, which fills cache lines and is no multiple of 256."""
    per_line = _LINE_BYTES // element_bytes
    rounded = _rounded(num_elements, per_line)
    return rounded + per_line if rounded % 256 == 0 else rounded


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
