"""Corrections for CPU kernels whose results differ in size from torch's fake versions.

The differences were found by running ops on real and on fake tensors (``benchmarks/predict_live_cpu.py``, torch 2.13).
The sources of the kernels are in ``aten/src/ATen/native``. No other differences are known; `plimsoll.memory.compare`
would show them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plimsoll.memory.lowering.base import Run
from plimsoll.memory.lowering.mkldnn_rnn import with_separate_biases, with_workspace

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_Correct = Callable[[Any, tuple[Any, ...]], Any]
"""``(result, args) -> result`` as the kernel returns it."""


def corrected(run: Run) -> Run:
    """Wrap the function that executes an op, so that its results have the sizes of the CPU kernel's results."""

    def run_as_on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(op, args, kwargs)
        correct = _CORRECTIONS.get(op)
        return result if correct is None else correct(result, args)

    return run_as_on_cpu


def _statistics_in_float32(result: Any, args: tuple[Any, ...]) -> Any:
    # For half-precision input with float32 weights, norms keep mean and deviation in float32 (``mixed_data_type.h``,
    # `param_scalar_type`); the fake versions use the input's type.
    data, parameters = args[0], [arg for arg in args[1:] if isinstance(arg, Tensor)]
    is_mixed = data.dtype in _HALF and any(parameter.dtype is torch.float32 for parameter in parameters)
    if not is_mixed:
        return result
    normalized, *statistics = result
    return normalized, *(statistic.new_empty(statistic.shape, dtype=torch.float32) for statistic in statistics)


def _norms_in_float32(result: Any, args: tuple[Any, ...]) -> Any:
    # For float16, the norms are float32 (``WeightNorm.cpp``).
    weight, norms = result
    return weight, norms.new_empty(norms.shape, dtype=torch.float32) if norms.dtype is torch.float16 else norms


def _in_the_memory_of_the_losses(result: Any, args: tuple[Any, ...]) -> Any:
    # A mean or sum is reduced into the tensor of all elements' losses, whose storage keeps its size (``Loss.cpp``).
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return result if result.dim() else result.new_empty(shape).resize_(())


def _gradient_like_the_input(result: Any, args: tuple[Any, ...]) -> Any:
    # For half-precision input, the gradient has the input's type (``group_norm.cpp``), not float32.
    gradient, *others = result
    if gradient is not None and gradient.dtype is not args[1].dtype:
        gradient = gradient.new_empty(gradient.shape, dtype=args[1].dtype)
    return gradient, *others


def _bags_counted(result: Any, args: tuple[Any, ...]) -> Any:
    # One additional element to count bags, and none if rows in bfloat16 are summed in one pass (``EmbeddingBag.cpp``).
    output, bag_of_each, bag_sizes, largest = result
    defaults = (None, None, None, False, 0, False, None, False, -1)
    mode, includes_last, padding_index = ((*args, *defaults[len(args) :])[place] for place in (4, 7, 8))
    if mode == 0 and padding_index < 0 and args[0].dtype is torch.bfloat16:
        bag_of_each = bag_of_each.new_empty(0)
    num_indices = len(bag_of_each)
    if num_indices:
        bag_of_each = bag_of_each.new_empty(num_indices + 1)[:num_indices]
    if includes_last:
        bag_sizes = bag_sizes.new_empty(len(bag_sizes) + 1)[: len(bag_sizes)]
    return output, bag_of_each, bag_sizes, largest


_CORRECTIONS: dict[Any, _Correct] = {
    **dict.fromkeys(
        (
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
        ),
        _statistics_in_float32,
    ),
    aten._weight_norm_interface.default: _norms_in_float32,
    aten.native_group_norm_backward.default: _gradient_like_the_input,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.binary_cross_entropy.default,
            aten.soft_margin_loss.default,
        ),
        _in_the_memory_of_the_losses,
    ),
    aten._embedding_bag.default: _bags_counted,
    aten.mkldnn_rnn_layer.default: with_workspace,
    aten.mkldnn_rnn_layer_backward.default: with_separate_biases,
}
