"""What an LSTM layer of oneDNN keeps for its backward pass on the CPU: a workspace that its fake version leaves out.

Source: ``src/cpu/rnn/rnn_utils.{hpp,cpp}`` of oneDNN 3.x (``set_workspace_sizes``, ``set_offsets``, ``get_good_ld``):
the gates and hidden states of every step, the states and their gradients of one step and one layer more, each from a
page of its own. torch calls oneDNN once per layer and direction. Checked against torch 2.13 on x86-64 in the tests.

These are the bytes of the tensor; a part of them is never written, so less is resident (`cpu_scratch`). It does NOT
hold for other libraries (Arm Compute Library).
"""

from __future__ import annotations

from typing import Any

import torch

_PAGE_BYTES, _LINE_BYTES = 4096, 64


def workspace_bytes(num_steps: int, batch_size: int, num_inputs: int, hidden_size: int, element_bytes: int) -> int:
    """Count the workspace of one layer in one direction; gradients of states are float32 in any precision."""
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
    return sum(_rounded(part_bytes, _PAGE_BYTES) for part_bytes in parts)


def with_workspace(result: Any, args: tuple[Any, ...]) -> Any:
    """Let a layer's fake forward keep what the real one keeps."""
    if not torch.is_grad_enabled():
        return *result[:3], None
    data, hidden = args[0], args[5]
    num_steps, batch_size, num_inputs = data.shape
    size = workspace_bytes(num_steps, batch_size, num_inputs, hidden.shape[-1], data.element_size())
    return *result[:3], data.new_empty(size, dtype=torch.uint8)


def with_separate_biases(result: Any, args: tuple[Any, ...]) -> Any:
    """Let the gradients of a layer's two biases be two tensors."""
    return *result[:4], torch.empty_like(result[3]), *result[5:]


def _leading(num_elements: int, element_bytes: int) -> int:
    """The elements of a row, which fills cache lines and is no multiple of 256."""
    per_line = _LINE_BYTES // element_bytes
    rounded = _rounded(num_elements, per_line)
    return rounded + per_line if rounded % 256 == 0 else rounded


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
