"""Repeat in the trace what was rehearsed once, as often as it would have run.

    with stands_for(14):
        embed(a_slice)

A technique that does the same again and again, on slices of one size, needs the memory of one of them, and the time of
all. Rehearsing each would take as long as there are slices. Does NOT make storages: what each pass leaves must be made
by the caller, once for all.

    begin = place_of(recorder)
    loss = a_pass()
    stretch = Stretch(recorder, begin, [loss])
    if stretch.is_closed:
        (loss,) = stretch.again()

A `Stretch` is noted again with all its storages, event by event as it was. Storages that are older and end in it have
others in their place the next time, which are said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from plimsoll.memory.recorder import Recorder


@contextmanager
def stands_for(num_passes: int) -> Iterator[None]:
    """Let the ops of the block be noted so many times by whoever records; without a recorder it does nothing."""
    recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
    begins = [recorder.op_row + 1 for recorder in recorders]
    yield
    for recorder, begin in zip(recorders, begins, strict=True):
        recorder.note_again(begin, num_passes - 1)


class Place(NamedTuple):
    """How many ops, events, storages and pieces of graphs a record has."""

    op: int
    event: int
    storage: int
    node: int


def place_of(recorder: Recorder) -> Place:
    """Say how far a record is."""
    storages, graphs = recorder._storages, recorder._graphs
    return Place(recorder.op_row + 1, len(storages._events), len(storages._num_bytes), graphs.num_noted)


def row_of(recorder: Recorder, tensor: Tensor) -> int:
    """Return the row of a tensor's storage, -1 if it has none."""
    return recorder._storages._row_of.get(tensor.untyped_storage()._cdata, -1)


class Stretch:
    """What was recorded since a place.

    Args:
        recorder: the record.
        begin: the place.
        made: the tensors that were made since and are still there.
        ended: the rows of older storages that have ended since.
    """

    def __init__(self, recorder: Recorder, begin: Place, made: Sequence[Tensor], ended: Sequence[int] = ()) -> None:
        self._recorder, self._begin, self._ended = recorder, begin, ended
        storages, graphs = recorder._storages, recorder._graphs
        rows = slice(begin.storage, None)
        self._end = place_of(recorder)
        self._died, self._category, self._name = storages._died[rows], storages._category[rows], storages._name[rows]
        self._nodes = graphs.noted(begin.node)
        self._made = [_Made.of(tensor, recorder) for tensor in made]

    @property
    def is_closed(self) -> bool:
        """Whether only the known tensors are left of what was made, and of what is older only what was said has gone.

        ``False`` with copies that run beside the computation or with a replayed graph: these are rehearsed each time.
        """
        begin, storages, beside = self._begin, self._recorder._storages, self._recorder.beside
        alive = [row for row, died in enumerate(self._died, start=begin.storage) if died < 0]
        is_closed = sorted(one.row for one in self._made) == alive and all(one.is_plain for one in self._made)
        older_ends = sorted(-event - 1 for event in storages._events[begin.event :] if -begin.storage <= event < 0)
        is_beside = any(one[0] >= begin.op for one in (*beside.copies, *beside.waits))
        return (
            is_closed
            and older_ends == sorted(self._ended)
            and not is_beside
            and not any(self._recorder._ops[-1][begin.op :])
        )

    def again(self, ended: Sequence[int] = ()) -> list[Tensor]:
        """Note all of it once more; returns what then is there in place of the tensors that were made.

        Args:
            ended: the rows of what ends this time.
        """
        recorder, begin, end = self._recorder, self._begin, self._end
        storages, ended_by_row = recorder._storages, dict(zip(self._ended, ended, strict=True))
        ops, events = slice(begin.op, end.op), slice(begin.event, end.event)
        to_op, to_row = recorder.op_row + 1 - begin.op, len(storages._num_bytes) - begin.storage
        recorder._graphs.note_again(self._nodes, begin.op + to_op, to_op)
        for column in (*recorder._ops, *recorder._work, recorder._phases):
            column.extend(column[ops])
        recorder._ops[3][begin.op + to_op :] = [recorder.step] * (end.op - begin.op)
        rows = slice(begin.storage, end.storage)
        storages._num_bytes += storages._num_bytes[rows]
        storages._shape += storages._shape[rows]
        storages._on_host += storages._on_host[rows]
        storages._category += self._category
        storages._name += self._name
        storages._born += [row + to_op for row in storages._born[rows]]
        storages._died += [row + to_op if row >= 0 else row for row in self._died]
        event_ops = [row + to_op for row in storages._event_op[events]]
        for event, op_row in zip(storages._events[events], event_ops, strict=True):
            if event > 0 or -event > begin.storage:
                storages._events.append(event + to_row if event > 0 else event - to_row)
            else:
                row = ended_by_row[-event - 1]
                storages._events.append(-row - 1)
                storages._died[row] = op_row
        storages._event_op += event_ops
        unwritten = {row: size for row, size in storages._unwritten.items() if begin.storage <= row < end.storage}
        storages._unwritten |= {row + to_row: size for row, size in unwritten.items()}
        made = [one.anew() for one in self._made]
        for one, tensor in zip(self._made, made, strict=True):
            storages.take(tensor, one.row + to_row)
        return made


class _Made(NamedTuple):
    """A tensor that was made: the row of its storage, and what another like it is made of."""

    row: int
    is_plain: bool
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    mode: Any
    device: torch.device
    notes: dict[str, Any]

    @classmethod
    def of(cls, tensor: Any, recorder: Recorder) -> _Made:
        is_plain = type(tensor) is FakeTensor and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_plain:
            return cls(-1, False, tensor.shape, (), tensor.dtype, None, tensor.device, {})
        row = row_of(recorder, tensor)
        layout = tensor.shape, tensor.stride(), tensor.dtype
        is_plain = tensor.storage_offset() == 0
        return cls(row, is_plain, *layout, tensor.fake_mode, tensor.fake_device, notes_of(tensor))

    def anew(self) -> Tensor:
        with _disable_current_modes():
            empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            made = FakeTensor(self.mode, empty, self.device)
            take_notes(made, self.notes)
        return made


def notes_of(tensor: Tensor) -> dict[str, Any]:
    """What a dry run has noted of a fake tensor: its values, where they are known, and where it lies."""
    noted = {name: value for name, value in vars(tensor).items() if name.startswith("_plimsoll")}
    with _disable_current_modes():
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in noted.items()}


def take_notes(tensor: Tensor, notes: dict[str, Any]) -> None:
    """Note of a fake tensor what `notes_of` has said of another."""
    with _disable_current_modes():
        for name, value in notes.items():
            setattr(tensor, name, value.clone() if isinstance(value, Tensor) else value)
