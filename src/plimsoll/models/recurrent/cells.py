"""A recurrent layer that unrolls a custom cell over time.

    self.layer = UnrolledCell(MyCell(width), batch_first=True)
    outputs_BTH, state = self.layer(inputs_BTE)

Because the loop is a module, the technique `time_segments` can find it and train it on sequences of any length.

A cell must keep everything that it remembers of a sequence in its state, and must not change the state in place. A
change through ``.data`` is not detected. With `time_segments` it makes gradients wrong.

Not handled: padding (the last state then includes the padding), packed sequences and a reverse direction.

Shapes: B samples, T steps, S steps of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import InputError
from plimsoll.models.recurrent.segments import Passed, State


class UnrolledCell(nn.Module):
    """A layer that calls a cell for each step of a sequence.

    Args:
        cell: ``nn.LSTMCell``, ``nn.GRUCell``, ``nn.RNNCell``, or any module that is called as ``cell(input, state)``
            and returns ``(output, state)``. Its arguments are the input of one step and the previous state, which is
            ``None`` at the first step. A state is a tensor or a tuple of tensors.
        batch_first: whether inputs and outputs are (B, T, ...) rather than (T, B, ...).
    """

    def __init__(self, cell: nn.Module, batch_first: bool = False) -> None:
        super().__init__()
        self.cell, self.batch_first = cell, batch_first

    @property
    def step_dim(self) -> int:
        """The time dimension of inputs and outputs."""
        return 1 if self.batch_first else 0

    def forward(self, input: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of all steps, with the same time dimension as the input, and the last state.

        Raises:
            InputError: if there are no steps, or the cell returns something other than an output and a state.
        """
        form = StateForm.of(state)
        passed = self.stretch(form, state_of_cell(state), input)
        return passed.outputs[0], form.given(passed.state)

    def stretch(self, form: StateForm, state: State, input: Tensor) -> Passed:
        """Run the steps of ``input`` from ``state``, which is empty before the first step of the sequence.

        Return the outputs and the last state. ``form`` is updated to the form of the last state that the cell returned.
        """
        if input.dim() < 2 or input.shape[self.step_dim] == 0:
            raise InputError(
                f"cannot unroll {type(self.cell).__name__} over an input of shape {list(input.shape)}, which has no "
                f"steps in dimension {self.step_dim}: give at least 1, and set batch_first if the batch comes first"
            )
        outputs = []
        for step_input in input.unbind(self.step_dim):
            output, given = self._step(step_input, form.given(state))
            form.is_bare, state = isinstance(given, Tensor), state_of_cell(given)
            outputs.append(output)
        return Passed((torch.stack(outputs, self.step_dim),), state=state)

    def _step(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        result = self.cell(input, state)
        if isinstance(self.cell, nn.RNNCellBase):
            return (result if isinstance(result, Tensor) else result[0]), result
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
            raise InputError(
                f"{type(self.cell).__name__} returned a {type(result).__name__} from one step, where an output and a "
                "state are needed: return (output, state)"
            )
        return result


@dataclass
class StateForm:
    """The form of a cell's state: a single tensor (``is_bare``) or a tuple of tensors."""

    is_bare: bool

    @classmethod
    def of(cls, given: Any) -> StateForm:
        """Return the form of an initial state. If that is ``None``, the first result of the cell decides."""
        return cls(isinstance(given, Tensor))

    def given(self, state: State) -> Any:
        """Return a state in the cell's form, or ``None`` before the first step."""
        if not state:
            return None
        return state[0] if self.is_bare else state


def state_of_cell(given: Any) -> State:
    """Return a cell's state as a tuple, which is empty for ``None``.

    Raises:
        InputError: if the state contains anything other than tensors.
    """
    if given is None:
        return ()
    parts = (given,) if isinstance(given, Tensor) else tuple(given)
    wrong = [type(part).__name__ for part in parts if not isinstance(part, Tensor)]
    if wrong:
        raise InputError(
            f"the state of a cell has a {wrong[0]} among its {len(parts)} parts: use a tensor, or a flat tuple of them"
        )
    return parts
