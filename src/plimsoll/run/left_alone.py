"""What a pass of a model and a loss may change besides gradients, put back: a check of them leaves nothing behind.

Covers what `plimsoll.run.undo` does, of the modules that a loss function uses too, and what models and losses keep as
plain attributes, in closures and in the globals a loss function names: numbers, texts, lists, dictionaries, and tensors
of up to a mebibyte that are changed in place.

Does NOT cover what is deeper than that (a list in a list, an attribute of an attribute), and files.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.device.base import Backend
from plimsoll.run.undo import Undo

_OF_MODULES = {"forward", *vars(nn.Module())}
_MOST_COPIED_BYTES = 1 << 20
_MISSING = object()


@contextmanager
def left_alone(model: nn.Module, loss: Any, backend: Backend) -> Iterator[LeftAlone]:
    """Put back what a block changes of a model and a loss function; see `LeftAlone`."""
    before = LeftAlone(model, loss, backend)
    try:
        yield before
    finally:
        before.put_back()


class LeftAlone:
    """Remembers what a model and a loss function have, and puts it back.

    Args:
        model: the model.
        loss: what computes its loss; what it is made of is looked at.
        backend: of the device, whose random numbers are put back too.
    """

    def __init__(self, model: nn.Module, loss: Any, backend: Backend) -> None:
        functions = [*_functions(loss)]
        modules = [one for function in functions for one in _values_of(function) if isinstance(one, nn.Module)]
        everything = nn.ModuleList([model, *modules])
        self._undo = Undo(everything, backend)
        self._undo.remember()
        places: list[MutableMapping[str, Any]] = [vars(module) for module in everything.modules()]
        places += [vars(one) for one in functions if not inspect.isroutine(one) and hasattr(one, "__dict__")]
        places += [_Cells(function) for function in functions if inspect.isfunction(function)]
        self._kept = [(place, name, value, _copy_of(value)) for place in places for name, value in _entries(place)]
        self._names = [(place, set(place)) for place in places if not isinstance(place, _Cells)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Go back to what was remembered."""
        for place, names in self._names:
            for name in set(place) - names:
                del place[name]
        for place, name, value, copy in self._kept:
            if place.get(name, _MISSING) is not value:
                place[name] = value
            if copy is not None:
                _fill(value, copy)
        self._undo.restore()


class _Cells(MutableMapping[str, Any]):
    """The variables of its surroundings that a function names: of closures, and globals."""

    def __init__(self, function: Any) -> None:
        code = function.__code__
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._globals = function.__globals__
        self._names = [*self._cells, *(name for name in code.co_names if name in self._globals)]

    def __getitem__(self, name: str) -> Any:
        if name not in self._cells:
            return self._globals[name]
        try:
            return self._cells[name].cell_contents
        except ValueError:  # not filled yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _functions(loss: Any) -> Iterator[Any]:
    """A loss function, and what it is wrapped around or bound to, each once: they may hold each other."""
    waiting, seen = deque([loss]), set()
    while waiting:
        one = waiting.popleft()
        if isinstance(one, partial):
            waiting.extend((one.func, *one.args, *one.keywords.values()))
        elif inspect.ismethod(one):
            waiting.extend((one.__func__, one.__self__))
        elif id(one) not in seen:
            seen.add(id(one))
            yield one
            kept = () if inspect.isroutine(one) else getattr(one, "__dict__", {}).values()
            waiting.extend(value for value in kept if inspect.isfunction(value) or isinstance(value, partial))


def _values_of(function: Any) -> Iterable[Any]:
    if not inspect.isfunction(function):
        return (function, *getattr(function, "__dict__", {}).values())
    cells = _Cells(function)
    return [cells[name] for name in cells if name in cells]


def _entries(place: MutableMapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in place:
        value = place.get(name, _MISSING)
        if name not in _OF_MODULES and isinstance(value, _KEPT):
            yield name, value


_CONTAINERS = (list, dict, set, deque)
_KEPT = (int, float, complex, str, bytes, tuple, type(None), Tensor, *_CONTAINERS)


def _copy_of(value: Any) -> Any:
    """The content of what can be changed in place."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone() if value.nbytes <= _MOST_COPIED_BYTES else None
    return value.copy() if isinstance(value, _CONTAINERS) else None


def _fill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if not value.is_inference():
            value.detach().copy_(content)
        return
    if value == content if not _has_tensors(content) else _same_items(value, content):
        return
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(content)


def _has_tensors(content: Any) -> bool:
    items = content.values() if isinstance(content, dict) else content
    return any(not isinstance(item, int | float | str | type(None)) for item in items)


def _same_items(value: Any, content: Any) -> bool:
    if isinstance(content, dict):
        return list(map(id, value.values())) == list(map(id, content.values())) and list(value) == list(content)
    return list(map(id, value)) == list(map(id, content))
