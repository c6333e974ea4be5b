"""A search for all Python state that training code can reach from a model, its loss and its optimizer.

The search follows attributes, lists, dicts, sets, deques and hooks of modules, tensors and optimizers. It follows a
function's closure, its defaults and the globals that it names, also in modules that the function names. It follows the
objects bound by methods and partials, and class attributes. Each of these is a `Place`, whose content can be copied
(one level deep) and restored.

Not followed:

- objects of libraries (`_LIBRARIES`) other than modules, optimizers and schedules; of a user's subclass of a library's
  trainer, the attributes are followed
- data loaders and data sets, whose position does not belong to a step
- objects that only C code, an iterator or a running function holds; iterators are recorded

A container of more than `_MOST_ITEMS` items is copied but not searched. The search ends after `_MOST_PLACES` places.
"""

from __future__ import annotations

import ctypes
import inspect
import io
import operator
import os
import random
import sys
import sysconfig
import threading
from abc import ABC, abstractmethod
from argparse import Namespace
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from queue import Queue
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from plimsoll import errors
from plimsoll.step.undo import hooks

_LIBRARIES = frozenset(
    {"accelerate", "datasets", "lightning", "lightning_fabric", "lightning_utilities", "numpy", "peft", "plimsoll",
     "pytorch_lightning", "sentence_transformers", "tokenizers", "torch", "torchao", "torchmetrics", "transformers",
     "trl", "tqdm", "rich"}
) | sys.stdlib_module_names  # fmt: skip
FOLDERS_OF_LIBRARIES = (
    f"{Path(errors.__file__).parent}{os.sep}",
    *(f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in {"stdlib", "purelib", "platlib"}),
)
_FOLLOWED = (
    nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, SimpleNamespace, Namespace, UserDict,
    UserList, ChainMap, Queue, threading.local,
)  # fmt: skip
_IN_C = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)
_CONFIGS = frozenset({"PreTrainedConfig", "PretrainedConfig"})
"""Configurations of transformers, which is not imported here. BERT's first pass sets ``problem_type``."""
_NEVER = (
    str, bytes, int, float, complex, type(None), CodeType, ModuleType, torch.dtype, torch.device, torch.Size,
    torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler, torch.amp.GradScaler,
)  # fmt: skip
_POSITIONS_OF_NO_STEP = (io.IOBase, _BaseDataLoaderIter)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_OF_NAMES = ("_parameters", "_buffers", "_modules")
"""Dicts of every module whose items a program accesses as attributes of the module."""
SMALL_BYTES = 1 << 20
"""Arrays and tensors up to this size may be copied in each step even if no change was observed."""
_MOST_ITEMS = 10_000
_MOST_PLACES = 50_000


class Place(ABC):
    """A container that may hold state, such as a list or the attributes of an object.

    Its content can be copied, and later be replaced by the copy.
    """

    @abstractmethod
    def content(self) -> Any:
        """Return a shallow copy of the content."""

    @abstractmethod
    def fill(self, content: Any) -> None:
        """Replace the content."""

    def container(self) -> Any:
        """Return the list, dict or other object that this place wraps, so that it can be read without a copy.

        Returns ``None`` if it must not be read directly. Its items are then read through `content`.
        """
        return None


@dataclass(slots=True)
class Items(Place):
    """A list, deque, set or dict."""

    items: Any

    def content(self) -> Any:
        """Return a copy of the items."""
        return dict(self.items) if isinstance(self.items, dict) else list(self.items)

    def fill(self, content: Any) -> None:
        """Replace the items."""
        container = self.items
        kind: Any = next(one for one in (OrderedDict, dict, list, deque, set) if isinstance(container, one))
        kind.clear(container)  # a subclass may forbid clearing or add side effects
        if isinstance(container, dict):
            for key, value in content.items():
                kind.__setitem__(container, key, value)
        else:
            (kind.update if isinstance(container, set) else kind.extend)(container, content)

    def container(self) -> Any:
        """Return the wrapped container; ``None`` if it is of a subclass, whose iteration may have side effects."""
        return self.items if type(self.items) in {dict, OrderedDict, list, deque, set} else None


