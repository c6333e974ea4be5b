"""Everything in which training code can keep something: what is reached from a model, its loss and its optimizer.

Followed are attributes, lists, dicts, sets and deques, variables that a function closes over, its defaults, globals
that it names (of the modules that it names, too), what methods and partials are bound to, hooks of modules, tensors
and optimizers, and class attributes. Each of these is a `Place`, whose content can be copied (one level, not what is
in it) and put back.

Not followed: objects of libraries (`_LIBRARIES`) other than modules, optimizers and schedules (of one's own subclass of
a trainer its attributes are), data loaders and data sets, whose position is not a step's, and what only C code, an
iterator or a running function holds; iterators are noted. A container of more than `_MOST_ITEMS` items is copied but
not looked through, and after `_MOST_PLACES` places nothing more is.
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
"""Of transformers, which is not imported for it: BERT's first pass sets ``problem_type``."""
_NEVER = (
    str, bytes, int, float, complex, type(None), CodeType, ModuleType, torch.dtype, torch.device, torch.Size,
    torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler, torch.amp.GradScaler,
)  # fmt: skip
_POSITIONS_OF_NO_STEP = (io.IOBase, _BaseDataLoaderIter)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_OF_NAMES = ("_parameters", "_buffers", "_modules")
"""Dicts of every module whose items are named as its attributes."""
SMALL_BYTES = 1 << 20
"""Arrays and tensors up to this size may be copied in each step without anybody having seen them change."""
_MOST_ITEMS = 10_000
_MOST_PLACES = 50_000


class Place(ABC):
    """Something whose content can be exchanged."""

    @abstractmethod
    def content(self) -> Any:
        """Copy the content, not what is in it."""

    @abstractmethod
    def fill(self, content: Any) -> None:
        """Have this content again."""

    def container(self) -> Any:
        """Return what is the content, perhaps with more that `fill` takes; ``None`` where it has to be made."""
        return None


@dataclass(slots=True)
class Items(Place):
    """A list, a deque, a set or a dict."""

    items: Any

    def content(self) -> Any:
        """Copy the items."""
        return dict(self.items) if isinstance(self.items, dict) else list(self.items)

    def fill(self, content: Any) -> None:
        """Have these items again."""
        container = self.items
        kind: Any = next(one for one in (OrderedDict, dict, list, deque, set) if isinstance(container, one))
        kind.clear(container)  # a subclass may forbid it, or do more
        if isinstance(container, dict):
            for key, value in content.items():
                kind.__setitem__(container, key, value)
        else:
            (kind.update if isinstance(container, set) else kind.extend)(container, content)

    def container(self) -> Any:
        """Return it, where iterating does what Python's own does."""
        return self.items if type(self.items) in {dict, OrderedDict, list, deque, set} else None


@dataclass(slots=True)
class Numbers(Place):
    """A bytearray, an array of Python's own, a view of memory, or a value of ctypes."""

    numbers: Any
    _last: bytes = b""

    def content(self) -> list[bytes]:
        """Copy the numbers as bytes, which are the same object as long as the numbers are the same."""
        now = memoryview(self.numbers).tobytes()
        self._last = self._last if now == self._last else now
        return [self._last]

    def fill(self, content: Any) -> None:
        """Have these numbers again."""
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
    """The attributes of an object or a class, but for those to be left out."""

    owner: Any
    left_out: frozenset[str] = frozenset()

    def content(self) -> dict[str, Any]:
        """Copy the attributes."""
        own = vars(self.owner)
        if isinstance(own, MappingProxyType):  # of a class: what a program may set, not its methods
            return {name: value for name, value in own.items() if not _is_of_class(name, value)}
        return (
            {name: value for name, value in own.items() if name not in self.left_out} if self.left_out else own.copy()
        )

    def fill(self, content: dict[str, Any]) -> None:
        """Have these attributes again."""
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
        """Return the attributes, with what is left out as well; those of a class are chosen from."""
        own = vars(self.owner)
        return None if isinstance(own, MappingProxyType) else own


