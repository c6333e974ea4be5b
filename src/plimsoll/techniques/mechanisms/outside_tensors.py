"""Whether a segment of time uses a tensor from outside of what it is given, whose gradient would be lost.

A function that computes a segment may close over a tensor that was computed before the walk began: the summary that an
encoder made, say. Each segment is differentiated on its own and by what it is given, so that tensor would get no
gradient, or the second segment would find its graph gone. It is seen in the graph of a segment's results: an operation
with a number below that at which the segment began, or a leaf that the segment was not given.

Numbers count the operations of a thread. Backward on a device has a thread of its own, where an operation of another
thread is known by a number that is too high as well; should all of a graph fall between, which needs chance, it is not
seen in that step. Not walked is what lies more than `MOST_NODES` operations behind the results
(`plimsoll.memory.autograd_graph` says why).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from plimsoll.errors import InputError
from plimsoll.memory.autograd_graph import MOST_NODES, has_graph

_LEAF = "torch::autograd::AccumulateGrad"


def next_operation() -> int:
    """The number that the next operation with a graph will have in this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def refuse_what_is_outside(results: Sequence[Tensor], given: Iterable[Tensor], begin: int) -> None:
    """Look through the graph of what was computed of ``given`` since operation ``begin``.

    Raises:
        InputError: if something else that needs a gradient is in it.
    """
    inside = {get_gradient_edge(tensor).node for tensor in given if tensor.requires_grad}
    end = next_operation()
    seen = {tensor.grad_fn for tensor in results if has_graph(tensor)} - inside
    waiting: deque[Any] = deque(seen)  # the nearest first: what each step uses lies near the results
    while waiting and len(seen) <= MOST_NODES:
        node = waiting.popleft()
        leaf = node.variable if node.name() == _LEAF else None
        if leaf is not None or not begin <= node._sequence_nr() < end:
            raise _error(node, leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in inside:
                seen.add(following)
                waiting.append(following)


def _error(node: Any, leaf: Tensor | None) -> InputError:
    if leaf is not None:
        return InputError(
            f"a segment of time uses a tensor of shape {list(leaf.shape)} that needs a gradient and is no parameter of "
            "the model that is cut, so its gradient would be lost: make it one (`self.name = nn.Parameter(...)`, or "
            "the module it belongs to a part of the model), or give it to `unroll` as a part of the state"
        )
    operation = re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])
    return InputError(
        f"a segment of time uses a tensor that was computed before it, by `{operation}`, and whose gradient would be "
        "lost, because segments are differentiated one by one, by what they are given and the parameters of the model: "
        "give it to `unroll` as one of the sequences, or as a part of the state, which `run` then returns as it was; "
        "or compute it inside `run`"
    )
