"""Inventory of all live tensors in this process, grouped by the owners of their storages.

Run once, after memory has run out. A storage counts once, for its first owner in the following order:

- parameters and buffers of modules
- gradients
- optimizer states
- categories named by the caller
- activations, saved by a graph node of a live tensor
- temporaries, that is, all others

Of memory-mapped files, only written pages count, because these are private to the process.

Does NOT see tensors held only by C++, such as a gradient inside a running backward pass. Tensors saved by graphs beyond
`MOST_NODES` operations are not seen either (`plimsoll.memory.autograd_graph` explains why). Sparse tensors do not
count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.device.cpu.pages import FileMappings
from plimsoll.memory.autograd_graph import has_graph, saved_tensors, storage_key
from plimsoll.memory.dispatch_gaps import accumulating_in_place

MOST_NODES = 20_000


@dataclass(frozen=True)
class Piece:
    """One storage, with the shape and type of a tensor that uses it, and the op that made the tensor (or "")."""

    category: str
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    address: int


@dataclass
class Inventory:
    """The storages on one type of device, each counted for its first owner.

    ``is_whole`` is False if a graph was too large to find all tensors that it saves.
    """

    kind: str
    pieces: list[Piece] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    is_whole: bool = True
    _seen: set[int] = field(default_factory=set)
    _tensors: list[Tensor] = field(default_factory=list)
    _saved: list[Tensor] = field(default_factory=list)
    _files: FileMappings = field(default_factory=FileMappings)

    def claim(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count the storages of these tensors in a category, except storages that are already counted."""
        for tensor in tensors:
            if tensor.device.type != self.kind or (key := storage_key(tensor)) is None or key in self._seen:
                continue
            self._seen.add(key)
            storage = tensor.untyped_storage()
            if storage.device.type != self.kind:  # a fake tensor, which has no memory
                continue
            op = _op_of(tensor)
            shape = tuple(tensor.shape)
            num_bytes = self._files.private_bytes(tensor) if self.kind == "cpu" else storage.nbytes()
            self.pieces.append(Piece(category, num_bytes, shape, tensor.dtype, op, storage.data_ptr()))

    def claim_rest(self) -> None:
        """Count the remaining storages as activations and temporaries, after the caller has claimed known tensors."""
        self.claim(self._saved, "activations")
        self.claim(self._tensors, "temporaries")
        self._saved, self._tensors = [], []

    def claimed(self) -> set[int]:
        """Return the keys (`storage_key`) of the storages counted so far."""
        return set(self._seen)

    def saved_by_graphs(self) -> set[int]:
        """Return the keys (`storage_key`) of the storages that graphs save for backward; empty after `claim_rest`."""
        return {key for one in self._saved if (key := storage_key(one)) is not None}

    def bytes_of(self, category: str) -> int:
        """Return the total bytes of a category."""
        return sum(piece.num_bytes for piece in self.pieces if piece.category == category)


def inventory_begun(kind: str) -> Inventory:
    """Return an unfinished inventory of this process: parameters, buffers, gradients and optimizer states.

    The caller can claim more tensors, and completes the inventory with `Inventory.claim_rest`.

    Args:
        kind: device type, such as ``"cpu"``; tensors on other devices do not count.
    """
    found = _alive(kind)
    found.claim((one for module in found.modules for one in _own(module._parameters)), "parameters")
    found.claim((one for module in found.modules for one in _own(module._buffers)), "buffers")
    # For a non-leaf tensor, torch warns when ``grad`` is read.
    found.claim((one.grad for one in found._tensors if one.is_leaf and one.grad is not None), "gradients")
    states = (value for optimizer in found.optimizers for value in _states(optimizer))
    found.claim(states, "optimizer states")
    nodes, found.is_whole = graph_nodes(found._tensors, MOST_NODES)
    found._saved = list(saved_tensors(nodes))
    return found


def inventory(kind: str, named: Mapping[str, Iterable[Tensor]] = MappingProxyType({})) -> Inventory:
    """Return an inventory of all live tensors of this process.

    Args:
        kind: device type, such as ``"cpu"``; tensors on other devices do not count.
        named: tensors whose category the caller knows, by category.
    """
    found = inventory_begun(kind)
    for category, own in named.items():
        found.claim(own, category)
    found.claim_rest()
    return found


def graph_nodes(tensors: Iterable[Tensor], most_nodes: int) -> tuple[list[Any], bool]:
    """Return about ``most_nodes`` nodes at most of the graph that computed tensors, and whether these are all nodes."""
    nodes = {tensor.grad_fn: None for tensor in tensors if has_graph(tensor)}
    waiting: list[Any] = list(nodes)
    while waiting and len(nodes) < most_nodes:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in nodes:
                nodes[following] = None
                waiting.append(following)
    return list(nodes), not waiting


def _alive(kind: str) -> Inventory:
    """Find live tensors, modules and optimizers. Types are compared, because `isinstance` may fail for proxies."""
    found = Inventory(kind)
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):
            found._tensors.append(one)
        elif issubclass(type(one), nn.Module):
            found.modules.append(one)
        elif issubclass(type(one), torch.optim.Optimizer):
            found.optimizers.append(one)
    return found


def _own(entries: Any) -> Iterator[Tensor]:
    return (value for value in entries.values() if isinstance(value, Tensor))


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in getattr(optimizer, "state", {}).values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (value for value in values if isinstance(value, Tensor))


def _op_of(tensor: Tensor) -> str:
    """Return the name of the op that made a tensor, such as ``softmax``, taken from its backward node."""
    if not has_graph(tensor):
        return ""
    name = str(tensor.grad_fn.name()).rpartition("::")[2]  # type: ignore[union-attr]
    return name.rstrip("0123456789").removesuffix("Backward").lower()


_LEAST_BYTES = 64 << 10
_MOST_ADDRESSES = 200_000


class Births(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the line of user code that made each storage, by address.

    The last entry of an address is valid while its storage lives. Only results that share no storage with an argument
    are recorded. Each op costs a stack walk of 10 to 20 microseconds, so use this for a diagnosis only. Gradients on
    CUDA are made in another thread and are not seen.

    Args:
        line_of: returns the current line of user code.
    """

    def __init__(self, line_of: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[int, str] = {}
        self._line_of = line_of
        self._run = accumulating_in_place(lambda op, args, kwargs: op(*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an op and record its results."""
        result = self._run(func, args, kwargs or {})
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor) and one.layout is torch.strided:
                self._note(one, args)
        return result

    def _note(self, made: Tensor, args: tuple[Any, ...]) -> None:
        storage = made.untyped_storage()
        if storage.nbytes() < _LEAST_BYTES:
            return
        address = storage.data_ptr()
        given = (one for one in args if isinstance(one, Tensor) and one.layout is torch.strided)
        if any(one.untyped_storage().data_ptr() == address for one in given):
            return
        if len(self.lines) >= _MOST_ADDRESSES:
            self.lines.pop(next(iter(self.lines)))
        self.lines[address] = self._line_of()
