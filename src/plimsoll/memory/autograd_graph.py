"""Autograd's graph: how large it is behind some tensors, and how many nodes of it are alive while a training runs.

Size: after a backward pass the operations stay as long as a tensor of theirs does, and what they saved is freed; what
was never passed through keeps that too. ``_raw_saved_*`` of a node and ``SavedTensor.data`` unpack nothing
(``_saved_*`` would call the hooks of an offload); where torch has no ``data``, the bytes are unknown. Not seen: memory
of nodes written in C++, and what hooks have put in the place of a tensor (it is not on the device).

Nodes: a node and what hangs on it (its saved variables, its edges, the tensor objects of views) are small blocks of the
host's memory (`heap_calls.NODE_OBJECTS_BYTES`). A transformer has some 10^3 of them, a recurrent net that is unrolled
some 10 for each step of its sequence, which is more than its activations if samples are few and hidden states narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

# A walk leaves a Python object in every node it sees, for as long as the node lives, and torch frees a chain of such
# nodes by recursion: of 50,000 the process dies (torch 2.13, 8 MiB of stack; 40,000 went well). A caller walks a graph
# that grows a few times only.
MOST_NODES = 4000
_RAW = "_raw_saved_"


class GraphSize(NamedTuple):
    """The operations of a graph, and the bytes of the storages they save; ``None`` where torch does not say."""

    num_nodes: int
    saved_bytes: int | None


def has_graph(tensor: Tensor) -> bool:
    """Whether a tensor was computed with a graph; unlike ``grad_fn``, this makes no Python object for the node."""
    return bool(tensor.requires_grad and not tensor.is_leaf)


def storage_key(tensor: Tensor) -> int | None:
    """What tells one storage from another while both live; ``None`` for a tensor that has none (a sparse one)."""
    if tensor.layout is not torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Add up the storages of ``tensors``, each once, but for those that a tensor of ``without`` uses."""
    seen = {storage_key(tensor) for tensor in without} | {None}
    total = 0
    for tensor in tensors:
        if (key := storage_key(tensor)) not in seen:
            seen.add(key)
            total += tensor.untyped_storage().nbytes()
    return total


def graph_size(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> GraphSize | None:
    """Walk the graph behind ``tensors``.

    Args:
        tensors: tensors with a graph.
        without: tensors whose storages do not count, such as the parameters.

    Returns:
        its size; ``None`` if it has more than `MOST_NODES` operations.
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
    """Return what nodes still save for backward; nothing where torch does not say."""
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
            if isinstance(one.data, Tensor):  # not what a hook has made of it, nor what is freed
                saved.append(one.data)
        saved += [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, Tensor)]
    return storage_bytes(saved, without)


def _raw_saved(node: Any) -> Iterator[Any]:
    """The saved tensors of a node as they are stored; each name has one or a tuple."""
    for name in dir(type(node)):
        if name.startswith(_RAW):
            try:
                value = getattr(node, name)
            except RuntimeError:  # a function in Python says so where a built-in one has None: they are freed
                continue
            yield from value if isinstance(value, tuple) else (value,) if value is not None else ()


_OUTSIDE = -1  # of any backward pass
_AGAIN = -2  # a pass that was noted again

_Place = tuple[int, int]  # a backward pass and the node of it that runs, both -1 outside


class NotedNodes(NamedTuple):
    """What was noted since some place, as of now; ``is_running`` says that a backward pass is."""

    nodes: list[tuple[int, int, int]]
    is_running: bool


class Graphs:
    """Follows the graphs of a training, by private counters of torch's autograd; `see` is called as each op begins.

    The nodes of a forward pass stay until the backward pass that follows has ended; those of a recomputation, which
    runs inside a node of a backward pass, until that pass goes on to another node. Not covered: graphs kept for a
    second backward pass, or that no backward pass follows (they count until the next one).
    """

    def __init__(self) -> None:
        self._num_made = torch._C._autograd._get_sequence_nr()
        self._pass = _OUTSIDE
        self._open: dict[_Place, list[int]] = {}  # by the place in which they were made, the rows of `_nodes`
        self._nodes: list[list[int]] = []

    def see(self, op_row: int) -> None:
        """Note the nodes that were made since the last op, this one's among them, and those that are gone."""
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
        """Let nodes that are made in the block be none of the training's."""
        num_made = torch._C._autograd._get_sequence_nr()
        yield
        self._num_made += torch._C._autograd._get_sequence_nr() - num_made

    @property
    def num_noted(self) -> int:
        """How often nodes were noted."""
        return len(self._nodes)

    def noted(self, begin: int) -> NotedNodes:
        """Return what was noted since so many were."""
        return NotedNodes([(made, gone, num) for made, gone, num in self._nodes[begin:]], self._pass != _OUTSIDE)

    def note_again(self, noted: NotedNodes, begin: int, shift: int) -> None:
        """Note nodes once more, so many rows later; the first op is in row ``begin``."""
        current = torch._C._current_graph_task_id()
        is_inside = current != _OUTSIDE  # these nodes are of a recomputation, and end with the next op
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
        """``(op row, op row, number)``: where nodes were made and from where on they are gone, -1 if never."""
        return tuple((made, gone, number) for made, gone, number in self._nodes)

    def _end(self, op_row: int, places: list[_Place]) -> None:
        for place in places:
            for row in self._open.pop(place):
                self._nodes[row][1] = op_row


def _running_node() -> int:
    node = torch._C._current_autograd_node()
    return _OUTSIDE if node is None else int(node._sequence_nr())


def calls_by_itself() -> bool:
    """Whether autograd calls the next op: not Python, in a recomputation or in the backward of a custom function."""
    if torch._C._current_graph_task_id() == _OUTSIDE or torch.is_grad_enabled():
        return False
    return not isinstance(torch._C._current_autograd_node(), BackwardCFunction)
