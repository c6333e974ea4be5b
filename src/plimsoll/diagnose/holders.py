"""Values that the variables of user code keep alive: containers, arrays and tensors with a graph, with their sizes.

The search starts at the given frames: local variables, global variables of their modules, attributes of modules and
plain objects, and containers in them, to a depth of four. Containers of up to `_FEW` items are searched item by item;
larger ones count as one value. The size of a large container is extrapolated from 500 evenly spaced items. The graphs
of a value's tensors are walked up to `_MOST_NODES` operations. The other graphs are assumed to be as large on average.

Not handled: variables of functions that have returned, generators, objects that only C++ keeps alive, and buffers of
other libraries without ``nbytes``. Optimizers and the parameters of modules do not count.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from plimsoll.diagnose.evidence import Kept
from plimsoll.memory.autograd_graph import has_graph, saved_tensors, storage_bytes, storage_key
from plimsoll.memory.inventory import graph_nodes
from plimsoll.step.retained.assignments import Assignment, assignment_of
from plimsoll.step.retained.tensors import OF_TORCH, attributes_of

_DEEPEST, _FEW, _SAMPLE = 4, 16, 500
_INNER_SAMPLE = 32  # items for each container inside an item
_MOST_NODES = 10_000
_NODE_BYTES = 1024  # host memory, see `plimsoll.diagnose.causes.graph_kept`
_LEAST_BYTES = 64 << 10
_SIZED = ("numpy", "pyarrow", "array", "builtins", "scipy")  # libraries whose objects have ``nbytes``
CONTAINERS = (list, tuple, deque, set, frozenset, dict)
"""Types that are searched item by item."""
_LEAVES = (int, float, complex, type(None), type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, FrameType)


class Found(NamedTuple):
    """A value that user code keeps alive.

    Attributes:
        name: the full expression for the value, such as ``model.cache["loss"]``.
        variable: the name of the variable or attribute that contains the value, such as ``cache``.
        owners: if ``variable`` is an attribute, the objects that contain it, innermost first. The code that may
            assign the variable follows.
        value: the value.
        root_name: the expression for the variable or attribute, such as ``model.cache``.
        root_value: the value of the variable or attribute, which contains ``value`` or is ``value``.
    """

    name: str
    variable: str
    owners: tuple[Any, ...]
    value: Any
    root_name: str = ""
    root_value: Any = None

    @property
    def num_items(self) -> int:
        """The number of items if the value is a container, otherwise 1."""
        return len(self.value) if isinstance(self.value, CONTAINERS) else 1


class _Size(NamedTuple):
    """Size of a value, of which only a sample of the items may have been examined.

    ``host_bytes`` are the bytes of sampled objects other than tensors, ``tensors`` the sampled tensors. Multiplied by
    ``factor``, they are estimates for all items.
    """

    host_bytes: int
    tensors: list[Tensor]
    factor: float


def found_in(frames: Iterable[FrameType]) -> list[Found]:
    """Find the values that the variables of frames keep alive, in the order of the frames."""
    seen: set[int] = set()
    found: list[Found] = []
    for frame in frames:
        for name, value, owners in variables_of(frame, seen):
            found += _walk(Found(name, name, owners, value, name, value), seen)
    return found


def variables_of(frame: FrameType, seen: set[int]) -> Iterator[tuple[str, Any, tuple[CodeType, ...]]]:
    """Yield name and value of the variables of a frame and of its module, each with the code that may assign it.

    Args:
        frame: the frame.
        seen: ids of the scopes (dictionaries of variables) to skip. The function adds the scopes of this frame.
    """
    code = frame.f_code
    for scope, owners in ((frame.f_locals, (code,)), (frame.f_globals, (code, _whole_file(code)))):
        if id(scope) not in seen:
            seen.add(id(scope))
            yield from ((name, value, owners) for name, value in list(scope.items()) if not name.startswith("__"))


def lengths_of(found: Iterable[Found]) -> dict[int, int]:
    """Return the number of items of each found value. The keys are the ids of the values."""
    return {id(one.value): one.num_items for one in found}


def kept_by(
    found: Iterable[Found],
    lengths_before: Mapping[int, int],
    borders: Sequence[int],
    kind: str = "cpu",
    used: Iterable[int] = (),
) -> list[Kept]:
    """Return the found values with their sizes, largest first.

    Args:
        found: the result of `found_in`.
        lengths_before: the result of an earlier `lengths_of`, for `Kept.num_items_before`.
        borders: number of operations that autograd had recorded at the end of each step, ascending.
        kind: kind of the device that is explained. Tensors on other devices do not count. Objects other than tensors
            only count on the CPU.
        used: keys of storages that do not count (see `storage_key`).
    """
    seen: set[int | None] = {None, *used}
    kept = [_kept(one, lengths_before, borders, kind, seen) for one in found if not isinstance(one.value, nn.Module)]
    return sorted((one for one in kept if one.num_bytes >= _LEAST_BYTES), key=lambda one: -one.num_bytes)


def stored(found: Found) -> Assignment:
    """Return the line of user code that assigns a value to its variable or attribute.

    If the line was not found, all fields of the result are empty.
    """
    owners = found.owners
    of_graph = assignment_of(owners, found.variable, found.value)
    store = of_graph or assignment_of(owners, found.variable, found.value, True)
    if store is None and "." in found.root_name and isinstance(owners[-1], CodeType):  # __init__ returned
        store = assignment_of([_whole_file(owners[-1])], f".{found.variable}", found.value, True)
    return store or Assignment("", "", "")


def _whole_file(code: CodeType) -> CodeType:
    """Return a code object for which `inspect` returns the whole file."""
    return code.replace(co_name="<module>")


def _walk(found: Found, seen: set[int], depth: int = 0) -> Iterator[Found]:
    value, kind = found.value, type(found.value)
    if issubclass(kind, _LEAVES) or issubclass(kind, nn.Parameter | torch.optim.Optimizer) or id(value) in seen:
        return
    seen.add(id(value))
    if issubclass(kind, CONTAINERS):
        yield from _of_container(found, seen, depth)
    elif issubclass(kind, Tensor) or _own_bytes(value) >= _LEAST_BYTES:
        yield found
    elif depth < _DEEPEST:
        if issubclass(kind, nn.Module):
            yield found
        for inner, item in _named(value):
            name, last = f"{found.name}.{inner}", inner.rpartition(".")[2]
            yield from _walk(Found(name, last, (value, *found.owners), item, name, item), seen, depth + 1)


def _of_container(found: Found, seen: set[int], depth: int) -> Iterator[Found]:
    value = found.value
    if len(value) > _FEW or depth >= _DEEPEST:
        yield found
        return
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    if not pairs or any(not isinstance(item, CONTAINERS) and _is_leaf(item) for _, item in pairs):
        yield found
    for key, item in pairs:
        if not isinstance(item, Tensor | str | bytes):
            yield from _walk(found._replace(name=f"{found.name}[{key!r:.40}]", value=item), seen, depth + 1)


def _is_leaf(item: Any) -> bool:
    """Return whether an item is counted with its container: a tensor, a text, or an object without attributes."""
    return isinstance(item, Tensor | str | bytes) or not hasattr(item, "__dict__")


def _named(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the attributes of an object, by name.

    For a module, the attributes of its submodules are included, but no attribute that torch defines.
    """
    if not isinstance(value, nn.Module):
        return attributes_of(value)
    parts = [(path, part) for path, part in value.named_modules() if path]
    own = [(name, item) for name, item in attributes_of(value) if name not in OF_TORCH]
    own += [
        (f"{path}.{name}", item) for path, part in parts for name, item in attributes_of(part) if name not in OF_TORCH
    ]
    return own


