"""Detecting graphs of earlier steps that stay in memory, and the objects that hold them.

A graph is alive as long as one of its nodes is. In the checked steps, a small marker object is put into the
``metadata`` of some nodes: those that produced the loss and the tensors that user objects hold
(`plimsoll.step.retained.tensors`). The marker is freed with its node. So a later check knows which marked graphs are
still alive, without keeping them alive.

Steps are checked ever more rarely (`plimsoll.step.sampled_steps`), so that the average cost is microseconds per step. A
finding (a line of the record) is added only if an earlier graph is alive. Only the first checks with a finding walk the
graph and read the user's source.

Not detected: graphs that are held for only a part of a step, and tensors without a graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plimsoll.device.base import Backend
from plimsoll.errors import InputError
from plimsoll.memory.autograd_graph import GraphSize, graph_size, has_graph, storage_bytes
from plimsoll.models.workload import Workload
from plimsoll.records.diagnosis import GRAPH_IS_GONE
from plimsoll.records.run import GraphLine, RetainedGraph
from plimsoll.step.retained.assignments import Assignment, assignment_of, callers, is_read
from plimsoll.step.retained.tensors import RetainedTensor, retained_by
from plimsoll.step.sampled_steps import SampledSteps
from plimsoll.techniques.mechanisms.segment_recompute import SecondBackward

_MOST_MARKED = 8  # the newest tensors of one holder that a check marks; a container may have thousands
_MOST_MARKS = 32  # marked steps per holder
_FEWEST_ALIVE = 2  # a state carried over one step, or created once, is not a graph per step
_MOST_LINES = 1000
_MOST_WALKS = 3  # per holder; see `memory.autograd_graph` for why a growing graph is not walked again and again
_SECOND_TIME = "Trying to backward through the graph a second time"
_KEY = "plimsoll"
_ANYBODY = ""


class _Mark:
    """A marker that is put into a node of a graph and lives as long as this node."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Marks:
    """The marks in graphs that one object holds, by step, and the line of user code that stores them in the object."""

    name: str
    by_step: dict[int, list[weakref.ref[_Mark]]] = field(default_factory=dict)
    num_walks: int = 0
    assignment: Assignment | None = None

    def add(self, step: int, tensors: list[Tensor]) -> None:
        """Mark tensors that no earlier step has marked, because a graph that was made once does not grow."""
        for tensor in tensors:
            own: dict[str, _Mark] = tensor.grad_fn.metadata.setdefault(_KEY, {})  # type: ignore[union-attr]
            if self.name not in own:
                own[self.name] = _Mark()
                self.by_step.setdefault(step, []).append(weakref.ref(own[self.name]))
        if len(self.by_step) > _MOST_MARKS:  # keep the first and the last
            del self.by_step[sorted(self.by_step)[_MOST_MARKS // 2]]

    def alive(self) -> tuple[int, ...]:
        return tuple(step for step, marks in self.by_step.items() if any(mark() is not None for mark in marks))


class GraphWatch:
    """Checks some of the steps of one training run.

    Attributes:
        lines: the findings, one for each step with a finding.
        memory: pairs of step and bytes in use after its check.
        failure: the error text if the last step failed in the graph of an earlier pass.
    """

    def __init__(self, workload: Workload, backend: Backend) -> None:
        self.lines: deque[GraphLine] = deque(maxlen=_MOST_LINES)
        self.memory: deque[tuple[int, int]] = deque(maxlen=_MOST_LINES)
        self.failure = ""
        self._workload = workload
        self._backend = backend
        self._marks: dict[str, _Marks] = {}
        self._sampled_steps = SampledSteps()

    @property
    def is_due(self) -> bool:
        """True if the current step will be checked."""
        return self._sampled_steps.is_due

    def note_loss(self, loss: Tensor, step: int) -> None:
        """Mark the graph of a loss, as returned by the user's function in the current step."""
        if self.is_due and has_graph(loss):
            self._marks.setdefault(_ANYBODY, _Marks(_ANYBODY)).add(step, [loss])

    def backward(self, loss: Tensor, step: int) -> None:
        """Run the backward pass of a step.

        Raises:
            InputError: if it reached the graph of an earlier forward pass; the error names the objects that hold it.
        """
        try:
            torch.autograd.backward(loss)
        except (RuntimeError, SecondBackward) as error:
            if isinstance(error, RuntimeError) and _SECOND_TIME not in str(error):
                raise
            told = _second_time(step, self._workload)
            self.failure = str(told)
            raise told from error

    def look(self, step: int) -> None:
        """Check, if due, which graphs are alive. Call this after ``step``, when its own graph should be freed, too."""
        is_due = self.is_due
        self._sampled_steps.passed(looked=is_due)
        self.failure = ""
        if not is_due:
            return
        self.memory.append((step, self._backend.use().used_bytes))
        graphs = [self._of_holder(one, step) for one in retained_by(self._workload.model, self._workload.loss)]
        found = [one for one in graphs if one is not None] or [*filter(None, [self._of_losses(step)])]
        if found:
            self.lines.append(GraphLine(step=step, retained=tuple(found)))

    def line_of(self, step: int) -> GraphLine | None:
        """Return the latest finding if it belongs to ``step``, otherwise ``None``."""
        return self.lines[-1] if self.lines and self.lines[-1].step == step else None

    def _of_holder(self, retained: RetainedTensor, step: int) -> RetainedGraph | None:
        """Mark the tensors that an object holds now, and return a finding if the object keeps earlier graphs alive.

        Returns ``None`` if it keeps no earlier graph alive.
        """
        marks = self._marks.setdefault(retained.name, _Marks(retained.name))
        marked, alive = tuple(marks.by_step), marks.alive()
        marks.add(step, retained.tensors[-_MOST_MARKED:])
        if len(alive) < _FEWEST_ALIVE:
            return None
        marks.assignment = marks.assignment or assignment_of(
            (*retained.owners, *callers()), retained.variable, retained.value
        )
        assignment = marks.assignment or Assignment("", "", "")
        size = self._walked(marks, retained.tensors)
        return RetainedGraph(
            holder=retained.name,
            num_tensors=len(retained.tensors),
            num_bytes=storage_bytes(retained.tensors, self._workload.model.parameters()),
            num_nodes=size.num_nodes if size else None,
            graph_bytes=size.saved_bytes if size else None,
            marked_steps=marked,
            alive_steps=alive,
            **assignment._asdict(),
        )

    def _walked(self, marks: _Marks, tensors: list[Tensor]) -> GraphSize | None:
        if marks.num_walks >= _MOST_WALKS:
            return None
        marks.num_walks += 1
        return graph_size(tensors, [*self._workload.model.parameters(), *tensors])

    def _of_losses(self, now: int) -> RetainedGraph | None:
        """Return the finding that graphs of earlier losses are alive, held by an unknown object; otherwise ``None``."""
        marks = self._marks.get(_ANYBODY, _Marks(_ANYBODY))
        alive = tuple(step for step in marks.alive() if step < now)
        if len(alive) < _FEWEST_ALIVE:
            return None
        marked = tuple(step for step in marks.by_step if step < now)
        return RetainedGraph(
            holder=_ANYBODY, num_tensors=len(alive), num_bytes=0, marked_steps=marked, alive_steps=alive
        )


def _second_time(step: int, workload: Workload) -> InputError:
    """Return the error for a graph that backward reached a second time; it names the holder of the graph."""
    retained = retained_by(workload.model, workload.loss)
    carried = [one for one in retained if is_read(one.owners, one.variable)] or retained
    if not carried:
        return InputError(
            f"step {step}: {GRAPH_IS_GONE}, which is already freed; no attribute of the model's modules or of the loss "
            "holds a tensor of that pass: write `hidden = hidden.detach()` where it is carried to the next pass"
        )
    names = ", ".join(f"`{one.name}`" for one in carried)
    assignments = [assignment_of(one.owners, one.variable, one.value) for one in carried]
    places = [f"; in {one.place}, write `{one.remedy}` for `{one.code}`" for one in assignments if one]
    how = "".join(places) or f"; write `{carried[0].name} = {carried[0].name}.detach()` after each pass"
    return InputError(
        f"step {step}: {GRAPH_IS_GONE}, which is already freed: {names} "
        f"is kept from pass to pass and not detached (a hidden state, for example){how}"
    )
