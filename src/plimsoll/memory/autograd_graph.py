"""Size of autograd's graph behind tensors, and the number of its nodes that are alive during a training run.

Size: after a backward pass, the nodes live as long as a tensor refers to them, but their saved tensors are freed. A
graph without a backward pass keeps its saved tensors. Reading ``_raw_saved_*`` of a node and ``SavedTensor.data``
unpacks nothing (``_saved_*`` would call the hooks of offloading). If torch has no ``SavedTensor.data``, the bytes are
unknown. Not seen: memory of C++ nodes, and tensors replaced by hooks (these are not on the device).

Nodes: a node with its saved variables, edges and tensor objects of views takes small blocks of host memory
(`heap_calls.NODE_OBJECTS_BYTES`). A transformer has some 10^3 nodes. An unrolled recurrent net has some 10 for each
step of its sequence. With few samples and narrow hidden states, this exceeds the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

# A walk leaves a Python object in every visited node while the node lives, and torch frees a chain of such nodes by
# recursion. At 50,000 nodes the process crashes (torch 2.13, 8 MiB of stack); 40,000 worked. A caller walks a growing
# graph only a few times.
MOST_NODES = 4000
_RAW = "_raw_saved_"


class GraphSize(NamedTuple):
    """The number of nodes of an autograd graph, and the bytes of the storages that they save for backward.

    ``saved_bytes`` is ``None`` if torch does not expose the saved tensors.
    """

    num_nodes: int
    saved_bytes: int | None


def has_graph(tensor: Tensor) -> bool:
    """Return whether autograd recorded how a tensor was computed. Reading ``grad_fn`` would create a Python object."""
    return bool(tensor.requires_grad and not tensor.is_leaf)


def storage_key(tensor: Tensor) -> int | None:
    """Return a key that identifies a live storage; ``None`` for a tensor without one, such as a sparse tensor."""
    if tensor.layout is not torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Return the total bytes of distinct storages of ``tensors``, except storages used by ``without``."""
    seen = {storage_key(tensor) for tensor in without} | {None}
    total = 0
    for tensor in tensors:
        if (key := storage_key(tensor)) not in seen:
            seen.add(key)
            total += tensor.untyped_storage().nbytes()
    return total


