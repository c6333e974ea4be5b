"""How a model says that its forward can be done a stretch of time after another: by a method ``in_segments``.

A recurrent model whose other layers compute one step at a time (an embedding, dropout, a linear layer, the loss) need
not have all steps in memory. ``in_segments`` takes what ``forward`` takes after an `Unroll`, which shows how it is
written, and returns the same loss. The techniques `time_segments` and `truncated_bptt` call it; nothing else does.

A model whose loss is not a sum over the steps but of what stands at their end, such as one answer to a sequence, says
``judges_the_end = True``: its gradient cannot be truncated. It does NOT cover what computes with several steps at once
(attention, pooling over time, a reverse direction).

Shapes: B samples, S steps of a segment, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

State = tuple[Tensor, ...]
"""What a recurrent layer hands from one step to the next; empty before the first."""


def as_state(hidden: Any) -> State:
    """Return the hidden state of a recurrent layer of torch's as a tuple; an empty one for ``None``."""
    if hidden is None:
        return ()
    return (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)


def as_hidden(state: State) -> Any:
    """Return a state as such a layer takes it: two parts, or the only one; ``None`` before the first step."""
    return state if len(state) == 2 else state[0] if state else None


def runs_in_segments(model: nn.Module) -> bool:
    """Whether a model says how it runs in segments; one that cannot has ``None`` in that place."""
    return callable(getattr(model, "in_segments", None))


def sums_its_loss(model: nn.Module) -> bool:
    """Whether a model says how it runs in segments, and does not say that its loss is of the end of the sequence."""
    return runs_in_segments(model) and not getattr(model, "judges_the_end", False)


class Passed(NamedTuple):
    """What a stretch of time gives, or all of it.

    ``outputs`` have the steps in the dimension that the inputs have them in, and are put one after another; ``sums``
    are added up; ``state`` is the one after the last step.
    """

    outputs: tuple[Tensor, ...] = ()
    sums: tuple[Tensor, ...] = ()
    state: State = ()


Run = Callable[..., Passed]
"""``run(state, *slices)`` computes a stretch of time; ``slices`` are that stretch of each sequence."""


class Unroll(Protocol):
    """Calls ``run`` for each stretch of time, in order.

        class Model(nn.Module):
            def in_segments(self, unroll: Unroll, input_ids, labels):
                def run(state, ids_BS, targets_BS):
                    hidden_BSH, state = self.lstm(self.embedding(ids_BS), state or None)
                    loss = F.cross_entropy(self.head(hidden_BSH).flatten(0, 1), targets_BS.flatten(), reduction="sum")
                    return Passed(sums=(loss,), state=state)

                passed = unroll(run, (input_ids, targets))
                return Output(loss=passed.sums[0] / num_targets)

    What ``run`` computes must follow from its arguments and the parameters alone: it is called again in backward.
    """

    def __call__(self, run: Run, sequences: Sequence[Tensor], state: State = (), dim: int = 1) -> Passed:
        """Go through ``sequences``, whose steps are in dimension ``dim``, beginning with ``state``."""
        ...
