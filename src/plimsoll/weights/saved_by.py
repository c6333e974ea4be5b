"""What transformers asks to save a quantized model: torchao's safetensors, weights of 4 bits in the form of files."""

from __future__ import annotations

from functools import cache
from typing import Any

from plimsoll.weights.int4 import OPAQUE, plain_of
from plimsoll.weights.parts import is_made_of_parts


def saved_by(config: Any) -> Any:
    """Return the quantizer of transformers that ``save_pretrained`` asks, for its ``TorchAoConfig``."""
    return _quantizer_class()(config)


@cache
def _quantizer_class() -> type:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    class Quantizer(TorchAoHfQuantizer):
        """Writes what torchao itself does not: weights that are packed for one processor."""

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            # Of a quantized weight that several layers share one is written; the others are tied to it again.
            others = getattr(model, "all_tied_weights_keys", {})
            state = {
                name: one
                for name, one in model.state_dict().items()
                if not (is_made_of_parts(one) and others.get(name, name) != name)
            }
            return flatten_tensor_state_dict(
                {name: plain_of(one) if type(one).__name__ == OPAQUE else one for name, one in state.items()}
            )

    return Quantizer
