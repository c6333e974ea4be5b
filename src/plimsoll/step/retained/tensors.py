"""Tensors with a graph that user objects hold between steps, in attributes of modules and of the loss.

The search covers the attributes and buffers of every module of the model. For the loss, it covers attributes, the
closure and the globals that its code names. If the loss is a method, its object is searched too. The search includes
lists, tuples, dicts, deques and plain objects in any of them, to a depth of four.

Not found: tensors held only by C++ objects, generators, local variables of a running loop or globals of other modules.
A container is treated as having no graph if none of its last 64 items has one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from plimsoll.memory.autograd_graph import has_graph

_DEEPEST = 4
_MOST_LOOKED_AT = 64
OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class RetainedTensor(NamedTuple):
    """The tensors with a graph in one attribute or variable.

    Attributes:
        name: the attribute or variable as the user would write it, starting with ``model`` or ``loss``.
        variable: the last part of the name.
        owners: the object with the attribute (for a variable, the function), then the objects that contain it.
        value: the value of the attribute.
        tensors: its tensors that have a graph, the newest last.
    """

    name: str
    variable: str
    owners: tuple[Any, ...]
    value: Any
    tensors: list[Tensor]


def retained_by(model: nn.Module, loss: Callable[..., Any]) -> list[RetainedTensor]:
    """Find the tensors with a graph that a model and its loss hold."""
    seen: set[int] = set()
    found = list(_of_modules("model", model, seen))
    for name, value, owner in _of_callable(loss):
        found += _of_value(name, value, (owner,), seen)
    return found


def _of_modules(root: str, model: nn.Module, seen: set[int]) -> Iterator[RetainedTensor]:
    for path, module in model.named_modules(prefix=root):
        seen.add(id(module))
        own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        for name, value in (*own.items(), *module._buffers.items()):
            yield from _of_value(f"{path}.{name}", value, (module,), seen)


def _of_callable(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the variables in which a loss can hold tensors: name, value, and the function or object they belong to."""
    if isinstance(function, partial):
        yield from _of_callable(function.func)
        for value in (*function.args, *function.keywords.values()):
            yield "loss", value, function.func
    elif isinstance(function, MethodType):
        yield "loss", function.__self__, function.__func__
        yield from _of_callable(function.__func__)
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if (value := _content(cell)) is not None:
                yield name, value, function
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name], function
        for name, value in vars(function).items():
            yield f"{function.__name__}.{name}", value, function
    else:
        yield "loss", function, type(function)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _of_value(
    name: str, value: Any, owners: tuple[Any, ...], seen: set[int], depth: int = 0
) -> Iterator[RetainedTensor]:
    variable = name.rpartition(".")[2]
    if isinstance(value, _LEAVES) or depth > _DEEPEST:
        return
    if isinstance(value, Tensor):
        if has_graph(value):
            yield RetainedTensor(name, variable, owners, value, [value])
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from _of_modules(name, value, seen)
    elif isinstance(value, list | tuple | deque | Mapping):
        if tensors := _tensors_in(value):
            yield RetainedTensor(name, variable, owners, value, tensors)
        for item in _last(value):
            if not isinstance(item, Tensor):
                yield from _of_value(name, item, owners, seen, depth + 1)
    else:
        for inner, item in attributes_of(value):
            yield from _of_value(f"{name}.{inner}", item, (value, *owners), seen, depth + 1)


def attributes_of(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the instance attributes of a plain object, without class attributes and properties."""
    try:
        return list(object.__getattribute__(value, "__dict__").items())
    except AttributeError:
        return ()


def _last(value: Any) -> list[Any]:
    items: Any = value.values() if isinstance(value, Mapping) else value
    try:
        return list(islice(reversed(items), _MOST_LOOKED_AT))
    except TypeError:  # a user's mapping without reverse iteration
        return []


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors with a graph in a container, not those in nested containers."""
    if not any(isinstance(item, Tensor) and has_graph(item) for item in _last(value)):
        return []
    items = value.values() if isinstance(value, Mapping) else value
    return [item for item in items if isinstance(item, Tensor) and has_graph(item)]