def graph_size(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> GraphSize | None:
    """Measure the autograd graph that computed ``tensors``.

    Args:
        tensors: tensors with a graph.
        without: tensors whose storages do not count, such as the parameters.

    Returns:
        The size of the graph; ``None`` if it has more than `MOST_NODES` operations.
    """
    nodes = {tensor.grad_fn for tensor in tensors if has_graph(tensor)}
    waiting: list[Any] = list(nodes)
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in nodes:
                nodes.add(following)
                waiting.append(following)
        if len(nodes) > MOST_NODES:
            return None
    return GraphSize(len(nodes), _saved_bytes(nodes, without))


def saved_tensors(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that nodes still save for backward, as far as torch exposes them."""
    for node in nodes:
        for one in _raw_saved(node):
            if isinstance(data := getattr(one, "data", None), Tensor):
                yield data
        yield from (value for value in getattr(node, "__dict__", {}).values() if isinstance(value, Tensor))


def _saved_bytes(nodes: Iterable[Any], without: Iterable[Tensor]) -> int | None:
    saved: list[Tensor] = []
    for node in nodes:
        for one in _raw_saved(node):
            if not hasattr(one, "data"):
                return None
            if isinstance(one.data, Tensor):  # skip tensors that a hook replaced or backward freed
                saved.append(one.data)
        saved += [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, Tensor)]
    return storage_bytes(saved, without)


def _raw_saved(node: Any) -> Iterator[Any]:
    """Yield the raw saved tensors of a node. Each ``_raw_saved_*`` attribute has one such tensor or a tuple."""
    for name in dir(type(node)):
        if name.startswith(_RAW):
            try:
                value = getattr(node, name)
            except RuntimeError:  # nodes of Python functions raise if freed; built-in nodes have None
                continue
            yield from value if isinstance(value, tuple) else (value,) if value is not None else ()


_OUTSIDE = -1  # outside any backward pass
_AGAIN = -2  # a repeated pass

_Place = tuple[int, int]  # a backward pass and its running node, both -1 outside backward


class NotedNodes(NamedTuple):
    """Records ``(birth, death, number)`` of nodes, and whether a backward pass is running.

    Each record is for ``number`` nodes. ``birth`` is the row of the op that made them. ``death`` is the row of the op
    at which they had been freed; -1 while they are alive.
    """

    nodes: list[tuple[int, int, int]]
    is_running: bool


class Graphs:
    """Tracker of live autograd nodes, based on private counters of torch. `see` is called as each op begins.

    Nodes of a forward pass live until the following backward pass ends. Nodes of a recomputation are made inside a node
    of a backward pass, and live until that pass continues with another node. Not covered: graphs kept for a second
    backward pass, and graphs without a backward pass (these count as alive until the next backward pass ends).
    """

    def __init__(self) -> None:
        self._num_made = torch._C._autograd._get_sequence_nr()
        self._pass = _OUTSIDE
        self._open: dict[_Place, list[int]] = {}  # rows of `_nodes`, by the place where the nodes were made
        self._nodes: list[list[int]] = []

    def see(self, op_row: int) -> None:
        """Record the nodes made since the last op, including the node of this op, and the nodes freed since."""
        current, num_made = torch._C._current_graph_task_id(), torch._C._autograd._get_sequence_nr()
        place = current, _OUTSIDE if current == _OUTSIDE else _running_node()
        if current == _OUTSIDE != self._pass:
            self._end(op_row, list(self._open))
        elif current != _OUTSIDE:
            self._end(op_row, [one for one in self._open if one[0] == current and one != place])
        if num_made > self._num_made:
            self._open.setdefault(place, []).append(len(self._nodes))
            self._nodes.append([op_row, -1, num_made - self._num_made])
        self._pass, self._num_made = current, num_made

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Ignore nodes that are made in the block."""
        num_made = torch._C._autograd._get_sequence_nr()
        yield
        self._num_made += torch._C._autograd._get_sequence_nr() - num_made

    @property
    def num_noted(self) -> int:
        """Number of node records so far."""
        return len(self._nodes)

    def noted(self, begin: int) -> NotedNodes:
        """Return the records of nodes from index ``begin`` on."""
        return NotedNodes([(made, gone, num) for made, gone, num in self._nodes[begin:]], self._pass != _OUTSIDE)

    def note_again(self, noted: NotedNodes, begin: int, shift: int) -> None:
        """Record ``noted`` once more, ``shift`` rows later. The first repeated op is in row ``begin``."""
        current = torch._C._current_graph_task_id()
        is_inside = current != _OUTSIDE  # nodes of a recomputation, which end with the next op
        if is_inside:
            self._end(begin, [one for one in self._open if one[0] == current])
        elif self._pass != _OUTSIDE:
            self._end(begin, list(self._open))
        last = max((gone for _, gone, _ in noted.nodes), default=-1)
        if not is_inside and not noted.is_running and last >= 0:  # the end of a backward pass ends all older nodes
            self._end(last + shift, list(self._open))
        still = [row for row, (_, gone, _) in enumerate(noted.nodes, start=len(self._nodes)) if gone < 0]
        self._nodes += [[made + shift, gone + shift if gone >= 0 else gone, num] for made, gone, num in noted.nodes]
        if still:
            self._open.setdefault((current, _AGAIN if is_inside else _OUTSIDE), []).extend(still)
        if not is_inside:
            self._pass = _AGAIN if noted.is_running else _OUTSIDE

    def nodes(self) -> tuple[tuple[int, int, int], ...]:
        """Return all node records, in the form described in `NotedNodes`."""
        return tuple((made, gone, number) for made, gone, number in self._nodes)

    def _end(self, op_row: int, places: list[_Place]) -> None:
        for place in places:
            for row in self._open.pop(place):
                self._nodes[row][1] = op_row


def _running_node() -> int:
    node = torch._C._current_autograd_node()
    return _OUTSIDE if node is None else int(node._sequence_nr())


def calls_by_itself() -> bool:
    """Return whether autograd's engine calls the next op, rather than a recomputation or a custom backward function."""
    if torch._C._current_graph_task_id() == _OUTSIDE or torch.is_grad_enabled():
        return False
    return not isinstance(torch._C._current_autograd_node(), BackwardCFunction)
