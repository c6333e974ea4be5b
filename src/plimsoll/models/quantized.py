"""The weight of a linear layer as integers of torchao, made as it is read: the dense weight is never there as a whole.

A block of rows is read and quantized after the other. Each row has scales of its own, so the integers are bitwise those
of torchao on the whole weight. ``int8`` is torchao's ``Int8WeightOnlyConfig`` (a scale for each row), ``int4`` its
weight-only 4 bits with a scale for each 32 numbers of a row; on the CPU that is a prototype of torchao 0.18
(``PrototypeInt4WeightOnlyConfig``), whose kernels are torch's own.

It does NOT cover ``int4`` on other devices, and layers other than ``nn.Linear`` (GPT-2 has ``Conv1D``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plimsoll.errors import WeightsError
from plimsoll.weights.loading import Entry

Quantize = Literal["int8", "int4"]

_BLOCK_NUMBERS = 1 << 20  # torchao makes several tensors of four bytes a number on the way
_BLOCK_ROWS = 64  # what torch's kernel packs together
_GROUP = 32
_INT4_ROWS = 16  # torch's kernel packs so many rows at once


def can_be_quantized(module: nn.Module, kind: Quantize) -> bool:
    """Whether a layer's weight can be of these integers."""
    if type(module) is not nn.Linear:
        return False
    return kind == "int8" or (module.in_features % _GROUP == 0 and module.out_features % _INT4_ROWS == 0)


def quantized_weight(
    entry: Entry, dtype: torch.dtype, kind: Quantize, device: torch.device, report: Callable[[int], None]
) -> Tensor:
    """Read and quantize the weight of a linear layer.

    Args:
        entry: where the weight is, of two dimensions.
        dtype: what the layer computes in.
        kind: of integers.
        device: where the weight is to be.
        report: told the bytes that were read.

    Raises:
        WeightsError: if torchao is not there or cannot do this on the device, or the file cannot be read.
    """
    config = _config_of(kind, device)
    num_rows, width = entry.shape
    step = max(_BLOCK_ROWS, _BLOCK_NUMBERS // max(1, width) // _BLOCK_ROWS * _BLOCK_ROWS)
    parts: dict[str, Tensor] = {}
    example: Any = None
    for begin in range(0, num_rows, step):
        rows = entry.rows(begin, min(num_rows, begin + step))
        dense = torch.empty(rows.shape, dtype=dtype, device=device)
        rows.read_into(dense, report)
        example = _quantized(dense, config)
        for name in example.__tensor_flatten__()[0]:
            _put(parts, name, getattr(example, name), begin, num_rows)
    _, facts = example.__tensor_flatten__()
    if "shape" in facts:
        facts = {**facts, "shape": torch.Size(entry.shape)}
    made: Tensor = type(example).__tensor_unflatten__(parts, facts, entry.shape, (width, 1))
    return made


def _put(parts: dict[str, Tensor], name: str, part: Tensor, begin: int, num_rows: int) -> None:
    """Put what belongs to some rows into the tensor of all; rows are the first dimension, or in int4 the second."""
    dim = 1 if name == "scale_and_zero" else 0
    if name not in parts:
        shape = [*part.shape]
        shape[dim] = num_rows
        parts[name] = torch.empty(shape, dtype=part.dtype, device=part.device)
    parts[name].narrow(dim, begin, part.shape[dim]).copy_(part)


def _quantized(dense: Tensor, config: Any) -> Tensor:
    from torchao.quantization import quantize_

    layer = nn.Linear(dense.shape[1], dense.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(dense, requires_grad=False)
    quantize_(layer, config)
    return layer.weight.data


def _config_of(kind: Quantize, device: torch.device) -> Any:
    try:
        if kind == "int8":
            from torchao.quantization import Int8WeightOnlyConfig

            return Int8WeightOnlyConfig(set_inductor_config=False)
        if device.type != "cpu":
            raise WeightsError(f"int4 is not made on device {device}: use int8, or load on the CPU")
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=_GROUP, set_inductor_config=False)
    except ImportError as error:
        raise WeightsError(
            f"quantize {kind} needs torchao ({error}): install it with `pip install torch-plimsoll[quantize]`"
        ) from None
