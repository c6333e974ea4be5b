"""Repetition of recorded ops: a dry run executes them once, and the trace contains them as often as they would run.

    with stands_for(14):
        embed(a_slice)

    begin = place_of(recorder)
    loss = a_pass()
    stretch = Stretch(recorder, begin, [loss])
    if stretch.is_closed:
        (loss,) = stretch.again()

`stands_for` repeats ops without their storages. `Stretch` repeats a section with its storages.
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
    """Record the ops of the block ``num_passes`` times in every active recorder.

    For a technique that repeats the same ops on slices of one size: it needs the time of all slices, but the memory of
    one slice. Does NOT repeat storages: the caller allocates the results of all passes.
    """
    recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
    begins = [recorder.op_row + 1 for recorder in recorders]
    yield
    for recorder, begin in zip(recorders, begins, strict=True):
        recorder.note_again(begin, num_passes - 1)


Renamed = Callable[[int], int]


class Place(NamedTuple):
    """Position in a record: the number of ops, events, storages, graph nodes, asynchronous copies, and waits."""

    op: int
    event: int
    storage: int
    node: int
    copy: int
    wait: int


def place_of(recorder: Recorder) -> Place:
    """Return the current position in a record."""
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
    """Return the row of a tensor's storage in the recorder's table of storages; -1 if it is not recorded."""
    return recorder._storages._row_of.get(tensor.untyped_storage()._cdata, -1)


def name_gradients(recorder: Recorder, parameters: Iterable[Tensor]) -> None:
    """Record the names of gradients that autograd assigned to parameters without an op, such as the first gradient."""
    for parameter in parameters:
        if parameter.grad is not None and recorder._storages._name[row_of(recorder, parameter.grad)] == 0:
            recorder.know_gradient(parameter)


def ended_since(recorder: Recorder, begin: Place) -> list[int]:
    """Return the rows of storages that were made before a position and freed after it, in the order of their frees."""
    return [-event - 1 for event in recorder._storages._events[begin.event :] if -begin.storage <= event < 0]


def end_alike(recorder: Recorder, begin: Place, twins: Mapping[int, Sequence[int]]) -> None:
    """Record that the repetitions of a storage (its twins) are freed in the same op as the storage, last twin first.

    Args:
        recorder: the record.
        begin: the position from which frees are considered.
        twins: rows of the twins, by the row of a storage.
    """
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
    """A recorded section that can be repeated, event by event, with all its storages.

    A repetition can free different older storages, and can use different module names.

    Args:
        recorder: the record.
        begin: the position at which the section begins.
        made: the tensors made in the section that are still alive.
        ended: rows of older storages that were freed in the section.
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
        """True if the section left only the tensors in ``made`` alive, and freed only the older storages in ``ended``.

        Also False if a CUDA graph is replayed, because a dry run executes every replay.
        """
        is_closed = not self.left and not any(one.has_graph for one in self._made) and self.is_plain
        return is_closed and sorted(ended_since(self._recorder, self._begin)) == sorted(self._ended)

    @property
    def is_plain(self) -> bool:
        """True if every tensor in ``made`` is plain, and the section waits for no older copy and replays no graph.

        A tensor is plain if it is a dense fake tensor that begins at the start of its storage.
        """
        begin_op = self._begin.op
        waits_for_older = any(copy < begin_op for _, copy, _ in self._waits)
        is_replayed = any(self._recorder._ops[-1][begin_op:])
        return all(one.is_plain for one in self._made) and not waits_for_older and not is_replayed

    @property
    def left(self) -> list[int]:
        """Rows of storages that were made in the section, are still alive, and belong to no tensor in ``made``."""
        known = {one.row for one in self._made}
        rows = enumerate(self._died, start=self._begin.storage)
        return [row for row, died in rows if died < 0 and row not in known]

    def compared(self, older: Mapping[int, Hashable], renamed: Renamed) -> tuple[Any, ...]:
        """Return a value that is equal for equivalent sections.

        Args:
            older: labels for the rows of older storages, shared by the sections. Frees of other older storages are
                ignored.
            renamed: maps an index in the recorder's table of texts to a number that equivalent sections share.
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
        """Return the allocations and frees of the section, grouped by op.

        Frees in one op are sorted, because their order may depend on addresses, as in casts.
        """
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
        """Record the section once more, and return new tensors in place of the tensors in ``made``.

        Args:
            ended: rows of the older storages that the repetition frees, in place of the section's ``ended``.
            renamed: maps an index in the recorder's table of texts to the index of the text that replaces it.
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
    """A tensor made in a section: the row of its storage, and everything needed to make a similar tensor."""

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
    """Return the attributes that a dry run sets on a fake tensor: its known values, and its memory (device or host)."""
    noted = {name: value for name, value in vars(tensor).items() if name.startswith("_plimsoll")}
    with _disable_current_modes():
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in noted.items()}


def take_notes(tensor: Tensor, notes: dict[str, Any]) -> None:
    """Copy the attributes returned by `notes_of` to another fake tensor."""
    with _disable_current_modes():
        for name, value in notes.items():
            setattr(tensor, name, value.clone() if isinstance(value, Tensor) else value)