def _own_bytes(value: Any) -> int:
    """Return the size that an array, table or text itself reports, in bytes; 0 for other values."""
    if isinstance(value, str | bytes | bytearray):
        return sys.getsizeof(value)
    num_bytes = getattr(value, "nbytes", None) if type(value).__module__.partition(".")[0] in _SIZED else None
    return num_bytes if isinstance(num_bytes, int) else 0


def _kept(one: Found, before: Mapping[int, int], borders: Sequence[int], kind: str, seen: set[int | None]) -> Kept:
    size = _size(one.value)
    if kind != "cpu":
        size = size._replace(host_bytes=0)
    there = [tensor for tensor in size.tensors if tensor.device.type == kind]
    tensors = [tensor for tensor in there if storage_key(tensor) not in seen]
    graphs = [tensor for tensor in there if has_graph(tensor)]
    tensor_bytes = storage_bytes(tensors)
    seen |= {storage_key(tensor) for tensor in tensors}
    graph_bytes, oldest = _graph(graphs, seen)
    owners = [owner for owner in one.owners if isinstance(owner, Dataset | DataLoader)]
    is_large = size.host_bytes * size.factor + tensor_bytes * size.factor + graph_bytes >= _LEAST_BYTES
    store = stored(one) if is_large else Assignment("", "", "")
    return Kept(
        name=one.name,
        kind=type(one.value).__name__,
        num_items=one.num_items,
        num_items_before=before.get(id(one.value)),
        tensor_bytes=round(tensor_bytes * size.factor),
        graph_bytes=round(graph_bytes * size.factor),
        host_bytes=round(size.host_bytes * size.factor),
        is_estimated=size.factor > 1,
        num_graphs=len(graphs),
        num_steps_back=sum(border > oldest for border in borders) if oldest is not None else 0,
        is_of_data=bool(owners) or isinstance(one.value, Dataset | DataLoader),
        is_made_at_once=id(one.value) not in before and _is_made_at_once(one.value, store),
        **store._asdict(),
    )


