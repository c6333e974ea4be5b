"""A checkpoint folder whose weights torchao has quantized already, read as it is: the integers, never the dense weight.

Transformers says what such a folder is in ``quantization_config``. The model is built as if it were dense, each of its
weights is then made of its parts in the file (`plimsoll.weights.loading.coded`), and in the end it says again that it
is quantized, so that it can be saved as it was. Tables of embeddings decode only the rows that are looked up, and
layers whose inputs are quantized too take some rows after the other.

It does NOT cover what other libraries quantized, and does not change what is quantized: not its type, its vocabulary,
its adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plimsoll.errors import WeightsError
from plimsoll.weights.coded_embedding import decode_rows_only
from plimsoll.weights.int4 import PLAIN, packed_of
from plimsoll.weights.linear_in_parts import compute_in_parts
from plimsoll.weights.loading import Checkpoint, Coded, Entry
from plimsoll.weights.saved_by import saved_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_METHOD = "torchao"


def without_quantization(config: PreTrainedConfig, checkpoint: Checkpoint) -> tuple[PreTrainedConfig, Any | None]:
    """Return a configuration of the dense model, and what was said of how it is quantized, ``None`` if nothing.

    Raises:
        WeightsError: if it is quantized by something else than torchao, or its files hold none of that.
    """
    said = getattr(config, "quantization_config", None)
    if said is None:
        return config, None
    fields = said if isinstance(said, dict) else said.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    if method != _METHOD or not checkpoint.coded:
        raise WeightsError(
            f"{checkpoint.folder} is quantized already (by {method}, with {len(checkpoint.coded)} weights of torchao "
            "in its files): give the checkpoint it was made of"
        )
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain, fields


def refuse_changes(checkpoint: Checkpoint, config: PreTrainedConfig, **asked: Any) -> None:
    """Refuse what would need the dense weights.

    Raises:
        WeightsError: if something is asked for that a quantized folder cannot have.
    """
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    for name, value in asked.items():
        is_same = name == "dtype" and str(value).removeprefix("torch.") == stored
        if value and not is_same:
            raise WeightsError(
                f"{checkpoint.folder} is quantized already ({len(checkpoint.coded)} weights, which compute in "
                f"{stored}), and cannot be loaded with {name} {value}: leave it out, or give the checkpoint it "
                "was made of"
            )


def coded_value(coded: Coded, device: torch.device, part_of: Callable[[Entry], Tensor]) -> Tensor:
    """Make a weight of its parts, for a device (``meta``: for its sizes on the CPU)."""
    made = coded.make(part_of)
    return packed_of(made) if type(made).__name__ == PLAIN and device.type in ("cpu", "meta") else made


def make_coded(model: PreTrainedModel, said: dict[str, Any] | None) -> None:
    """Have a model that was filled with weights of torchao say so, and compute in as little as it can."""
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
