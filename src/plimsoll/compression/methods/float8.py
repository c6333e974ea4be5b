"""Linear weights in 8-bit floating point (torchao's ``Float8WeightOnlyConfig``).

With ``dynamic=true``, inputs are in float8 too, and so is the multiplication. This needs a GPU of compute capability
8.9 or more (Ada, Hopper). With ``dynamic=false``, weights are decoded in every pass, as with ``int8``. Not handled: the
head and embeddings.
"""

from __future__ import annotations

import torch

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.torchao_layers import Config, plain_layers, quantize_layers, why_not_linear

_LEAST_CAPABILITY = (8, 9)


class Float8(Shrinker):
    """Quantization of linear weights to float8."""

    name = "float8"
    saves = (
        "linear weights take a quarter of float32, in the file and in memory; inference is faster only with "
        "dynamic=true on a GPU with float8 arithmetic; otherwise it is slower, and each layer is decoded when it "
        "runs, so the peak shrinks less than the weights; the model cannot be trained"
    )
    tried = ({"dynamic": True},)  # without a suitable GPU, int8 is as small and more accurate

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why weights cannot be quantized; ``None`` if they can.

        With ``dynamic=true``, for example, the machine needs a suitable GPU.
        """
        fault = why_not_linear(bundle.model, self.name)
        if fault is None and _is_dynamic(choice) and not _multiplies_in_float8():
            return (
                f"{choice.in_full} multiplies in float8, which needs a GPU of compute capability "
                f"{'.'.join(map(str, _LEAST_CAPABILITY))} or more, but this machine has none: use int8, which is as "
                "small and more accurate, or float8(dynamic=false), which decodes weights in every pass"
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
