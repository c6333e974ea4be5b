"""Folding of an update in a dry run: one of several equivalent chunks runs, and its events are repeated for the others.

An update runs in chunks of a few parameters (`plimsoll.step.update.commit`). For example, the matrices of twelve layers
are twelve alike chunks. Only the first chunk runs. Its events are copied for the others, with their own gradients and
states. Chunks are alike if their parameters, gradients and states have the same layouts, and the same values if known,
such as the step count. Nothing else affects an update that treats each parameter separately, and only such updates have
chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import Stretch, notes_of, place_of, row_of, take_notes
from plimsoll.models.optimizers import settings_of
from plimsoll.step.update.transient_memory import Members

_MOST_PARAMETERS = 8  # in a chunk: larger chunks are rarely alike, and comparing them takes time


class FoldedUpdates:
    """The optimizer updates of one dry run, in which only one of several alike chunks runs.

    Args:
        recorder: the recorder of the dry run.
        optimizer: the optimizer.
    """

    def __init__(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        self._recorder, self._optimizer = recorder, optimizer
        self._step = 0
        self._done: dict[Hashable, _Done] = {}

    def run(self, members: Members, do_chunk: Callable[[], Any]) -> Any:
        """Update a chunk and free its gradients, or repeat the events of an alike chunk.

        Args:
            members: the parameters of the chunk.
            do_chunk: runs the update; it returns ``None`` on success.
        """
        if len(members) > _MOST_PARAMETERS:
            return do_chunk()
        if self._step != self._recorder.step:
            self._step, self._done = self._recorder.step, {}
        with _disable_current_modes():  # reading values must not be recorded
            kinds = tuple(self._kind_of(*member) for member in members)
        if None in kinds:
            return do_chunk()
        parameters = [parameter for _, parameter in members]
        ended = [row_of(self._recorder, one.grad) for one in parameters if one.grad is not None]
        done = self._done.get(kinds)
        if done is not None:
            made = iter(done.stretch.again(ended))
            for parameter, example in zip(parameters, done.examples, strict=True):
                self._take(parameter, example, made)
            return None
        begin, settings = place_of(self._recorder), self._settings()
        before = {id(value) for one in parameters for value in self._states_of(one).values()}
        event = do_chunk()
        states = [{**self._states_of(one)} for one in parameters]
        new = [
            value for one in states for value in one.values() if isinstance(value, Tensor) and id(value) not in before
        ]
        stretch = Stretch(self._recorder, begin, new, ended)
        # A chunk that leaves memory other than states, such as memory for later copies, is not repeated.
        if event is None and stretch.is_closed and all(map(operator.is_, settings, self._settings())):
            self._done[kinds] = _Done(stretch, [_example_of(one, {*map(id, new)}) for one in states])
        return event

    def _take(self, parameter: nn.Parameter, example: dict[str, Any], made: Iterator[Tensor]) -> None:
        """Free a parameter's gradient and set its optimizer states, as its update would.

        ``example`` holds the states of a parameter in the chunk that ran. ``made`` yields the tensors for new states.
        """
        parameter.grad = None
        if not example:
            return
        state = self._optimizer.state[parameter]
        for name, value in example.items():
            if isinstance(value, _Notes):
                take_notes(state[name], value)
            else:
                state[name] = next(made) if value is _NEW else value

    def _kind_of(self, group: int, parameter: nn.Parameter) -> Hashable:
        """Return a key that is equal for parameters with equal updates; ``None`` if it cannot be determined."""
        states = self._states_of(parameter)
        traits = [_trait_of(one) for one in (parameter, parameter.grad, *states.values())]
        return None if None in traits else (group, *states, *traits)

    def _states_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        states: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return states

    def _settings(self) -> list[Any]:
        return [value for group in settings_of(self._optimizer) for value in group.values()]


class _Done(NamedTuple):
    """A chunk that ran, and the states of each parameter after it."""

    stretch: Stretch
    examples: list[dict[str, Any]]


class _Notes(dict[str, Any]):
    """The known values of a state tensor that existed before the update."""


_NEW = object()
"""Stands for a state that the update creates."""


def _example_of(states: dict[str, Any], new: set[int]) -> dict[str, Any]:
    return {
        name: _NEW if id(value) in new else _Notes(notes_of(value)) if isinstance(value, Tensor) else value
        for name, value in states.items()
    }


def _trait_of(value: Any) -> Hashable:
    """Return the layout and known values of a dense fake tensor, or a plain value and its type; otherwise ``None``."""
    if isinstance(value, bool | int | float | str):
        return type(value), value
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return None
    notes = notes_of(value)
    if any(isinstance(note, Tensor) and note.numel() > 1 for note in notes.values()):
        return None
    noted = tuple((name, note.item() if isinstance(note, Tensor) else note) for name, note in notes.items())
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, noted
