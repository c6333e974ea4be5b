"""Repeat in the trace what was dry-run once, as often as it would have run.

with stands_for(14):
    embed(a_slice)

begin = place_of(recorder)
loss = a_pass()
stretch = Stretch(recorder, begin, [loss])
if stretch.is_closed:
    (loss,) = stretch.again()
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from plimsoll.memory.recorder import Recorder


@contextmanager
def stands_for(num_passes: int) -> Iterator[None]:
    """Let the ops of the block be noted so many times by whoever records; without a recorder it does nothing.

    For a technique that does the same on slices of one size: it needs the memory of one of them, and the time of all.
    Does NOT make storages: what each pass leaves must be made by the caller, once for all.
    """
    recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
    begins = [recorder.op_row + 1 for recorder in recorders]
    yield
    for recorder, begin in zip(recorders, begins, strict=True):
        recorder.note_again(begin, num_passes - 1)


Renamed = Callable[[int], int]


class Place(NamedTuple):
    """How many ops, events, storages, nodes of graphs, and copies beside with waits for them a record has."""

    op: int
    event: int
    storage: int
    node: int
    copy: int
    wait: int


def place_of(recorder: Recorder) -> Place:
    """Say how far a record is."""
    storages, beside = recorder._storages, recorder.beside
    return Place(
        recorder.op_row + 1,
        len(storages._events),
        len(storages._num_bytes),
        recorder._graphs.num_noted,
        len(beside.copies),
        len(beside.waits),
    )


def row_of(recorder: Recorder, tensor: Tensor) -> int:
    """Return the row of a tensor's storage, -1 if it has none."""
    return recorder._storages._row_of.get(tensor.untyped_storage()._cdata, -1)


def name_gradients(recorder: Recorder, parameters: Iterable[Tensor]) -> None:
    """Take note of the gradients that have no name yet, as a pass that adds to them does: they were moved."""
    for parameter in parameters:
        if parameter.grad is not None and recorder._storages._name[row_of(recorder, parameter.grad)] == 0:
            recorder.know_gradient(parameter)


def ended_since(recorder: Recorder, begin: Place) -> list[int]:
    """Return the rows of the storages that are older than a place and have ended since, in that order."""
    return [-event - 1 for event in recorder._storages._events[begin.event :] if -begin.storage <= event < 0]


def end_alike(recorder: Recorder, begin: Place, twins: Mapping[int, Sequence[int]]) -> None:
    """Where storages have ended since a place, let their twins have ended in the same op, the last of each first."""
    storages, begin_event = recorder._storages, begin.event
    events, event_ops = list[int](), list[int]()
    since = zip(storages._events[begin_event:], storages._event_op[begin_event:], strict=True)
    for (op_row, have_twins), group in groupby(since, key=lambda one: (one[1], -one[0] - 1 in twins)):
        ended = [event for event, _ in group]
        if have_twins:
            others = zip(*(reversed(twins[-event - 1]) for event in ended), strict=True)
            for row in chain.from_iterable(others):
                storages._died[row] = op_row
                ended.append(-row - 1)
        events += ended
        event_ops += [op_row] * len(ended)
    storages._events[begin_event:], storages._event_op[begin_event:] = events, event_ops