@dataclass(slots=True)
class Numbers(Place):
    """A bytearray, an `array.array`, a memoryview or a ctypes value, whose content is bytes."""

    numbers: Any
    _last: bytes = b""

    def content(self) -> list[bytes]:
        """Return the bytes; the same object is returned as long as the bytes are equal."""
        now = memoryview(self.numbers).tobytes()
        self._last = self._last if now == self._last else now
        return [self._last]

    def fill(self, content: Any) -> None:
        """Replace the bytes."""
        (self._last,) = content
        if isinstance(self.numbers, bytearray):
            self.numbers[:] = self._last
        elif isinstance(self.numbers, array):
            del self.numbers[:]
            self.numbers.frombytes(self._last)
        elif isinstance(self.numbers, memoryview):
            self.numbers.cast("B")[:] = self._last
        else:
            ctypes.memmove(ctypes.addressof(self.numbers), self._last, len(self._last))


@dataclass(slots=True)
class Attributes(Place):
    """The attributes of an object or a class, except those in ``left_out``."""

    owner: Any
    left_out: frozenset[str] = frozenset()

    def content(self) -> dict[str, Any]:
        """Return a copy of the attributes."""
        own = vars(self.owner)
        if isinstance(own, MappingProxyType):  # a class: only attributes that a program may set, not methods
            return {name: value for name, value in own.items() if not _is_of_class(name, value)}
        return (
            {name: value for name, value in own.items() if name not in self.left_out} if self.left_out else own.copy()
        )

    def fill(self, content: dict[str, Any]) -> None:
        """Replace the attributes."""
        if isinstance(vars(self.owner), MappingProxyType):
            for name in self.content().keys() - content.keys():
                delattr(self.owner, name)
            for name, value in content.items():
                setattr(self.owner, name, value)
        else:
            own = vars(self.owner)
            for name in own.keys() - content.keys() - self.left_out:
                del own[name]
            own.update(content)

    def container(self) -> Any:
        """Return the dict of all attributes, also those in ``left_out``.

        Returns ``None`` for a class, because only `content` leaves out methods and descriptors.
        """
        own = vars(self.owner)
        return None if isinstance(own, MappingProxyType) else own


@dataclass(slots=True)
class Slots(Place):
    """The attributes of an object that are stored in slots."""

    owner: Any
    names: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Return the attributes that are set."""
        found = {}
        for name in self.names:
            try:
                found[name] = object.__getattribute__(self.owner, name)
            except AttributeError:  # not set
                continue
        return found

    def fill(self, content: dict[str, Any]) -> None:
        """Replace the attributes."""
        for name in self.content().keys() - content.keys():
            object.__delattr__(self.owner, name)
        for name, value in content.items():
            object.__setattr__(self.owner, name, value)


@dataclass(slots=True)
class Globals(Place):
    """Some of the global variables of a module."""

    namespace: dict[str, Any]
    names: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Return the variables that are set."""
        return {name: self.namespace[name] for name in self.names if name in self.namespace}

    def fill(self, content: dict[str, Any]) -> None:
        """Replace the variables."""
        for name in self.content().keys() - content.keys():
            del self.namespace[name]
        self.namespace.update(content)


@dataclass(slots=True)
class Closure(Place):
    """The free variables of a function."""

    function: FunctionType

    def content(self) -> dict[str, Any]:
        """Return the variables that are set."""
        found = {}
        for name, cell in zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not filled yet
                continue
        return found

    def fill(self, content: dict[str, Any]) -> None:
        """Replace the variables."""
        for name, cell in zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True):
            if name in content:
                cell.cell_contents = content[name]


@dataclass(slots=True)
class Reached:
    """All objects that some roots reach, each with its name as a program would write it.

    Attributes:
        places: the containers whose content can be copied and restored (see `Place`).
        tensors: parameters, buffers and other tensors, by id; a tensor that is reached twice has its first name.
        arrays: numpy arrays.
        modules: torch modules.
        generators: random number generators, except the global ones of torch, Python and numpy.
        iterators: iterators whose position cannot be restored.
        seen: all visited objects by id; the reference keeps the id from being reused.
    """

    places: list[tuple[str, Place]] = field(default_factory=list)
    tensors: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    arrays: list[tuple[str, numpy.ndarray[Any, Any]]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    iterators: list[tuple[str, Iterator[Any]]] = field(default_factory=list)
    seen: MutableMapping[int, Any] = field(default_factory=dict)

    def add(self, other: Reached) -> None:
        """Add the objects of another search."""
        self.places += other.places
        self.tensors.update(other.tensors)
        self.arrays += other.arrays
        self.modules += other.modules
        self.generators += other.generators
        self.iterators += other.iterators
        self.seen.update(other.seen)


def reached_from(roots: Iterable[tuple[str, Any]], before: Reached | None = None) -> Reached:
    """Search for all objects that some roots reach.

    Args:
        roots: pairs of a name and an object, for example of a model and a loss function.
        before: an earlier search, whose objects are skipped.
    """
    return _Walk({} if before is None else before.seen).follow(roots)


def name_of_item(name: str, key: Any) -> str:
    """Return the name of an item or attribute as a program would write it."""
    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{key if isinstance(key, int) else '...'}]"


