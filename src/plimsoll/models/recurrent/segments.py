"""The interface of models whose forward can run in time segments: a method ``in_segments``.

A recurrent model does not need all steps in memory if its other layers compute each step separately. Embeddings,
dropout, linear layers and losses do so. ``in_segments`` takes an `Unroll`, followed by the arguments of ``forward``,
and returns the same loss; `Unroll` has an example. Only the techniques `time_segments` and `truncated_bptt` call it.

A model whose loss depends on the end of the sequence, such as a classifier, sets ``judges_the_end = True``, because its
gradient cannot be truncated.

Not handled: layers that combine several steps (attention, pooling over time, a reverse direction).

Shapes: B samples, S steps of a segment, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

State = tuple[Tensor, ...]
"""The state that a recurrent layer passes from step to step; empty before the first step."""


def as_state(hidden: Any) -> State:
    """Return the hidden state of a ``torch.nn`` recurrent layer as a tuple, which is empty for ``None``."""
    if hidden is None:
        return ()
    return (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)


def as_hidden(state: State) -> Any:
    """Return a state in the form that a ``torch.nn`` recurrent layer takes: a pair, a tensor, or ``None``."""
    return state if len(state) == 2 else state[0] if state else None


def runs_in_segments(model: nn.Module) -> bool:
    """Return whether a model implements ``in_segments``. A model that cannot run in segments may set it to ``None``."""
    return callable(getattr(model, "in_segments", None))


def sums_its_loss(model: nn.Module) -> bool:
    """Return whether a model implements ``in_segments`` and computes its loss as a sum over the steps."""
    return runs_in_segments(model) and not getattr(model, "judges_the_end", False)


class Passed(NamedTuple):
    """The result of a segment, or of all segments together.

    Attributes:
        outputs: tensors with the time dimension of the inputs; they are concatenated over the segments.
        sums: tensors that are added up over the segments.
        state: the state after the last step.
    """

    outputs: tuple[Tensor, ...] = ()
    sums: tuple[Tensor, ...] = ()
    state: State = ()


Run = Callable[..., Passed]
"""``run(state, *slices)`` computes a segment; ``slices`` has the segment's part of each sequence."""


class Unroll(Protocol):
    """The argument ``unroll`` of ``in_segments``: calls ``run`` for each segment, in order.

        class Model(nn.Module):
            def in_segments(self, unroll: Unroll, input_ids, labels):
                def run(state, ids_BS, targets_BS):
                    hidden_BSH, state = self.lstm(self.embedding(ids_BS), state or None)
                    loss = F.cross_entropy(self.head(hidden_BSH).flatten(0, 1), targets_BS.flatten(), reduction="sum")
                    return Passed(sums=(loss,), state=state)

                passed = unroll(run, (input_ids, targets))
                return Output(loss=passed.sums[0] / num_targets)

    The result of ``run`` must depend only on its arguments and the parameters, because backward calls it again.
    """

    def __call__(self, run: Run, sequences: Sequence[Tensor], state: State = (), dim: int = 1) -> Passed:
        """Run all segments of ``sequences``, whose time dimension is ``dim``, starting from ``state``."""
        ...