class Stretch:
    """What was recorded since a place, to be noted again with all its storages, event by event as it was.

    The next time, older storages that end in it have others in their place, and names of modules may be others, too.

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
        self.end = place_of(recorder)
        self._died, self._category, self._name = storages._died[rows], storages._category[rows], storages._name[rows]
        self._nodes = graphs.noted(begin.node)
        self._copies, self._waits = recorder.beside.noted(begin.copy, begin.wait)
        self._made = [_Made.of(tensor, recorder) for tensor in made]

    @property
    def is_closed(self) -> bool:
        """Whether only the known tensors are left of what was made, and of what is older only what was said has gone.

        It is also ``False`` where a CUDA graph is replayed, which a dry run does each time.
        """
        is_closed = not self.left and not any(one.has_graph for one in self._made) and self.is_plain
        return is_closed and sorted(ended_since(self._recorder, self._begin)) == sorted(self._ended)

    @property
    def is_plain(self) -> bool:
        """Whether the known tensors are plain, no copy from before is waited for, and no graph is replayed."""
        begin_op = self._begin.op
        waits_for_older = any(copy < begin_op for _, copy, _ in self._waits)
        is_replayed = any(self._recorder._ops[-1][begin_op:])
        return all(one.is_plain for one in self._made) and not waits_for_older and not is_replayed

    @property
    def left(self) -> list[int]:
        """The rows of what was made, is still there, and is none of the known tensors."""
        known = {one.row for one in self._made}
        rows = enumerate(self._died, start=self._begin.storage)
        return [row for row, died in rows if died < 0 and row not in known]

    def compared(self, older: Mapping[int, Hashable], renamed: Renamed) -> tuple[Any, ...]:
        """Return what is the same for a stretch that is like this one.

        Args:
            older: what the rows of older storages are called in both; of others the end does not count.
            renamed: what the numbers of texts stand for in both.
        """
        recorder, begin, end = self._recorder, self._begin, self.end
        storages, ops, rows = recorder._storages, slice(begin.op, end.op), slice(begin.storage, end.storage)
        name, module, line, _, *others = (column[ops] for column in recorder._ops)
        return (
            name,
            list(map(renamed, module)),
            line,
            others,
            [column[ops] for column in recorder._work],
            recorder._phases[ops],
            storages._num_bytes[rows],
            storages._shape[rows],
            storages._on_host[rows],
            self._category,
            list(map(renamed, self._name)),
            [row - begin.op for row in storages._born[rows]],
            [row - begin.op if row >= 0 else row for row in self._died],
            self._compared_events(older),
            [(row - begin.op, *rest) for row, *rest in self._copies],
            [(row - begin.op, copy - begin.op, rest) for row, copy, rest in self._waits],
            [(made - begin.op, gone - begin.op if gone >= 0 else gone, num) for made, gone, num in self._nodes.nodes],
        )

    def _compared_events(self, older: Mapping[int, Hashable]) -> list[Any]:
        """The events by the op in which they were; what ends in one op, as casts do, ends in the order of addresses."""
        storages, begin = self._recorder._storages, self._begin
        events = slice(begin.event, self.end.event)
        found: list[tuple[int, bool, str]] = []
        for event, op_row in zip(storages._events[events], storages._event_op[events], strict=True):
            row = abs(event) - 1
            if row >= begin.storage or row in older:
                called = str(row - begin.storage if row >= begin.storage else older[row])
                found.append((op_row - begin.op, event > 0, called))
        groups = (list(group) for _, group in groupby(found, key=itemgetter(0, 1)))
        return [group if group[0][1] else sorted(group) for group in groups]

    def again(self, ended: Sequence[int] = (), renamed: Renamed | None = None) -> list[Tensor]:
        """Note all of it once more; returns what then is there in place of the tensors that were made.

        Args:
            ended: the rows of what ends this time.
            renamed: the number of the text that stands in place of another.
        """
        recorder, begin, end = self._recorder, self._begin, self.end
        storages, ended_by_row = recorder._storages, dict(zip(self._ended, ended, strict=True))
        ops, events = slice(begin.op, end.op), slice(begin.event, end.event)
        to_op, to_row = recorder.op_row + 1 - begin.op, len(storages._num_bytes) - begin.storage
        recorder._graphs.note_again(self._nodes, begin.op + to_op, to_op)
        recorder.beside.note_shifted(self._copies, self._waits, to_op)
        for column in (*recorder._ops, *recorder._work, recorder._phases):
            column.extend(column[ops])
        recorder._ops[3][begin.op + to_op :] = [recorder.step] * (end.op - begin.op)
        names = self._name
        if renamed is not None:
            recorder._ops[1][begin.op + to_op :] = map(renamed, recorder._ops[1][begin.op + to_op :])
            names = [*map(renamed, names)]
        rows = slice(begin.storage, end.storage)
        storages._num_bytes += storages._num_bytes[rows]
        storages._shape += storages._shape[rows]
        storages._on_host += storages._on_host[rows]
        storages._category += self._category
        storages._name += names
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
    has_graph: bool
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    mode: Any
    device: torch.device
    notes: dict[str, Any]

    @classmethod
    def of(cls, tensor: Any, recorder: Recorder) -> _Made:
        has_graph = tensor.requires_grad
        if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
            return cls(-1, False, has_graph, tensor.shape, (), tensor.dtype, None, tensor.device, {})
        row = row_of(recorder, tensor)
        layout = tensor.shape, tensor.stride(), tensor.dtype
        is_plain = tensor.storage_offset() == 0
        return cls(row, is_plain, has_graph, *layout, tensor.fake_mode, tensor.fake_device, notes_of(tensor))

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