def may_hold_state(value: Any) -> bool:
    """Return whether a value is mutable or can contain mutable values."""
    return not isinstance(value, (*_NEVER, type, FunctionType, BuiltinFunctionType)) and not is_of_pass(value)


def is_of_pass(value: Any) -> bool:
    """Return whether a value is a result of a pass, with its graph; saving it would keep much memory alive."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, dict) and type(value) not in {dict, OrderedDict, defaultdict}:  # a model's output class
        return any(map(is_of_pass, [*value.values()]))
    return isinstance(value, tuple) and len(value) <= _MOST_ITEMS and any(map(is_of_pass, value))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two contents of a `Place` hold the identical objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(
            name is key and value is kept for (name, value), (key, kept) in zip(one.items(), other.items(), strict=True)
        )
    return all(map(operator.is_, one, other))


class _Walk:
    """A breadth-first search, so that each object gets its shortest name."""

    def __init__(self, before: Mapping[int, Any]) -> None:
        self.reached = Reached()
        self._before = before
        self._waiting: deque[tuple[str, Any]] = deque()

    def follow(self, roots: Iterable[tuple[str, Any]]) -> Reached:
        self._waiting.extend(roots)
        seen = self.reached.seen
        while self._waiting:
            name, value = self._waiting.popleft()
            if isinstance(value, _NEVER) or id(value) in seen or id(value) in self._before or is_of_pass(value):
                continue
            if len(self.reached.places) >= _MOST_PLACES:
                break
            seen[id(value)] = value
            self._look_into(name, value)
        return self.reached

    def _look_into(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.reached.tensors[id(value)] = name, value
            self._put(name, Attributes(value))
            for kind in hooks.OF_TENSORS:
                kept = getattr(value, kind, None) or {}
                self._waiting.extend((f"a hook of {name}", hook) for hook in kept.values())
        elif isinstance(value, numpy.ndarray):
            self.reached.arrays.append((name, value))
        elif isinstance(value, bytearray | array) or _is_small_memory(value):
            self.reached.places.append((name, Numbers(value)))
        elif isinstance(value, _GENERATORS):
            self.reached.generators.append((name, value))
        elif isinstance(value, partial):
            self._wait(name, {"func": value.func, "args": value.args, "keywords": value.keywords})
        elif isinstance(value, MethodType):
            self._waiting.extend([(name, value.__func__), (name, value.__self__)])
        elif isinstance(value, FunctionType):
            self._look_into_function(name, value)
        elif isinstance(value, list | deque | set | dict | tuple | frozenset):
            self._look_into_items(name, value)
        elif isinstance(value, type):
            self._look_into_class(name, value)
        elif _is_opaque_iterator(value):
            self.reached.iterators.append((name, value))
        else:
            self._look_into_object(name, value)

    def _look_into_items(self, name: str, value: Any) -> None:
        if not isinstance(value, tuple | frozenset):
            self.reached.places.append((name, Items(value)))
        if len(value) > _MOST_ITEMS:
            return
        pairs = (
            [*value.items()] if isinstance(value, dict) else [*enumerate(value)]
        )  # copied first, because other threads may change it
        self._waiting.extend(
            (f"{name}[{key!r}]" if isinstance(key, int | str) else f"{name}[#{number}]", item)
            for number, (key, item) in enumerate(pairs)
        )

    def _look_into_function(self, name: str, function: FunctionType) -> None:
        if is_of_library(function.__module__):
            return
        self._put(name, Closure(function))
        self._put(name, Attributes(function))
        self._wait(name, {one: getattr(function, one) for one in ("__defaults__", "__kwdefaults__")})
        names, space = _names_in(function.__code__), function.__globals__
        own = [one for one in names if one in space]
        self._put("", Globals(space, tuple(own)), f"globals of {function.__qualname__}")
        for module in (space[one] for one in own if isinstance(space[one], ModuleType)):
            if not is_of_library(module.__name__):
                self._put(module.__name__, Globals(vars(module), tuple(one for one in names if one in vars(module))))

    def _look_into_class(self, name: str, kind: type) -> None:
        """Add the attributes of a class, its bases and the functions behind its methods."""
        if is_of_library(kind.__module__):
            return
        self._put(name, Attributes(kind))
        for base in kind.__bases__:
            self._waiting.append((base.__name__, base))
        for method in vars(kind).values():
            function = inspect.unwrap(getattr(method, "__func__", getattr(method, "fget", method)))
            if isinstance(function, FunctionType):
                self._waiting.append((f"{kind.__name__}.{function.__name__}", function))

    def _look_into_object(self, name: str, value: Any) -> None:
        kind = type(value)
        is_config = any(base.__name__ in _CONFIGS for base in kind.__mro__)
        if is_of_library(kind.__module__) and not (is_config or isinstance(value, _FOLLOWED)):
            return
        self._waiting.append((kind.__name__, kind))
        if isinstance(value, nn.Module):
            self._look_into_module(name, value)
        elif _has_attributes(value):
            self._put(name, Attributes(value))
        if names := [one for base in kind.__mro__ for one in _slots_of(base)]:
            self._put(name, Slots(value, tuple(names)))

    def _look_into_module(self, name: str, module: nn.Module) -> None:
        own = vars(module)
        self.reached.modules.append(module)
        for kinds in _OF_NAMES:
            self.reached.seen[id(own[kinds])] = own[kinds]
            self._put(name, Items(own[kinds]), f"{name}.{kinds}")
        self._put(name, Attributes(module, hooks.OF_MODULES))
        kept = [own[kind] for kind in hooks.OF_MODULES & own.keys() if isinstance(own[kind], dict)]
        self.reached.seen.update((id(own[left_out]), own[left_out]) for left_out in hooks.OF_MODULES & own.keys())
        self._waiting.extend((f"a hook of {name}", hook) for of_kind in kept for hook in of_kind.values())

    def _put(self, name: str, place: Place, own_name: str = "") -> None:
        """Add a container, and queue its items for the search. The names of the items begin with ``name``."""
        content = place.content()
        if not content and isinstance(place, Closure | Globals):
            return
        self.reached.places.append((own_name or name, place))
        self._wait(name, content)

    def _wait(self, name: str, content: dict[str, Any]) -> None:
        self._waiting.extend((f"{name}.{key}" if name else key, value) for key, value in content.items())


def _has_attributes(value: Any) -> bool:
    """Return whether a value has a ``__dict__``, without calling ``__getattr__``, which may raise anything."""
    if isinstance(value, threading.local):  # has a dict for each thread
        return True
    try:
        return isinstance(object.__getattribute__(value, "__dict__"), dict)
    except AttributeError:
        return False


def _is_small_memory(value: Any) -> bool:
    """Return whether a value is a writable memoryview or ctypes value of at most `SMALL_BYTES`."""
    if isinstance(value, memoryview):
        return value.c_contiguous and not value.readonly and value.nbytes <= SMALL_BYTES
    return isinstance(value, _IN_C) and ctypes.sizeof(value) <= SMALL_BYTES


def _is_opaque_iterator(value: Any) -> bool:
    """Return whether a value is an iterator whose position cannot be restored.

    An iterator of a Python class stores its position in its attributes, so it can be restored.
    """
    is_opaque = isinstance(value, Iterator) and not _has_attributes(value)
    return is_opaque and not isinstance(value, _POSITIONS_OF_NO_STEP)


def is_of_library(module: str | None) -> bool:
    """Return whether a module belongs to a library whose objects are not searched."""
    name = (module or "").partition(".")[0]
    return name in _LIBRARIES and module != "__main__" and not _is_of_program(name)


@cache
def _is_of_program(name: str) -> bool:
    """Return whether a module named like a library is the user's own file, located next to the program."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or file.startswith(FOLDERS_OF_LIBRARIES):
        return False
    return Path(sys.path[0]).resolve() in Path(file).resolve().parents


def _names_in(code: CodeType) -> list[str]:
    """Return the names of globals and attributes that a function and its nested functions use."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names_in(one)]
    return [*code.co_names, *inner]


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    for slot in (slots,) if isinstance(slots, str) else slots:
        if slot not in {"__dict__", "__weakref__"}:
            is_private = slot.startswith("__") and not slot.endswith("__")
            yield f"_{kind.__name__.lstrip('_')}{slot}" if is_private else slot


def _is_of_class(name: str, value: Any) -> bool:
    """Return whether an attribute of a class is a method, descriptor or dunder, not state."""
    return name.startswith("__") or callable(value) or hasattr(type(value), "__get__")
