"""Watching whether the graphs of earlier steps stay in memory, and who keeps them.

A graph is alive as long as one of its nodes is. In the steps that are looked at, a small object of ours is put into the
``metadata`` of the nodes that made the loss and what the user's objects keep (`plimsoll.step.retained.tensors`); it
goes when the node goes. So a later check knows which of the marked graphs are still there, without keeping any of them
alive itself.

Steps are looked at ever more rarely (`plimsoll.step.sampled_steps`), which keeps the cost of a step at microseconds.
Only where an earlier graph is alive a line is made of it, and only in the first of these checks the graph is walked and
the user's source read.

Does NOT see graphs that are kept for a part of a step only, and what is kept without a graph.
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

_MOST_MARKED = 8  # tensors of one holder in one check, the newest: a container may have thousands
_MOST_MARKS = 32  # steps that are asked for in later checks
_FEWEST_ALIVE = 2  # a state that is carried on for one step, or made once, is no graph of every step
_MOST_LINES = 1000
_MOST_WALKS = 3  # per holder; see `memory.autograd_graph` for why a growing graph is not walked again and again
_SECOND_TIME = "Trying to backward through the graph a second time"
_KEY = "plimsoll"
_ANYBODY = ""


class _Mark:
    """What is put into a node; it lives as long as the node."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Marks:
    """The marks of one holder by their steps, how often its graph was walked, and the line that assigns it."""

    name: str
    by_step: dict[int, list[weakref.ref[_Mark]]] = field(default_factory=dict)
    num_walks: int = 0
    assignment: Assignment | None = None

    def add(self, step: int, tensors: list[Tensor]) -> None:
        """Mark what no earlier step has marked: a graph that was made once and stays is not one of every step."""
        for tensor in tensors:
            own: dict[str, _Mark] = tensor.grad_fn.metadata.setdefault(_KEY, {})  # type: ignore[union-attr]
            if self.name not in own:
                own[self.name] = _Mark()
                self.by_step.setdefault(step, []).append(weakref.ref(own[self.name]))
        if len(self.by_step) > _MOST_MARKS:  # the first ones stay, and the last ones
            del self.by_step[sorted(self.by_step)[_MOST_MARKS // 2]]

    def alive(self) -> tuple[int, ...]:
        return tuple(step for step, marks in self.by_step.items() if any(mark() is not None for mark in marks))


class GraphWatch:
    """Checks some of the steps of one training.

    Attributes:
        lines: what was found, of the steps in which something was.
        memory: the bytes in use after each check, by its step.
        failure: what the last step ended with, if it came to an earlier graph.
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
        """Whether the step that is running will be looked at."""
        return self._sampled_steps.is_due

    def note_loss(self, loss: Tensor, step: int) -> None:
        """Mark the graph of a loss of a step that is running, as the user's function returned it."""
        if self.is_due and has_graph(loss):
            self._marks.setdefault(_ANYBODY, _Marks(_ANYBODY)).add(step, [loss])

    def backward(self, loss: Tensor, step: int) -> None:
        """Do the backward pass of a step.

        Raises:
            InputError: if it came to the graph of an earlier forward pass; it says who keeps that.
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
        """Check, if it is time to, what is alive after ``step``, when nothing of its graph should be."""
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
        """What was found after ``step``, if it was the last that was looked at and something was."""
        return self.lines[-1] if self.lines and self.lines[-1].step == step else None

    def _of_holder(self, retained: RetainedTensor, step: int) -> RetainedGraph | None:
        """What one holder keeps of marked steps; marks what it has now."""
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
        """The losses of earlier steps that are alive, kept by nobody who was found."""
        marks = self._marks.get(_ANYBODY, _Marks(_ANYBODY))
        alive = tuple(step for step in marks.alive() if step < now)
        if len(alive) < _FEWEST_ALIVE:
            return None
        marked = tuple(step for step in marks.by_step if step < now)
        return RetainedGraph(
            holder=_ANYBODY, num_tensors=len(alive), num_bytes=0, marked_steps=marked, alive_steps=alive
        )


def _second_time(step: int, workload: Workload) -> InputError:
    """Say who keeps the graph that backward came to for the second time."""
    retained = retained_by(workload.model, workload.loss)
    carried = [one for one in retained if is_read(one.owners, one.variable)] or retained
    if not carried:
        return InputError(
            f"step {step}: {GRAPH_IS_GONE}, which is gone by then; what "
            "keeps a tensor of that pass is no attribute of the model's modules or of the loss: write "
            "`hidden = hidden.detach()` where it is carried from one pass to the next"
        )
    names = ", ".join(f"`{one.name}`" for one in carried)
    assignments = [assignment_of(one.owners, one.variable, one.value) for one in carried]
    places = [f"; in {one.place}, write `{one.remedy}` for `{one.code}`" for one in assignments if one]
    how = "".join(places) or f"; write `{carried[0].name} = {carried[0].name}.detach()` after each pass"
    return InputError(
        f"step {step}: {GRAPH_IS_GONE}, which is gone by then: {names} "
        f"is kept from pass to pass and not detached (a hidden state, for example){how}"
    )