def _is_made_at_once(value: Any, store: Assignment) -> bool:
    """Return whether a container was probably created with all its items, as a batch is.

    This is assumed for a tuple, a small dict with text keys, or a small container that no assignment stores.
    """
    if isinstance(value, tuple):
        return True
    is_named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return len(value) <= _FEW and (is_named or not store.place) if isinstance(value, CONTAINERS) else False


def _graph(tensors: list[Tensor], without: set[int | None]) -> tuple[int, int | None]:
    """Return the bytes of the graphs of some tensors, and the sequence number of their oldest operation.

    The number is ``None`` if the graphs have no operations. Tensors whose storage keys are in ``without`` do not count.
    """
    own = set(without)
    num_nodes = num_done = saved_bytes = 0
    oldest: int | None = None
    known: set[Any] = set()
    for tensor in tensors:
        if num_nodes >= _MOST_NODES:
            break
        nodes, _ = graph_nodes([tensor], _MOST_NODES)
        new = [node for node in nodes if node not in known]
        known.update(new)
        num_nodes, num_done = num_nodes + len(new), num_done + 1
        for one in saved_tensors(new):
            if (key := storage_key(one)) not in own:
                own.add(key)
                saved_bytes += one.untyped_storage().nbytes()
        numbers = [node._sequence_nr() for node in new]
        oldest = min([*numbers, *([oldest] if oldest is not None else [])], default=None)
    factor = len(tensors) / num_done if num_done else 0
    return round((saved_bytes + num_nodes * _NODE_BYTES) * factor), oldest


def _size(value: Any, depth: int = 0, seen: set[int] | None = None) -> _Size:
    """Measure a value and its items, from a sample of the items if there are many. Each object counts once."""
    seen = set() if seen is None else seen
    if isinstance(value, _LEAVES):
        return _of_object(value, depth, seen)  # not added to `seen`: there may be millions of numbers
    if id(value) in seen or depth > 2 * _DEEPEST:
        return _Size(0, [], 1.0)
    seen.add(id(value))
    if isinstance(value, Tensor):
        return _Size(0, [] if isinstance(value, nn.Parameter) else [value], 1.0)
    if not isinstance(value, CONTAINERS):
        return _of_object(value, depth, seen)
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    most = _SAMPLE if depth == 0 else _INNER_SAMPLE
    taken = items[:: max(1, len(items) // most)]
    inner = [_size(item, depth + 1, seen) for item in taken]
    factor = len(items) / len(taken) if taken else 1.0
    host_bytes = sum(one.host_bytes * one.factor for one in inner) * (factor if depth else 1)
    tensors = [tensor for one in inner for tensor in one.tensors]
    own_bytes = sys.getsizeof(value)
    if depth:
        return _Size(round(host_bytes) + own_bytes, tensors, 1.0)
    return _Size(round(host_bytes + own_bytes / factor), tensors, factor)


def _of_object(value: Any, depth: int, seen: set[int]) -> _Size:
    if isinstance(value, _LEAVES):
        is_shared = isinstance(value, bool | type | type(None)) or (isinstance(value, int) and -6 < value < 257)
        return _Size(0 if is_shared or callable(value) else sys.getsizeof(value), [], 1.0)
    if num_bytes := _own_bytes(value):
        return _Size(num_bytes, [], 1.0)
    inner = [_size(item, depth + 1, seen) for _, item in attributes_of(value)] if depth < _DEEPEST else []
    own_bytes = 64 + sum(round(one.host_bytes * one.factor) for one in inner)
    return _Size(own_bytes, [tensor for one in inner for tensor in one.tensors], 1.0)
