"""Shared code of the methods that quantize with torchao: the choice of layers, and saving through transformers.

torchao's ``quantize_`` changes weights of the live model. This module then writes to the configuration the same entry
as ``from_pretrained(quantization_config=...)``. So ``save_pretrained`` writes torchao's safetensors, and plain
``from_pretrained`` reads them if torchao is installed.

Does NOT cover models from outside transformers: torchao has no recurrent layers. The recurrent layers in
``torch.ao.nn.quantized.dynamic`` are deprecated, and pack weights into objects that safetensors cannot store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from plimsoll.weights.coded_layers import LinearInParts
from plimsoll.weights.int4 import INT4_ROWS, OPAQUE, plain_of
from plimsoll.weights.parts import is_made_of_parts
from plimsoll.weights.structure import as_linear, note, put, sizes_of

SMALLEST_INT4_GROUP = 32
"""The smallest number of weights that can share a scale in 4-bit form."""

Config = Any
"""A configuration of torchao, which is untyped."""


def why_not(model: Any, method: str) -> str | None:
    """Return the reason why a model cannot be quantized at all; ``None`` if it may be possible."""
    if find_spec("torchao") is None:
        return f"{method} needs torchao, which is not installed: `pip install torch-plimsoll[quantize]`"
    if not hasattr(model, "base_model_prefix"):
        return (
            f"{method} is for models of transformers, and this is a {type(model).__name__}: torchao cannot quantize "
            "recurrent layers, and torch.ao's cannot be saved as safetensors; use a structural method"
        )
    return None


def why_not_linear(model: Any, method: str) -> str | None:
    """Return the reason why no linear layer of a model can be quantized; ``None`` if at least one can be."""
    return why_not(model, method) or (None if plain_layers(model) else nothing_found(model, method))


def linear_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers of the base model by name, in order: ``nn.Linear`` and transformers' ``Conv1D``.

    The head is excluded. transformers never quantizes the output layer over the vocabulary; whether it quantizes a
    classifier depends on the order of its parameters.
    """
    from transformers.pytorch_utils import Conv1D

    base = model.base_model
    inside = {id(module) for module in base.modules()}
    found = {
        name: module for name, module in model.named_modules() if type(module) in (nn.Linear, LinearInParts, Conv1D)
    }
    output = model.get_output_embeddings()
    of_output = set() if output is None else {id(one) for one in output.modules()}
    return {name: one for name, one in found.items() if id(one) in inside - of_output}


def plain_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers whose weight is neither quantized nor shared with another kind of module."""
    layers = linear_layers(model)
    holders = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    among_layers = Counter(id(one.weight) for one in layers.values())
    return {
        name: one
        for name, one in layers.items()
        if not is_made_of_parts(one.weight) and holders[id(one.weight)] == among_layers[id(one.weight)]
    }


def int4_layers(model: Any, group: int) -> list[str]:
    """Return the names of the linear layers that the 4-bit kernel supports, with one scale per ``group`` weights."""
    sizes = {name: sizes_of(one) for name, one in plain_layers(model).items()}
    return [name for name, (width, rows) in sizes.items() if width % group == 0 and rows % INT4_ROWS == 0]


def num_holders(model: Any, weight: Tensor) -> int:
    """Return the number of modules of a model that hold a weight."""
    return sum(weight is one for module in model.modules() for one in module._parameters.values())


def nothing_found(model: Any, method: str) -> str:
    """Return the message that no linear layer suits a method, with the number of layers that were considered."""
    all_layers, kinds = linear_layers(model), sorted({type(module).__name__ for module in model.modules()})
    coded = sum(is_made_of_parts(one.weight) for one in all_layers.values())
    if coded:
        return f"{method}: {coded} of {len(all_layers)} linear layers are quantized already; give the dense model"
    base = type(model.base_model).__name__
    return (
        f"{method} finds none of the layers it looked for: nn.Linear or Conv1D inside the {base} with a weight that "
        f"no other kind of module has ({len(all_layers)} linear; module types: {', '.join(kinds)}); use another method"
    )


def quantize_layers(model: Any, names: Sequence[str], config: Config) -> None:
    """Quantize the named linear layers in place, and record the quantization in the model's configuration."""
    replace_weights(model, names, config, lambda weight: quantized(weight, config))


def replace_weights(model: Any, names: Sequence[str], config: Config, made: Callable[[Tensor], Tensor]) -> None:
    """Quantize layers like `quantize_layers`, but by the function ``made``, which quantizes a weight (out, in)."""
    known: dict[int, nn.Parameter] = {}
    for name in names:
        layer = model.get_submodule(name)
        before = layer.weight  # several layers may share this weight
        if not isinstance(layer, nn.Linear):
            layer = as_linear(layer)
            put(model, name, layer)
            note(model, "as_linear", name)
        if id(before) not in known:
            known[id(before)] = nn.Parameter(made(layer.weight.detach()), requires_grad=False)
        layer.weight = known[id(before)]
    say_quantized(model, config)


def quantized(weight: Tensor, config: Config) -> Tensor:
    """Return a dense weight, (out, in), quantized by torchao."""
    from torchao.quantization import quantize_

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layer, config)
    return layer.weight.data


def int8_config() -> Config:
    """Return torchao's configuration for int8 weights.

    By default, using it would change the global settings of torch's compiler; this is switched off.
    """
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def say_quantized(model: Any, config: Config) -> None:
    """Record in a model's configuration how it is quantized, and attach the quantizer that saves it.

    ``config`` names one kind of quantization for all layers, although embeddings may have another kind. The weight file
    describes each tensor.
    """
    from transformers import TorchAoConfig

    plain = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not is_made_of_parts(module.weight)
    ]
    said = TorchAoConfig(config, modules_to_not_convert=plain or None)
    model.config.quantization_config = said
    model.hf_quantizer = saved_by(said)


def saved_by(config: Any) -> Any:
    """Return the transformers quantizer that ``save_pretrained`` uses for a ``TorchAoConfig``."""
    return _quantizer_class()(config)


@cache
def _quantizer_class() -> type:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    class Quantizer(TorchAoHfQuantizer):
        """A quantizer that also saves weights packed for one processor, which torchao cannot save."""

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            # A shared quantized weight is written once; loading ties the other layers to it again.
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
