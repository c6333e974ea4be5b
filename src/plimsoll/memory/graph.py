"""How large the graph behind some tensors is: its operations, and the bytes they still save for backward.

After a backward pass the operations stay as long as a tensor of theirs does, and what they saved is freed; what was
never passed through keeps that too. The only place that knows torch's names for it: ``_raw_saved_*`` of a node and
``SavedTensor.data``, which unpack nothing (``_saved_*`` would call the hooks of an offload). Where torch has no
``data``, the bytes are unknown.

A walk leaves a Python object in every node it sees, for as long as the node lives, and torch frees a chain of such
nodes by recursion: of 50,000 the process dies (torch 2.13, 8 MiB of stack; 40,000 went well). So no walk goes beyond
`MOST_NODES`, and a caller walks a graph that grows a few times only.

Not seen: memory of nodes written in C++, and what hooks have put in the place of a tensor (it is not on the device).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
