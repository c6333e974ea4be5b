"""Linear weights in 4 bits, with a scale and a zero point per group of a row (``group=32``, 64 or 128).

On the CPU, torchao's prototype computes with these weights (``PrototypeInt4WeightOnlyConfig``, torchao 0.18; the kernel
is torch's). They are saved as the tensors of torchao's ``Int4WeightOnlyConfig`` (see `plimsoll.weights.int4` for the
reason). The kernel is fast in bfloat16 and some fifty times slower in float32, so the whole model is cast to bfloat16.
``compute=fp32`` keeps float32, to reproduce the results of training with ``quantization_aware``.

Not handled: the head, embeddings, and layers with sizes that the kernel does not support. They stay dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.int4 import INT4_ROWS, packed_int4
from plimsoll.weights.parts import cast_saved, is_made_of_parts
from plimsoll.weights.structure import note, sizes_of
from plimsoll.weights.torchao_layers import (
    SMALLEST_INT4_GROUP,
    Config,
    int4_layers,
    plain_layers,
    replace_weights,
    why_not_linear,
)

_COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LARGEST_GROUP = 128


class Int4(Shrinker):
    """Quantization of linear weights to 4 bits."""

    name = "int4"
    saves = (
        "linear weights take a sixth of float32 (0.62 bytes per weight in groups of 32, 0.53 in groups of 128) and "
        "all other weights half (bfloat16), in the file and in memory; inference on a CPU is slower than in dense "
        "bfloat16; without Plimsoll the model runs only on a GPU; it cannot be trained"
    )
    tried = ({"group": SMALLEST_INT4_GROUP}, {"group": _LARGEST_GROUP})
    easiest = 0

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why weights cannot be quantized, for example if the group size suits no layer; else ``None``."""
        fault = why_not_linear(bundle.model, self.name)
        if fault is not None:
            return fault
        group = _group(choice)
        if not int4_layers(bundle.model, group):
            sizes = sorted({tuple(sizes_of(one)) for one in plain_layers(bundle.model).values()})
            shown = ", ".join(f"{width} x {rows}" for width, rows in sizes[:3])
            fault = (
                f"{choice.in_full}: no linear layer has a multiple of {group} inputs and a multiple of {INT4_ROWS} "
                f"outputs ({shown}): use int8"
            )
        fault = fault or _decodes_to_another(bundle.model, choice)
        device = next(bundle.model.parameters()).device.type
        if fault is None and device not in ("cpu", "meta"):
            fault = f"{choice.in_full} quantizes on the CPU, but the model is on {device}: move it, or use int8"
        return fault

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the linear layers of the base model that the kernel supports."""
        group = _group(choice)
        cast_saved(bundle.model, _COMPUTE[_compute(choice)])
        names = int4_layers(bundle.model, group)
        replace_weights(bundle.model, names, _config(group), lambda weight: packed_int4(weight, group))
        for name in names:
            note(bundle.model, "gpu_only", name)


def _decodes_to_another(model: nn.Module, choice: Choice) -> str | None:
    """Return a sentence if an already quantized weight is decoded to another data type than ``compute``."""
    wanted = _COMPUTE[_compute(choice)]
    others = {name: one.dtype for name, one in model.named_parameters() if is_made_of_parts(one)}
    for name, dtype in others.items():
        if dtype != wanted:
            known = [f"give compute={word}" for word, one in _COMPUTE.items() if one == dtype]
            decoded = str(dtype).removeprefix("torch.")
            remedy = " or ".join([*known, "use int4 alone"])
            return f"{choice.in_full}: {name} is already quantized and decodes to {decoded}: {remedy}"
    return None


def _group(choice: Choice) -> int:
    group: Any = options_of(choice)["group"]
    return int(group)


def _compute(choice: Choice) -> str:
    return str(options_of(choice)["compute"])


def _config(group: int) -> Config:
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=group, set_inductor_config=False)
