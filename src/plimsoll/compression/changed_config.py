"""Changes of a model's sizes by changes of its configuration.

A twin is a model of the same class on the meta device, built from the changed configuration. If a parameter of the twin
is smaller, the model's parameter must be cut to that size. So this module does not need to know the architectures. The
cut model has the shapes that its class expects when the folder is loaded again.

Not handled: models whose class is not built from a configuration alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import WeightsError
from plimsoll.weights.structure import class_for

# Torch-Pruning 1.6.1 was tried (transformers 5.23, sdpa) and is not used. Its graph lacks GPT-2's Conv1D layers, so
# their weights cannot be selected. Pruning tied embeddings of GPT-2 and OPT raises KeyError 'lm_head.weight'. It
# removes the wrong rows of GPT-NeoX's fused query, key and value, so the forward pass fails. For a query layer of a
# two-layer Llama, it found no group in five minutes. Models that build a causal mask cannot be traced on the meta
# device. It changes neither the configuration nor the sizes that modules store as attributes.

_POSITIONS = frozenset({"layer_idx", "layer_id", "layer_number"})
"""Names of module attributes that hold the index of the layer. Caches and messages use this index."""


class Cut(NamedTuple):
    """A dimension ``dim`` of the parameter ``name`` that must shrink from ``num_rows`` to ``num_kept`` rows."""

    name: str
    dim: int
    num_rows: int
    num_kept: int

    @property
    def module(self) -> str:
        """The name of the module that holds the parameter."""
        return self.name.rpartition(".")[0]


def twin_of(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module | str:
    """Return the twin, built with changed ``fields`` of the configuration, or a sentence on why it cannot be built."""
    from huggingface_hub.errors import StrictDataclassError

    config = getattr(model, "config", None)
    if config is None:
        return f"{type(model).__name__} has no configuration with its sizes: use a transformers model"
    try:
        changed = changed_config(config, fields)
        with torch.device("meta"):
            twin: nn.Module = class_for(cast(Any, type(model)), changed)(changed)
            return twin.train(model.training)
    except (ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, StrictDataclassError) as error:
        shown = ", ".join(f"{name} {value}" for name, value in fields.items())
        why = " ".join(str(error.__cause__ or error).split())
        return f"{type(model).__name__} cannot be built with {shown}: {why}"


def changed_config(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration with the values of ``fields``. Plimsoll's own configurations are validated."""
    if hasattr(config, "model_dump"):
        return type(config).model_validate(config.model_dump() | dict(fields))
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    return type(config).from_dict(changed.to_dict())  # as when it is read from the folder


def cuts_of(model: nn.Module, twin: nn.Module) -> tuple[Cut, ...] | str:
    """Return the cuts that turn a model into its twin, or a sentence on why cuts are not enough.

    A tied parameter is listed under each of its names.
    """
    found, cuts = dict(twin.named_parameters(remove_duplicate=False)), []
    have = dict(model.named_parameters(remove_duplicate=False))
    if found.keys() != have.keys():
        other = sorted(found.keys() ^ have.keys())[0]
        return f"with these sizes, {type(model).__name__} has other parameters, such as `{other}`"
    for name, parameter in have.items():
        shape, wanted = parameter.shape, found[name].shape
        if len(shape) != len(wanted) or any(new > old for new, old in zip(wanted, shape, strict=True)):
            return f"`{name}` of shape {list(shape)} would need the shape {list(wanted)}, which is not smaller"
        sizes = enumerate(zip(shape, wanted, strict=True))
        cuts += [Cut(name, dim, size, kept) for dim, (size, kept) in sizes if kept != size]
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in buffers or buffers[name].shape != buffer.shape:
            return f"with these sizes, {type(model).__name__} has another buffer `{name}` than {list(buffer.shape)}"
    return tuple(cuts)


def twin_and_cuts(model: nn.Module, fields: Mapping[str, Any]) -> tuple[nn.Module, tuple[Cut, ...]] | str:
    """Return the twin for changed ``fields`` and the cuts that lead to it, or a sentence on why cuts cannot do so."""
    twin = twin_of(model, fields)
    if isinstance(twin, str):
        return twin
    cuts = cuts_of(model, twin)
    return cuts if isinstance(cuts, str) else (twin, cuts)


