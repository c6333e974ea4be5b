"""What the methods of torchao have in common: which layers, which configuration, and how transformers comes to know it.

Weights are changed on the live model by torchao's ``quantize_``, and the configuration then says what
``from_pretrained(quantization_config=...)`` would have said: so ``save_pretrained`` writes torchao's own safetensors,
and plain ``from_pretrained`` reads them where torchao is installed.

The layers are the ``nn.Linear`` of the base model. Its head stays as it is: the output over the vocabulary (as in
transformers), and the classifier, which transformers leaves out or not by the order of its parameters.

Does NOT cover models that are not of transformers: torchao has no recurrent layers, and those of
``torch.ao.nn.quantized.dynamic`` are deprecated and pack their weights into objects that no safetensors file can hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from plimsoll.records.plan import Choice
from plimsoll.weights.parts import is_made_of_parts
from plimsoll.weights.saved_by import saved_by
from plimsoll.weights.shrink._base import Subject

Config = Any
"""A configuration of torchao, which has no types."""


def why_not(subject: Subject, method: str) -> str | None:
    """Return why nothing of a subject can be quantized, ``None`` if something can."""
    if find_spec("torchao") is None:
        return f"{method} needs torchao, which is not installed: `pip install torch-plimsoll[quantize]`"
    model: Any = subject.model
    if not hasattr(model, "base_model_prefix"):
        return (
            f"{method} is for models of transformers, and this is a {type(model).__name__}: torchao quantizes no "
            "recurrent layer, and what torch.ao has for them cannot be saved as safetensors; use a structural method"
        )
    return None


def why_not_linear(subject: Subject, choice: Choice, method: str, **options: type) -> str | None:
    """Return why no linear layer of a subject can be quantized, or which option of the choice cannot be."""
    fault = unknown_options(choice, **options) or why_not(subject, method)
    return fault or (None if plain_layers(subject.model) else nothing_found(subject.model, method))


def unknown_options(choice: Choice, **options: type) -> str | None:
    """Return what is wrong with the options of a choice, of which the method has these."""
    for name, value in choice.options.items():
        if name not in options:
            known = f"{', '.join(options)} is what there is" if options else "it has none"
            return f"{choice}: {choice.technique} has no option {name}, {known}: leave it out"
        if type(value) is not options[name]:
            return f"{choice}: {name} {value!r} is no {options[name].__name__}: give one"
    return None


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of the base model by name, in its order."""
    base = model.base_model
    inside = {id(module) for module in base.modules()}
    found = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    output = model.get_output_embeddings()
    return {name: one for name, one in found.items() if id(one) in inside and one is not output}


def plain_layers(model: Any) -> dict[str, nn.Linear]:
    """Return those whose weight is not quantized yet, and not shared with another module."""
    holders = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    layers = linear_layers(model).items()
    return {name: one for name, one in layers if not is_made_of_parts(one.weight) and holders[id(one.weight)] == 1}


def num_holders(model: Any, weight: Tensor) -> int:
    """Return how many modules have a weight as their own."""
    return sum(weight is one for module in model.modules() for one in module._parameters.values())


def nothing_found(model: Any, method: str) -> str:
    """Say that there is no layer for a method, and which were looked for."""
    all_layers, kinds = linear_layers(model), sorted({type(module).__name__ for module in model.modules()})
    coded = sum(is_made_of_parts(one.weight) for one in all_layers.values())
    if coded:
        return f"{method}: {coded} of {len(all_layers)} linear layers are quantized already; give the dense model"
    base = type(model.base_model).__name__
    return (
        f"{method} finds none of the layers it looked for: nn.Linear inside the {base} whose weight is its own "
        f"({len(all_layers)} nn.Linear there; modules are {', '.join(kinds)}); use another method"
    )


def quantize_layers(model: Any, names: list[str], config: Config) -> None:
    """Quantize some linear layers in place, and have the configuration of the model say so."""
    from torchao.quantization import quantize_

    chosen = set(names)
    quantize_(model, config, filter_fn=lambda module, name: name in chosen)
    say_quantized(model, config)


def replace_weights(model: Any, names: list[str], config: Config, made: Callable[[Tensor], Tensor]) -> None:
    """Do what `quantize_layers` does with another function of the weight than torchao's own."""
    for name in names:
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(made(layer.weight.detach()), requires_grad=False)
    say_quantized(model, config)


def say_quantized(model: Any, config: Config) -> None:
    """Write into the configuration of a model how it is quantized, and give it what saves it so.

    ``config`` names one kind for all layers, though embeddings may be of another: each tensor in the file says its own.
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
