"""Micro-batches of equal shape as replays of one captured graph: forward, loss and backward in a single launch.

    replays = Replays(workload, retry, backend, position, parameters)
    replays.begin()                                            # of each try of a step
    loss = replays.run(micro_batch, share, scaler, eager)      # of each micro-batch

If a capture is not possible or fails, all passes run eagerly. One warning gives the reason, and the graph's memory is
freed. In a dry run nothing is captured. Instead, the operators of such a micro-batch are marked as part of a graph
(`plimsoll.memory.annotations`). They are not marked if the forward pass is observed to read tensor data on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from plimsoll.data.batch import leaves_of, move_batch
from plimsoll.device.base import Backend
from plimsoll.memory.annotations import as_captured
from plimsoll.models.hooks import CapturedPass
from plimsoll.models.workload import Workload
from plimsoll.records.run import OomEvent
from plimsoll.step.cuda_graphs.capture import GRAPHS, Capture, Captured, Eager, Scaler
from plimsoll.step.cuda_graphs.survey import Survey
from plimsoll.step.failpoints import failpoint
from plimsoll.step.oom_boundary import Position, attempt, without_fail
from plimsoll.step.retry import Retry, warn_at_the_loop

_MOST_CHANGES = 3  # of the surroundings, before captures end: if surroundings change in every step, no capture pays off
_IDLE_STEPS = 3  # steps without a micro-batch of the graph's shape
_ALIGNED_BYTES = 64  # size of a vector register, and more than any load of a GPU
_PLAIN = (str, bytes, bool, int, float, type(None))


class Replays:
    """Runs the micro-batches of one training run, by replaying a graph if this is requested and verified to be equal.

    Args:
        workload: the training run; its hook ``captured`` requests replays, and holds the captured graph.
        retry: restores the state before the step.
        backend: the backend of the device.
        position: the current position in the training run.
        parameters: returns an iterator over the parameters with gradients.
        is_dry_run: whether the training run is a dry run.

    Attributes:
        num_replays: the number of replayed micro-batches.
        why_not: the reason why replays are impossible, if known.
    """

    def __init__(
        self,
        workload: Workload,
        retry: Retry,
        backend: Backend,
        position: Position,
        parameters: Callable[[], Iterable[nn.Parameter]],
        *,
        is_dry_run: bool = False,
    ) -> None:
        self.num_replays = 0
        self.why_not: str | None = None
        self._workload, self._retry, self._backend, self._position = workload, retry, backend, position
        self._parameters, self._is_dry_run = parameters, is_dry_run
        self._capture = Capture(workload, retry, backend, parameters)
        self._is_first = True
        self._first_shapes: set[Hashable] = set()
        self._full: set[Hashable] = set()  # shapes whose graph did not fit
        self._shape: Hashable = None  # of the captured graph
        self._captured_at = 0  # the step number
        self._num_changes = self._num_idle = 0
        self._reached: list[nn.Parameter] = []  # in a dry run, the parameters with gradients
        self._static: dict[nn.Parameter, Tensor] | None = None

    def begin(self) -> None:
        """Begin an attempt at a step from the saved state.

        The graph is dropped if state that the captured pass reads has changed, or if it has not been replayed for
        several steps.
        """
        self._is_first = True
        captured = self._current
        if captured is None:
            return
        self._num_idle += 1
        why = captured.what_changed(self._retry.undo.remembered[0])
        if why is None and self._num_idle <= _IDLE_STEPS:
            return
        self.drop()
        self._num_changes += 1
        if self._num_changes > _MOST_CHANGES:
            self._give_up(f"{why or 'the shape of micro-batches'} changes again and again")

    def run(self, micro_batch: Any, share: float, scaler: Scaler, eager: Eager) -> Tensor:
        """Add the gradients of a micro-batch, and return its part of the batch's mean loss.

        Args:
            micro_batch: the micro-batch, on any device.
            share: the weight of the micro-batch in the mean loss of the batch.
            scaler: the gradient scaler, for fp16.
            eager: runs the pass without a graph.
        """
        if self._captured is None:
            return eager(move_batch(micro_batch, self._workload.device))
        is_first, self._is_first = self._is_first, False
        is_asked = self._backend.kind in GRAPHS and self.why_not is None
        kind = "" if self._is_dry_run else self._workload.device.type
        shape = shape_of(micro_batch, kind) if is_asked else None
        if self._is_dry_run:
            return self._in_dry_run(shape, is_first, micro_batch, eager)
        # An active dispatch mode must see the passes.
        if shape is not None and not self._retry.undo.is_due and _get_current_dispatch_mode() is None:
            # Only the first pass of a step can be repeated, and a capture pays off only for shapes that recur.
            if is_first and self._current is None and shape in self._first_shapes - self._full:
                self._try_to_capture(shape, micro_batch, share, scaler, eager)
            if self._current is not None and shape == self._shape:
                return self._replayed(self._current, micro_batch, share, scaler)
        if is_first:
            self._first_shapes.add(shape)
        return eager(move_batch(micro_batch, self._workload.device))

    def drop(self) -> None:
        """Drop the captured graph and free its memory."""
        while self._captured:
            self._captured.pop().release()

    def reset(self) -> None:
        """Forget the graph and everything learned about passes. Called when other techniques are installed."""
        self.drop()
        self.num_replays = self._num_changes = self._num_idle = 0
        self.why_not, self._shape = None, None
        self._first_shapes, self._full = set(), set()

    @property
    def why_none(self) -> str | None:
        """The reason why nothing was replayed, if replays were requested; otherwise ``None``."""
        if self._captured is None or self.num_replays:
            return None
        return self.why_not or ("too little memory to capture a graph" if self._full else "no graph was captured")

    @property
    def is_settled(self) -> bool:
        """True if no capture is pending, so that later passes will run in the same way as the last pass."""
        return self._captured is None or self._current is not None or bool(self.why_not or self._full)

    @property
    def uncounted_bytes(self) -> int:
        """Bytes that the last step's replays used, which torch counted as allocated only during the capture."""
        captured = self._current
        return captured.graph.num_bytes if captured is not None and self._captured_at < self._position.step else 0

    @property
    def _captured(self) -> list[CapturedPass] | None:
        return self._workload.hooks.captured

    @property
    def _current(self) -> Captured | None:
        captured = self._captured[0] if self._captured else None
        assert captured is None or isinstance(captured, Captured)
        return captured

    def _replayed(self, captured: Captured, micro_batch: Any, share: float, scaler: Scaler) -> Tensor:
        self._num_idle = 0
        for phase in ("forward", "loss", "backward"):
            self._position.phase = phase
            failpoint(phase)
        self.num_replays += 1
        return captured.replay(micro_batch, share, scaler)

    def _try_to_capture(self, shape: Hashable, micro_batch: Any, share: float, scaler: Scaler, eager: Eager) -> None:
        """Try to capture the first pass of a step, and restore the state from before it in any case."""
        work = partial(self._capture.of, micro_batch, share, scaler, eager)
        found = without_fail(lambda: attempt(work, self._backend, self._position))
        self._retry.go_back([*self._parameters()])
        if isinstance(found, Captured):
            assert self._captured is not None
            found.let_go()
            self._captured.append(found)
            self._shape, self._captured_at = shape, self._position.step + 1
            return
        self._backend.release()
        if isinstance(found, OomEvent):
            self._full.add(shape)
            warn_at_the_loop(
                f"too little memory to capture a graph of such micro-batches ({found.shortage}): they run without one"
            )
        else:
            self._give_up(found)

    def _give_up(self, why: str) -> None:
        self.why_not = why
        warn_at_the_loop(f"micro-batches are not replayed as a CUDA graph, because {why}: the steps run without one")

    def _in_dry_run(self, shape: Hashable, is_first: bool, micro_batch: Any, eager: Eager) -> Tensor:
        """Run a pass of a dry run.

        From the second step on, the operators of the pass are marked as part of a graph, and gradients persist between
        steps. The gradients are referenced here only between passes, because autograd adds in place only to gradients
        without other references.
        """
        moved = move_batch(micro_batch, self._workload.device)
        if self._position.step and self._static is None:
            self._static = {parameter: torch.empty_like(parameter) for parameter in self._reached}
        kept, self._static = self._static or {}, None if self._static is None else {}
        for parameter in self._reached:
            if parameter.grad is None and parameter in kept:
                parameter.grad = kept.pop(parameter).fill_(-0.0)
        kept.clear()
        is_captured = self._position.step and shape is not None and shape == self._shape
        with as_captured() if is_captured else nullcontext():
            loss = self._surveyed(eager, moved) if self._position.step == 0 and is_first else eager(moved)
        if self._position.step == 0 and is_first and self.why_not is None:
            self._shape, self._reached = shape, [one for one in self._parameters() if one.grad is not None]
        if self._static is not None:
            self._static.update((one, one.grad) for one in self._reached if one.grad is not None)
        return loss

    def _surveyed(self, eager: Eager, micro_batch: Any) -> Tensor:
        """Run a pass, and observe its forward pass. If it reads tensor data on the host, no pass will be replayed."""
        workload, survey = self._workload, Survey(self._workload.device)
        loss = workload.loss
        workload.loss = lambda model, batch: survey.of(lambda: loss(model, batch))
        try:
            return eager(micro_batch)
        finally:
            workload.loss, self.why_not = loss, survey.reason


def shape_of(micro_batch: Any, kind: str) -> Hashable:
    """Return a key that is equal for micro-batches which one graph can replay.

    Args:
        micro_batch: the micro-batch.
        kind: the type of the training device, where an eager pass uses tensors without a copy; empty in a dry run.

    Returns:
        The key, or ``None`` if it cannot be determined. It is also ``None`` if a floating-point tensor on the device is
        not aligned like the graph's copy: kernels may then be chosen differently and round differently.
    """
    found: list[Hashable] = []
    for path, leaf in leaves_of(micro_batch):
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or not _is_aligned(leaf, kind):
                return None
            found.append((path, tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, _PLAIN):
            found.append((path, leaf))
        elif isinstance(leaf, list | tuple) and all(isinstance(one, _PLAIN) for one in leaf):
            found.append((path, *leaf))
        else:
            return None
    return tuple(found)


def _is_aligned(leaf: Tensor, kind: str) -> bool:
    return not leaf.is_floating_point() or leaf.device.type != kind or leaf.data_ptr() % _ALIGNED_BYTES == 0