def block_of(name: str) -> str:
    """Return the name of a module's block, which ends with the first number: ``h.1`` for ``h.1.mlp.0``.

    A name without a number is returned whole.
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def input_dim(module: nn.Module) -> int | None:
    """Return which dimension of a linear layer's weight indexes its inputs; ``None`` for other modules."""
    if isinstance(module, nn.Linear):
        return 1
    return 0 if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def become(model: nn.Module, twin: nn.Module, fields: Mapping[str, Any], kept: Mapping[Cut, Tensor]) -> None:
    """Cut a model's parameters and change its configuration, so that it has the sizes of its twin.

    Args:
        model: changed in place. Its modules stay the same objects; cut parameters are new objects.
        twin: the result of `twin_of` for the same ``fields``.
        fields: the changed fields of the configuration.
        kept: for each cut, the indices of the rows to keep: increasing, on the CPU.
    """
    whole = dict(model.named_parameters(remove_duplicate=False))
    indices: dict[int, dict[int, Tensor]] = {}
    for cut, rows in kept.items():
        indices.setdefault(id(whole[cut.name]), {})[cut.dim] = rows
    made: dict[int, nn.Parameter] = {}
    for name, parameter in whole.items():
        if id(parameter) in indices:
            if id(parameter) not in made:
                made[id(parameter)] = _smaller(parameter, indices[id(parameter)])
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, made[id(parameter)])
    take_numbers(model, twin)
    take_fields(model, fields)
    wrong = cuts_of(model, twin)
    assert wrong == (), wrong


def _smaller(parameter: nn.Parameter, indices: Mapping[int, Tensor]) -> nn.Parameter:
    values = parameter.detach()
    for dim, rows in indices.items():
        values = values.index_select(dim, rows.to(values.device))
    return nn.Parameter(values.contiguous(), requires_grad=parameter.requires_grad)


def take_numbers(model: nn.Module, twin: nn.Module) -> None:
    """Copy numeric attributes of the twin's modules, such as ``num_heads`` and ``normalized_shape``, to the model."""
    for name, attribute, value in list(other_numbers(model, twin)):
        module = model.get_submodule(name)
        before = vars(module).get(attribute)
        setattr(module, attribute, value)
        for buffer in module.buffers(recurse=False):  # Gemma stores its scale as an attribute and as a buffer
            if (
                not buffer.is_meta
                and isinstance(before, float)
                and buffer.numel() == 1
                and buffer == buffer.new_tensor(before)
            ):
                buffer.fill_(value)


def other_numbers(model: nn.Module, twin: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the numeric and tuple attributes of modules whose value differs between the model and its twin.

    Each is yielded as the name of the module, the name of the attribute, and the twin's value.
    """
    theirs = dict(twin.named_modules())
    for name, module in model.named_modules():
        for attribute, value in vars(theirs[name]).items() if name in theirs else ():
            is_plain = type(value) in {int, float, bool} or (isinstance(value, tuple) and not attribute.startswith("_"))
            if is_plain and attribute != "training" and vars(module).get(attribute) != value:
                yield name, attribute, value


def is_place(attribute: str) -> bool:
    """Return whether a module attribute of this name holds the index of the layer, such as ``layer_idx``."""
    return attribute in _POSITIONS


def take_fields(model: nn.Module, fields: Mapping[str, Any]) -> None:
    """Write the changed fields into the configuration of a model, and into its modules' copies of it."""
    config: Any = model.config
    if hasattr(config, "model_dump"):
        model.config = changed_config(config, fields)
        return
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    before = {name: getattr(config, name, None) for name in fields}
    for one in configs.values():  # modules may have copies
        for name, value in fields.items():
            if one is config or getattr(one, name, None) == before[name]:
                setattr(one, name, value)


def checked(found: Any) -> Any:
    """Return ``found``, the result of an operation, or raise an error if it is a sentence on why the operation failed.

    Raises:
        WeightsError: if ``found`` is a string; the message contains it.
    """
    if isinstance(found, str):
        raise WeightsError(f"{found}; use a choice that `plimsoll shrink` offers for this model")
    return found
