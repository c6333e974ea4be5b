"""A check that a segment of time does not use outside tensors, whose gradient would be lost.

A function that computes a segment may close over a tensor that was computed earlier, such as an encoder's summary. Each
segment is differentiated on its own, with respect to its arguments only. So the earlier tensor would get no gradient,
or the second segment would find that tensor's graph freed. The check searches the graph of a segment's results for two
kinds of nodes: operations numbered below the segment's first operation, and leaves that are not arguments.

Operations are numbered per thread. Backward on a device runs in its own thread, so an operation of another thread may
also have a number above the segment's last operation. An outside graph is missed in a step if all its numbers happen to
fall into the segment's range. At most `MOST_NODES` nodes are checked (`plimsoll.memory.autograd_graph` explains the
reason).
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
    """Return the number that the next differentiable operation in this thread will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def refuse_what_is_outside(results: Sequence[Tensor], given: Iterable[Tensor], begin: int) -> None:
    """Check that the results of a segment depend on no tensor with a gradient from outside the segment.

    Args:
        results: the tensors that the segment computed.
        given: the tensors that the segment may use: its state, its slices and the parameters.
        begin: the number of the first operation of the segment, from `next_operation`.


    Raises:
        InputError: if the graph contains another tensor that needs a gradient.
    """
    inside = {get_gradient_edge(tensor).node for tensor in given if tensor.requires_grad}
    end = next_operation()
    seen = {tensor.grad_fn for tensor in results if has_graph(tensor)} - inside
    waiting: deque[Any] = deque(seen)  # breadth first, because the tensors that each step uses are near the results
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
            f"a segment of time uses a tensor of shape {list(leaf.shape)} that needs a gradient but is not a parameter "
            "of the model, so its gradient would be lost: make it one (`self.name = nn.Parameter(...)`, or add its "
            "module to the model), or give it to `unroll` as a part of the state"
        )
    operation = re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])
    return InputError(
        f"a segment of time uses a tensor that `{operation}` computed before the segment began; its gradient would be "
        "lost, because each segment is differentiated on its own, with respect to its arguments and the parameters of "
        "the model: give it to `unroll` as one of the sequences, or as a part of the state, which `run` then returns "
        "unchanged; or compute it inside `run`"
    )
