"""Detection of copies of weights or optimizer states in user variables: a loaded checkpoint, best weights, an average.

The tensors of a container count as a copy in each of these cases:

- Their keys are names of weights: names in a live module, or names with a dot, as ``state_dict`` writes them.
- They are the ``state`` of an optimizer's ``state_dict``.
- At least four of them have shapes that cover at least half of a live module's weights.

Storages that modules, optimizers, gradients and graphs use do not count. If an optimizer uses the states of a
checkpoint, only the other tensors of the checkpoint count. A module that is not trained is a copy if another module
with weights of the same shapes is trained.

Not handled: objects that `plimsoll.diagnose.holders` does not find, and a copy that is one long vector. The states of
optimizers from other libraries have the shapes of weights, and are mistaken for a copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from plimsoll.diagnose.evidence import Kept
from plimsoll.diagnose.holders import CONTAINERS, Found, stored, variables_of
from plimsoll.memory.autograd_graph import has_graph, storage_bytes, storage_key
from plimsoll.memory.inventory import Inventory

_FEWEST, _LEAST_SHARE, _LEAST_NAMED_SHARE = 4, 0.5, 0.9
_LOADS = re.compile(r"load\w*\(")
_MOST_ITEMS = 200_000
_OF_OPTIMIZER = {"state", "param_groups"}

Shapes = Counter[tuple[int, ...]]


class Copy(NamedTuple):
    """A copy of weights or states that user code keeps.

    Attributes:
        root: the variable or attribute that holds the copy.
        tensors: the tensors of the copy.
        of: the kind of copy (see `Kept.copy_of`).
    """

    root: Found
    tensors: list[Tensor]
    of: str

    def kept(self) -> Kept:
        """Return the copy as a kept value, with its size and the line of code that stores it."""
        store = stored(self.root)
        is_loaded = self.of == "weights" and _LOADS.search(store.code) is not None
        return Kept(
            name=self.root.name,
            kind=f"{type(self.root.value).__name__}, {_whose(self.root)}",
            num_items=len(self.tensors),
            is_made_at_once=True,
            tensor_bytes=storage_bytes(self.tensors),
            place=store.place,
            code=store.code,
            copy_of="checkpoint" if is_loaded else self.of,
        )


def _whose(root: Found) -> str:
    """Describe the variable or attribute in words: ``a variable of main()`` or ``an attribute of a Trainer``."""
    owner = root.owners[0]
    if not isinstance(owner, CodeType):
        return f"an attribute of a {type(owner).__name__}"
    is_global = len(root.owners) > 1 or owner.co_name == "<module>"
    return "a global variable" if is_global else f"a variable of {owner.co_name}()"


def copies_in(found: Iterable[Found], frames: Sequence[FrameType], stock: Inventory) -> list[Copy]:
    """Find the variables and attributes that hold a copy of weights or states.

    Args:
        found: the result of `plimsoll.diagnose.holders.found_in`.
        frames: the frames that were searched, innermost first. If variables of several frames hold the same container,
            the copy is named after the outermost variable, which must be deleted to free it.
        stock: the inventory of the device's memory, before storages of unknown use are assigned to a category.
    """
    used = stock.claimed() | stock.saved_by_graphs()
    models = _models_of(stock)
    copies: list[Copy] = []
    seen: set[int] = set()
    for one in found:
        if id(one.root_value) in seen:
            continue
        seen.add(id(one.root_value))
        root = _outermost(one, frames)
        if isinstance(root.value, nn.Module):
            copies += _of_module(root, models)
        elif isinstance(root.value, CONTAINERS):
            copies += _of_container(root, stock.kind, models, used)
            used |= {key for copy in copies[-1:] for tensor in copy.tensors if (key := storage_key(tensor)) is not None}
    return copies


def _outermost(one: Found, frames: Sequence[FrameType]) -> Found:
    """Return the variable or attribute that contains a value.

    If callers hold the same container in variables, for example because it is an argument, the outermost is returned.
    """
    root, seen = one._replace(name=one.root_name, value=one.root_value), set[int]()
    if "." in root.name:
        return root
    for frame in frames:
        for name, value, owners in variables_of(frame, seen):
            if value is root.value:
                root = root._replace(name=name, variable=name, owners=owners)
    return root


class _Model(NamedTuple):
    """An outermost module, the names and shapes of its weights, and whether it is trained."""

    module: nn.Module
    names: set[str]
    shapes: Shapes
    is_trained: bool


def _models_of(stock: Inventory) -> list[_Model]:
    inner = {id(child) for module in stock.modules for child in module.children()}
    trained = {id(one) for optimizer in stock.optimizers for group in optimizer.param_groups for one in group["params"]}
    return [
        _model(module, trained)
        for module in stock.modules
        if id(module) not in inner and any(one.device.type == stock.kind for one in module.parameters())
    ]


def _model(module: nn.Module, trained: set[int]) -> _Model:
    parameters = dict(module.named_parameters())
    own = [one for one in parameters.values() if one.requires_grad] or list(parameters.values())
    names = {*parameters, *(name for name, _ in module.named_buffers())}
    is_trained = any(id(one) in trained or one.grad is not None for one in own)
    return _Model(module, names, _shapes_of(own), is_trained)


def _shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    return Counter(tuple(one.shape) for one in tensors)


def _of_module(root: Found, models: list[_Model]) -> Iterator[Copy]:
    own = next((one for one in models if one.module is root.value), None)
    if own is None or own.is_trained:
        return
    weights = list(own.module.parameters())
    keys = {storage_key(one) for one in weights}
    for other in models:
        shapes = _shapes_of(other.module.parameters())
        if other.is_trained and shapes == _shapes_of(weights) and keys.isdisjoint(_keys(other.module)):
            yield Copy(root, [one.data for one in weights], "model")
            return


def _keys(module: nn.Module) -> set[int | None]:
    return {storage_key(one) for one in module.parameters()}


def _of_container(root: Found, kind: str, models: list[_Model], used: set[int]) -> Iterator[Copy]:
    names = {name for model in models for name in model.names}
    named: list[Tensor] = []
    others: list[Tensor] = []
    has_states = False
    for table, is_of_optimizer in _tables_in(root.value):
        has_states |= is_of_optimizer
        free = {name: one for name, one in table.items() if _is_free(one, kind, used)}
        (named if is_of_optimizer or _are_names(table, names) else others).extend(free.values())
    if any(_covers(_shapes_of(named + others), model.shapes) for model in models):
        named += others
    if named:
        yield Copy(root, named, "checkpoint" if has_states else "weights")


def _is_free(tensor: Tensor, kind: str, used: set[int]) -> bool:
    """Return whether a tensor can be a copy, because the training does not use it.

    Args:
        tensor: the tensor. It must be on a device of type ``kind``, and have no gradient or graph.
        kind: the type of the device whose memory is explained.
        used: keys of the storages that the training uses (see `storage_key`).
    """
    if tensor.device.type != kind or tensor.requires_grad or has_graph(tensor):
        return False
    key = storage_key(tensor)
    return key is not None and key not in used


def _tables_in(value: Any) -> Iterator[tuple[dict[Any, Tensor], bool]]:
    """Yield, for each container nested in ``value``, its tensors by key, and whether they are optimizer states."""
    waiting, seen, num_items = [(value, False)], set(), 0
    while waiting and num_items < _MOST_ITEMS:
        container, is_of_optimizer = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        num_items += len(container)
        is_of_optimizer |= isinstance(container, dict) and container.keys() >= _OF_OPTIMIZER
        items = container.items() if isinstance(container, dict) else enumerate(container)
        table = {}
        for key, item in items:
            if isinstance(item, Tensor):
                table[key] = item
            elif isinstance(item, CONTAINERS):
                waiting.append((item, is_of_optimizer))
        if table:
            yield table, is_of_optimizer


def _are_names(table: dict[Any, Tensor], names: set[str]) -> bool:
    """Return whether at least 90 % of the keys are names of weights.

    One match is not enough, because a batch can have a key such as ``mask``, which is also the name of a weight.
    """
    known = sum(isinstance(key, str) and ("." in key or key in names) for key in table)
    return known >= _LEAST_NAMED_SHARE * len(table)


def _covers(shapes: Shapes, of_model: Shapes) -> bool:
    """Return whether tensors look like the weights of a model, by shape.

    At least half of the model's elements must match tensors, and half of the tensors' elements must match the model.
    """
    if shapes.total() < _FEWEST:
        return False
    common = sum(prod(shape) * number for shape, number in (shapes & of_model).items())
    alike = sum(prod(shape) * number for shape, number in shapes.items() if shape in of_model)
    return common >= _LEAST_SHARE * _num_elements(of_model) and alike >= _LEAST_SHARE * _num_elements(shapes)


def _num_elements(shapes: Shapes) -> int:
    return sum(prod(shape) * number for shape, number in shapes.items())
