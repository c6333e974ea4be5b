"""What a model would be with other numbers in its configuration, and making it that.

A twin is a model of the same class on the meta device, built from the changed configuration. Where its shapes differ,
something must be cut. So nothing here knows the architectures, and what was cut is what the class itself expects when
the folder is loaded again. Does NOT cover models whose class is not built from a configuration alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import WeightsError
from plimsoll.weights.structure import class_for

# Why not Torch-Pruning? 1.6.1 was tried (transformers 5.23, sdpa). GPT-2's Conv1D is not in its graph: its weights
# cannot be named, and pruning the tied embeddings raises KeyError 'lm_head.weight', as OPT's. Of GPT-NeoX's fused
# query, key and value it removes the wrong rows, so that the forward pass fails. The group of a query layer of a Llama
# of two layers was not found in five minutes. Models that make a causal mask cannot be traced on the meta device. It
# changes neither the configuration nor the numbers that modules keep.

_POSITIONS = frozenset({"layer_idx", "layer_id", "layer_number"})
"""Numbers that a layer keeps of its place, for caches and messages."""


class Cut(NamedTuple):
    """A dimension of a parameter that must become smaller."""

    name: str
    dim: int
    num_rows: int
    num_kept: int

    @property
    def module(self) -> str:
        """The module that has the parameter."""
        return self.name.rpartition(".")[0]


def twin_of(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module | str:
    """Return the model that a changed configuration describes, on the meta device, or a sentence why there is none."""
    from huggingface_hub.errors import StrictDataclassError

    config = getattr(model, "config", None)
    if config is None:
        return (
            f"{type(model).__name__} has no configuration that its sizes could be changed in: use a transformers model"
        )
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
    """Return a copy of a configuration with other values; one of ours is checked again."""
    if hasattr(config, "model_dump"):
        return type(config).model_validate(config.model_dump() | dict(fields))
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    return type(config).from_dict(changed.to_dict())  # as it will be read from the folder


def cuts_of(model: nn.Module, twin: nn.Module) -> tuple[Cut, ...] | str:
    """Return where a model must be cut to become its twin, or a sentence that says why cutting is not enough.

    A tied parameter is there under each of its names.
    """
    found, cuts = dict(twin.named_parameters(remove_duplicate=False)), []
    have = dict(model.named_parameters(remove_duplicate=False))
    if found.keys() != have.keys():
        other = sorted(found.keys() ^ have.keys())[0]
        return f"with these sizes {type(model).__name__} has other parameters, such as `{other}`"
    for name, parameter in have.items():
        shape, wanted = parameter.shape, found[name].shape
        if len(shape) != len(wanted) or any(new > old for new, old in zip(wanted, shape, strict=True)):
            return f"`{name}` of shape {list(shape)} would need the shape {list(wanted)}, which is not smaller"
        sizes = enumerate(zip(shape, wanted, strict=True))
        cuts += [Cut(name, dim, size, kept) for dim, (size, kept) in sizes if kept != size]
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in buffers or buffers[name].shape != buffer.shape:
            return f"with these sizes {type(model).__name__} has another buffer `{name}` than {list(buffer.shape)}"
    return tuple(cuts)


def twin_and_cuts(model: nn.Module, fields: Mapping[str, Any]) -> tuple[nn.Module, tuple[Cut, ...]] | str:
    """Return the model that a changed configuration describes and where to cut, or a sentence why that cannot be."""
    twin = twin_of(model, fields)
    if isinstance(twin, str):
        return twin
    cuts = cuts_of(model, twin)
    return cuts if isinstance(cuts, str) else (twin, cuts)


def block_of(name: str) -> str:
    """Return the name of the outermost numbered module in a name, such as ``h.1`` in ``h.1.mlp.0``; else the name."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def input_dim(module: nn.Module) -> int | None:
    """Return the dimension of a linear layer's weight that its input has; ``None`` for what is no linear layer."""
    if isinstance(module, nn.Linear):
        return 1
    return 0 if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def become(model: nn.Module, twin: nn.Module, fields: Mapping[str, Any], kept: Mapping[Cut, Tensor]) -> None:
    """Make a model what its twin is.

    Args:
        model: changed in place; its modules stay the same objects, parameters are new ones.
        twin: what it becomes.
        fields: in which their configurations differ.
        kept: for each cut, what is kept of the dimension: increasing numbers of rows, on the CPU.
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
    """Give modules the plain numbers (``num_heads``, ``split_size``, ``normalized_shape``) of the twin's modules."""
    for name, attribute, value in list(other_numbers(model, twin)):
        module = model.get_submodule(name)
        before = vars(module).get(attribute)
        setattr(module, attribute, value)
        for buffer in module.buffers(recurse=False):  # Gemma has the scale of its embeddings as a number and as this
            if (
                not buffer.is_meta
                and isinstance(before, float)
                and buffer.numel() == 1
                and buffer == buffer.new_tensor(before)
            ):
                buffer.fill_(value)


def other_numbers(model: nn.Module, twin: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the plain numbers, and tuples of them, that differ in a twin: module, attribute, and the twin's value."""
    theirs = dict(twin.named_modules())
    for name, module in model.named_modules():
        for attribute, value in vars(theirs[name]).items() if name in theirs else ():
            is_plain = type(value) in {int, float, bool} or (isinstance(value, tuple) and not attribute.startswith("_"))
            if is_plain and attribute != "training" and vars(module).get(attribute) != value:
                yield name, attribute, value


def is_place(attribute: str) -> bool:
    """Return whether a number of a module only says where it is among its like."""
    return attribute in _POSITIONS


def take_fields(model: nn.Module, fields: Mapping[str, Any]) -> None:
    """Write values into the configurations that a model and its modules have."""
    config: Any = model.config
    if hasattr(config, "model_dump"):
        model.config = changed_config(config, fields)
        return
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    before = {name: getattr(config, name, None) for name in fields}
    for one in configs.values():  # parts may have copies
        for name, value in fields.items():
            if one is config or getattr(one, name, None) == before[name]:
                setattr(one, name, value)


def checked(found: Any) -> Any:
    """Return what was found, or raise the sentence that stands in its place.

    Raises:
        WeightsError: that sentence.
    """
    if isinstance(found, str):
        raise WeightsError(f"{found}; see what `plimsoll shrink` offers for this model, and use that")
    return found
