"""Linear weights quantized with torchao, either while a dense checkpoint is read, or loaded from a quantized folder.

Quantized while reading: ``int8`` is torchao's ``Int8WeightOnlyConfig`` with a scale for each row. ``int4`` is
weight-only with a scale for each 32 weights of a row. On the CPU it is a prototype of torchao 0.18
(``PrototypeInt4WeightOnlyConfig``), whose kernels are in torch. Because no scale spans several rows, rows are quantized
block by block. The whole dense weight is never in memory, and the result is bitwise equal to quantizing it as a whole.

Loaded: a folder whose ``quantization_config`` names torchao. The loaded model can be saved again.

Not handled: creating ``int4`` on other devices, layers other than ``nn.Linear`` (GPT-2 has ``Conv1D``), and weights
quantized by other libraries. The dtype, vocabulary and adapters of a quantized folder cannot be changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from plimsoll.errors import WeightsError
from plimsoll.weights.coded_layers import compute_in_parts, decode_rows_only
from plimsoll.weights.int4 import INT4_ROWS, PLAIN, packed_of
from plimsoll.weights.loading import Checkpoint, Coded, Entry
from plimsoll.weights.torchao_layers import SMALLEST_INT4_GROUP, int8_config, quantized, saved_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


Quantize = Literal["int8", "int4"]

_BLOCK_NUMBERS = 1 << 20  # numbers quantized at once; torchao makes several temporaries of four bytes for each
_BLOCK_ROWS = 64  # rows that torch's kernel packs together


def can_be_quantized(module: nn.Module, kind: Quantize) -> bool:
    """Return whether the weight of a layer can be quantized to ``kind``."""
    if type(module) is not nn.Linear:
        return False
    return kind == "int8" or (module.in_features % SMALLEST_INT4_GROUP == 0 and module.out_features % INT4_ROWS == 0)


def quantized_weight(
    entry: Entry, dtype: torch.dtype, kind: Quantize, device: torch.device, report: Callable[[int], None]
) -> Tensor:
    """Read and quantize the weight of a linear layer.

    Args:
        entry: the checkpoint entry of the weight, with two dimensions.
        dtype: the dtype that the layer computes in.
        kind: the integers to quantize to.
        device: the device of the weight.
        report: called with the number of bytes read.

    Raises:
        WeightsError: if torchao is missing, ``kind`` is impossible on the device, or the file cannot be read.
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
        example = quantized(dense, config)
        for name in example.__tensor_flatten__()[0]:
            _put(parts, name, getattr(example, name), begin, num_rows)
    _, facts = example.__tensor_flatten__()
    if "shape" in facts:
        facts = {**facts, "shape": torch.Size(entry.shape)}
    made: Tensor = type(example).__tensor_unflatten__(parts, facts, entry.shape, (width, 1))
    return made


def _put(parts: dict[str, Tensor], name: str, part: Tensor, begin: int, num_rows: int) -> None:
    """Copy ``part``, the rows from ``begin`` on, into ``parts[name]``, which holds all ``num_rows`` rows.

    ``parts[name]`` is created if it is missing. Rows are in dimension 0; for int4 scales, in dimension 1.
    """
    dim = 1 if name == "scale_and_zero" else 0
    if name not in parts:
        shape = [*part.shape]
        shape[dim] = num_rows
        parts[name] = torch.empty(shape, dtype=part.dtype, device=part.device)
    parts[name].narrow(dim, begin, part.shape[dim]).copy_(part)


def _config_of(kind: Quantize, device: torch.device) -> Any:
    try:
        if kind == "int8":
            return int8_config()
        if device.type != "cpu":
            raise WeightsError(f"int4 weights cannot be made on device {device}: use int8, or load on the CPU")
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=SMALLEST_INT4_GROUP, set_inductor_config=False)
    except ImportError as error:
        raise WeightsError(
            f"quantize {kind} needs torchao ({error}): install it with `pip install torch-plimsoll[quantize]`"
        ) from None


_METHOD = "torchao"


def without_quantization(config: PreTrainedConfig, checkpoint: Checkpoint) -> tuple[PreTrainedConfig, Any | None]:
    """Return the configuration of the dense model, and the quantization settings removed from it.

    The dense model is built first. The settings are ``None`` if the checkpoint is not quantized.

    Raises:
        WeightsError: if a library other than torchao quantized the checkpoint, or its files hold no weights of torchao.
    """
    said = getattr(config, "quantization_config", None)
    if said is None:
        return config, None
    fields = said if isinstance(said, dict) else said.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    if method != _METHOD or not checkpoint.coded:
        raise WeightsError(
            f"{checkpoint.folder} is quantized already (by {method}, with {len(checkpoint.coded)} weights of torchao "
            "in its files): give the original checkpoint"
        )
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain, fields


def refuse_changes(checkpoint: Checkpoint, config: PreTrainedConfig, **asked: Any) -> None:
    """Check that a request to load a quantized folder does not need the dense weights.

    Raises:
        WeightsError: if a value in ``asked`` is set, except a ``dtype`` equal to the folder's.
    """
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    for name, value in asked.items():
        is_same = name == "dtype" and str(value).removeprefix("torch.") == stored
        if value and not is_same:
            raise WeightsError(
                f"{checkpoint.folder} is quantized already ({len(checkpoint.coded)} weights, which compute in "
                f"{stored}), and cannot be loaded with {name} {value}: leave it out, or give the "
                "original checkpoint"
            )


def coded_value(coded: Coded, device: torch.device, part_of: Callable[[Entry], Tensor]) -> Tensor:
    """Build a quantized weight from its components, which ``part_of`` loads.

    The device decides the layout of the weight; ``meta`` counts as the CPU.
    """
    made = coded.make(part_of)
    return packed_of(made) if type(made).__name__ == PLAIN and device.type in ("cpu", "meta") else made


def make_coded(model: PreTrainedModel, said: dict[str, Any] | None) -> None:
    """Mark a model with torchao weights as quantized, and install layers that compute with little memory.

    ``said``: the quantization settings of the checkpoint; ``None``: it is not quantized, and nothing is done.
    """
    if said is None:
        return
    from transformers import TorchAoConfig

    fields = {name: value for name, value in said.items() if name != "quant_method"}
    config = TorchAoConfig.from_dict(fields)  # type: ignore[no-untyped-call]
    quantized: Any = model
    quantized.config.quantization_config = config
    quantized.hf_quantizer = saved_by(config)
    decode_rows_only(model)
    compute_in_parts(model)
