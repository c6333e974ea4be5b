"""Linear weights in 8 bits with a floating point (torchao's ``Float8WeightOnlyConfig``), or computing in them.

``dynamic=true`` has inputs in float8 too and multiplies in it, which needs a GPU of compute capability 8.9 (Ada,
Hopper); without it weights are decoded in every pass, as those of ``int8`` are. Does NOT cover the head and
embeddings.
"""

from __future__ import annotations

import torch

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.torchao_layers import Config, plain_layers, quantize_layers, why_not_linear

_LEAST_CAPABILITY = (8, 9)


class Float8(Shrinker):
    """See the module."""

    name = "float8"
    saves = (
        "the file and the memory of the linear weights fall to a quarter of float32; a pass is faster only with "
        "dynamic=true on a GPU that multiplies in float8, and slower elsewhere, where a layer is decoded whole while "
        "it computes and the peak falls by less than the weights; it cannot be trained"
    )
    tried = ({"dynamic": True},)  # without a device for it int8 is as small and closer

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse ``dynamic`` without a device for it, models without linear layers, and what torchao cannot do."""
        fault = why_not_linear(bundle.model, self.name)
        if fault is None and _is_dynamic(choice) and not _multiplies_in_float8():
            return (
                f"{choice.in_full} multiplies in float8, which needs a GPU of compute capability "
                f"{'.'.join(map(str, _LEAST_CAPABILITY))} or more, and there is none here: use int8, which is as small "
                "and closer to the weights, or float8(dynamic=false), which decodes them in every pass"
            )
        return fault

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Quantize the linear layers of the base model."""
        quantize_layers(bundle.model, [*plain_layers(bundle.model)], _config(_is_dynamic(choice)))


def _is_dynamic(choice: Choice) -> bool:
    return bool(options_of(choice)["dynamic"])


def _multiplies_in_float8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def _config(is_dynamic: bool) -> Config:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig

    made = Float8DynamicActivationFloat8WeightConfig if is_dynamic else Float8WeightOnlyConfig
    return made(set_inductor_config=False)