@dataclass(slots=True)
class Slots(Place):
    """The attributes of an object that has slots for them."""

    owner: Any
    names: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Copy the attributes that are set."""
        found = {}
        for name in self.names:
            try:
                found[name] = object.__getattribute__(self.owner, name)
            except AttributeError:  # not set
                continue
        return found

    def fill(self, content: dict[str, Any]) -> None:
        """Have these attributes again."""
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
        """Copy the variables that are set."""
        return {name: self.namespace[name] for name in self.names if name in self.namespace}

    def fill(self, content: dict[str, Any]) -> None:
        """Have these variables again."""
        for name in self.content().keys() - content.keys():
            del self.namespace[name]
        self.namespace.update(content)


@dataclass(slots=True)
class Closure(Place):
    """The variables of its surroundings that a function names."""

    function: FunctionType

    def content(self) -> dict[str, Any]:
        """Copy the variables that are set."""
        found = {}
        for name, cell in zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not filled yet
                continue
        return found

    def fill(self, content: dict[str, Any]) -> None:
        """Have these variables again."""
        for name, cell in zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True):
            if name in content:
                cell.cell_contents = content[name]


@dataclass(slots=True)
class Reached:
    """What is reached from some roots, each with its name as a program would write it.

    Attributes:
        places: what has a content.
        tensors: parameters, buffers and others; of one that is reached twice the first name.
        arrays: of numpy.
        modules: of torch.
        generators: of random numbers, but for torch's, Python's and numpy's global ones.
        iterators: what has a position that cannot be put back.
        seen: all that was looked at, by its id, and kept for the id to stay its own.
    """

    places: list[tuple[str, Place]] = field(default_factory=list)
    tensors: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    arrays: list[tuple[str, numpy.ndarray[Any, Any]]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    iterators: list[tuple[str, Iterator[Any]]] = field(default_factory=list)
    seen: MutableMapping[int, Any] = field(default_factory=dict)

    def add(self, other: Reached) -> None:
        """Take what was reached besides."""
        self.places += other.places
        self.tensors.update(other.tensors)
        self.arrays += other.arrays
        self.modules += other.modules
        self.generators += other.generators
        self.iterators += other.iterators
        self.seen.update(other.seen)


def reached_from(roots: Iterable[tuple[str, Any]], before: Reached | None = None) -> Reached:
    """Follow what is kept in the roots, a model and a loss function for example, but for what was reached before."""
    return _Walk({} if before is None else before.seen).follow(roots)


def name_of_item(name: str, key: Any) -> str:
    """Name an item or an attribute as a program would."""
    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{key if isinstance(key, int) else '...'}]"


def may_hold_state(value: Any) -> bool:
    """Whether a value can be changed in place, or have something in it that can."""
    return not isinstance(value, (*_NEVER, type, FunctionType, BuiltinFunctionType)) and not is_of_pass(value)


def is_of_pass(value: Any) -> bool:
    """Whether a value is what a pass has computed, with its graph, and would keep much memory alive if it were kept."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, dict) and type(value) not in {dict, OrderedDict, defaultdict}:  # what a model returns
        return any(map(is_of_pass, [*value.values()]))
    return isinstance(value, tuple) and len(value) <= _MOST_ITEMS and any(map(is_of_pass, value))


def is_same(one: Any, other: Any) -> bool:
    """Whether two contents have the very same things in them, in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(
            name is key and value is kept for (name, value), (key, kept) in zip(one.items(), other.items(), strict=True)
        )
    return all(map(operator.is_, one, other))


class _Walk:
    """One walk, first what is near: a name is then the shortest."""

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
        )  # at once, for threads may change it
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
        """Its attributes, and what its methods name."""
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
        """Note a place, and look into what is in it, each by its name after ``name``."""
        content = place.content()
        if not content and isinstance(place, Closure | Globals):
            return
        self.reached.places.append((own_name or name, place))
        self._wait(name, content)

    def _wait(self, name: str, content: dict[str, Any]) -> None:
        self._waiting.extend((f"{name}.{key}" if name else key, value) for key, value in content.items())


def _has_attributes(value: Any) -> bool:
    """Whether a value has a dict of attributes, without asking a ``__getattr__`` that may raise anything."""
    if isinstance(value, threading.local):  # which has one for each thread
        return True
    try:
        return isinstance(object.__getattribute__(value, "__dict__"), dict)
    except AttributeError:
        return False


def _is_small_memory(value: Any) -> bool:
    """Whether a value is a view of memory that can be written, or one of ctypes, and may be copied in each step."""
    if isinstance(value, memoryview):
        return value.c_contiguous and not value.readonly and value.nbytes <= SMALL_BYTES
    return isinstance(value, _IN_C) and ctypes.sizeof(value) <= SMALL_BYTES


def _is_opaque_iterator(value: Any) -> bool:
    """Whether a value has a position that nobody can put back: one of a class in Python has it in its attributes."""
    is_opaque = isinstance(value, Iterator) and not _has_attributes(value)
    return is_opaque and not isinstance(value, _POSITIONS_OF_NO_STEP)


def is_of_library(module: str | None) -> bool:
    """Whether a module is of a library whose objects are not looked into."""
    name = (module or "").partition(".")[0]
    return name in _LIBRARIES and module != "__main__" and not _is_of_program(name)


@cache
def _is_of_program(name: str) -> bool:
    """Whether a module with the name of a library is the program's own, which lies beside it."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or file.startswith(FOLDERS_OF_LIBRARIES):
        return False
    return Path(sys.path[0]).resolve() in Path(file).resolve().parents


def _names_in(code: CodeType) -> list[str]:
    """The names of globals and attributes in a function, and in those that are made in it."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names_in(one)]
    return [*code.co_names, *inner]


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    for slot in (slots,) if isinstance(slots, str) else slots:
        if slot not in {"__dict__", "__weakref__"}:
            is_private = slot.startswith("__") and not slot.endswith("__")
            yield f"_{kind.__name__.lstrip('_')}{slot}" if is_private else slot


def _is_of_class(name: str, value: Any) -> bool:
    """Whether an attribute of a class was written in its definition and is not for values."""
    return name.startswith("__") or callable(value) or hasattr(type(value), "__get__")
