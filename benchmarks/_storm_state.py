"""The complete state of a training, as a flat table of names and values that can be compared bit for bit.

Written for `storm.py` without code of Plimsoll: the test must not depend on the tested code.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_TRAINED = ("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called")
"""Attributes of `torch.optim.Optimizer` that affect no number."""

State = dict[str, Any]


def state_of(kept: Mapping[str, Any]) -> State:
    """Return the current contents of some objects, and the random states of torch, numpy and Python."""
    random_numbers = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}
    seen: dict[int, Any] = {}  # by id; the value is kept alive, so that its id is not reused
    return dict(_leaves("", {**kept, "random numbers": random_numbers}, seen))


def differences(one: State, other: State) -> list[str]:
    """Return the names whose values differ, or that only one state has."""
    return [name for name in {**one, **other} if name not in one or name not in other or one[name] != other[name]]


def _leaves(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield name, repr(value)  # as text, NaN equals NaN
        return
    if id(value) in seen or isinstance(value, type | ModuleType) or type(value).__module__.startswith("plimsoll"):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield name, _bits(value)
        yield from _leaves(f"{name}.requires_grad", value.requires_grad, seen)
        if value.is_leaf and not isinstance(value, nn.Parameter):  # a step deletes the gradients of parameters
            yield from _leaves(f"{name}.grad", value.grad, seen)
        yield from _inside(name, vars(value), seen)
    elif isinstance(value, numpy.ndarray) and value.dtype == object:
        yield from _inside(name, {str(place): one for place, one in enumerate(value.flat)}, seen)
    elif isinstance(value, numpy.ndarray):
        yield name, (value.dtype, value.shape, value.tobytes())
    elif isinstance(value, torch.Generator):
        yield name, value.get_state().numpy().tobytes()
    elif isinstance(value, random.Random):
        yield name, value.getstate()
    elif isinstance(value, numpy.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, nn.Module):
        yield from _inside(name, {**vars(value), "_parameters": {}, "_buffers": {}, "_modules": {}}, seen)
        for own in (value._parameters, value._buffers, value._modules):
            yield from _inside(name, own, seen)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _optimizer(name, value, seen)
    elif isinstance(value, Mapping):
        yield f"{name}: its keys", sorted(map(repr, value))
        yield from _inside(name, {key if isinstance(key, str) else repr(key): one for key, one in value.items()}, seen)
    elif isinstance(value, list | tuple | deque):
        yield f"{name}: its length", len(value)
        yield from _inside(name, {str(number): one for number, one in enumerate(value)}, seen)
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif not callable(value) or type(value).__module__.startswith("_storm"):
        slots = {key: getattr(value, key) for key in getattr(value, "__slots__", ()) if hasattr(value, key)}
        yield from _inside(name, {**slots, **_attributes_of(value)}, seen)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes without calling ``__getattr__``, which may raise anything."""
    if isinstance(value, threading.local):
        return vars(value)
    try:
        own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own


def _inside(name: str, content: Mapping[str, Any], seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    for key, one in content.items():
        if "hook" not in key and not key.startswith("_plimsoll"):  # functions, and marks of installed techniques
            yield from _leaves(f"{name}.{key}" if name else key, one, seen)


def _optimizer(name: str, optimizer: torch.optim.Optimizer, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the groups, the states by parameter index, and all other attributes of an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {id(parameter): str(place) for place, parameter in enumerate(parameters)}
    states = {places.get(id(key)) or repr(key): state for key, state in optimizer.state.items()}
    own = {key: one for key, one in vars(optimizer).items() if key not in ("state", "param_groups", *_NOT_TRAINED)}
    groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
    yield from _inside(name, {**own, "groups": groups, "state": states}, seen)


def _bits(tensor: Tensor) -> Any:
    """Return dtype, shape and bytes; from a copy, because a tensor shared with numpy cannot be resized."""
    with torch.no_grad():
        if tensor.layout != torch.strided:
            dense = tensor.coalesce()
            return _bits(dense.indices()), _bits(dense.values())
        copied = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        return tensor.dtype, tuple(tensor.shape), copied.view(torch.uint8).numpy().tobytes()
