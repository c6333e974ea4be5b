"""Capturing the forward and backward pass of a micro-batch, and verifying that its replay equals the eager pass.

    found = Capture(workload, retry, backend, parameters).of(micro_batch, share, scaler, eager)

The graph reads a static copy of its inputs and adds to static gradients. The first replay is compared with eager passes
from the same state: loss, gradients, written tensors and random state. The replay must be bitwise identical to these
passes, or as close to them as they are to each other. Otherwise the capture is refused. The caller restores the state.

Not detected: Python effects beyond the state that `plimsoll.step.undo.find_state` reaches and
`plimsoll.step.cuda_graphs.surroundings` compares. A loss function that prints or writes files does so only
in eager passes. If it reads files, replays use the values that were read at the capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from plimsoll.data.batch import leaves_of, map_leaves
from plimsoll.device.base import Backend
from plimsoll.device.cuda.graphs import CudaGraph
from plimsoll.models.workload import Workload
from plimsoll.step.cuda_graphs.repeats import Seen, are_alike, is_again
from plimsoll.step.cuda_graphs.surroundings import Around, flat, is_of_the_update
from plimsoll.step.cuda_graphs.survey import ReadAgain, Survey
from plimsoll.step.micro_batches import mean_loss
from plimsoll.step.missing_gradients import is_compiled
from plimsoll.step.result import at_least_fp32
from plimsoll.step.retry import Retry
from plimsoll.step.undo.contents import Contents
from plimsoll.step.undo.find_state import Reached
from plimsoll.step.undo.saved import SavedArray, is_same_state
from plimsoll.step.undo.snapshot import are_equal
from plimsoll.step.undo.state_before_step import Before

T = TypeVar("T")
Scaler = torch.amp.GradScaler | None
Eager = Callable[[Any], Tensor]
"""Runs the pass of a micro-batch on the device without a graph; returns its part of the batch's mean loss."""

_MORE_PASSES = 2  # eager passes, if the first two differ, to find out which values vary
_OWN_NUMBERS = {"cpu": {"torch"}, "cuda": {"device", "cudnn_dropout"}}
"""Names of the random states of a backend that belong to the device, by device type; all others belong to the host."""


class Graph(Protocol):
    """An object that captures work and replays it: see `plimsoll.device.cuda.graphs.CudaGraph`."""

    num_bytes: int

    def capture(self, work: Callable[[], T]) -> T:
        """Capture the kernels that ``work`` launches, and return its result, which the first replay will fill."""

    def replay(self) -> None:
        """Launch the captured kernels."""

    def release(self) -> None:
        """Free the graph's memory."""


GRAPHS: dict[str, Callable[[torch.device], Graph]] = {"cuda": CudaGraph}
"""Graph classes by device type."""


@dataclass(slots=True)
class Captured:
    """A captured graph with its static inputs and outputs, and the conditions of the pass at the capture (`around`).

    ``seed`` is the gradient with which backward starts. ``num_holders`` are the counts that `let_go` records.
    """

    graph: Graph
    inputs: Any
    loss: Tensor
    seed: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]]
    reached: Reached
    contents: Contents
    around: Around
    num_holders: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Free the graph's memory."""
        self.graph.release()

    def let_go(self) -> None:
        """Record how often the gradients are referenced between steps. If this number rises, a replay is forbidden."""
        self.num_holders = _num_holders(self.gradients)

    def replay(self, micro_batch: Any, share: float, scaler: Scaler) -> Tensor:
        """Add the gradients of a micro-batch of the captured shape, and return its part of the batch's mean loss."""
        with torch.no_grad():
            for (_, static), (_, leaf) in zip(leaves_of(self.inputs), leaves_of(micro_batch), strict=True):
                if isinstance(static, Tensor):
                    # A copy from pageable memory would wait for the previous replay.
                    is_far = static.is_cuda and not leaf.is_cuda
                    static.copy_(leaf.pin_memory() if is_far else leaf, non_blocking=True)
            for parameter, gradient in self.gradients:
                if parameter.grad is None:
                    parameter.grad = gradient.fill_(-0.0)
                elif parameter.grad is not gradient:
                    parameter.grad = gradient.copy_(parameter.grad)
        self.seed.copy_(_seed_of(self.loss, share, scaler))
        self.graph.replay()
        return _part_of(self.loss, share).clone()

    def what_changed(self, before: Before) -> str | None:
        """Return the name of state which passes may read and which changed since the capture; otherwise ``None``."""
        if before.reached is not self.reached:
            return "the model's modules"
        if any(now > then for now, then in zip(_num_holders(self.gradients), self.num_holders, strict=True)):
            return "the number of references to gradients"
        for number in self.contents.differing(before.contents):
            name = before.reached.places[number][0]
            if not (is_of_the_update(name) or are_equal(*map(flat, (self.contents[number], before.contents[number])))):
                return name
        return self.around.what_changed(before)


class Capture:
    """Captures passes of one training run. Each capture starts from the state that `Retry.remember` saved.

    Args:
        workload: the training run.
        retry: restores the saved state.
        backend: the backend of the device.
        parameters: returns an iterator over the parameters with gradients.
    """

    def __init__(
        self, workload: Workload, retry: Retry, backend: Backend, parameters: Callable[[], Iterable[nn.Parameter]]
    ) -> None:
        self._workload, self._retry, self._backend, self._parameters = workload, retry, backend, parameters

    def of(self, micro_batch: Any, share: float, scaler: Scaler, eager: Eager) -> Captured | str:
        """Capture the forward and backward pass of a micro-batch as a CUDA graph.

        Args:
            micro_batch: the micro-batch, on any device.
            share: the weight of the micro-batch in the mean loss of the batch.
            scaler: the gradient scaler, for fp16.
            eager: runs the pass without a graph.

        Returns:
            The captured graph, or the reason why its replay would differ from the eager pass.
        """
        device = self._workload.device
        why = self._obstacle()
        if why is not None:
            return why
        self._go_back()  # other passes may have run since the state was saved
        inputs = map_leaves(micro_batch, lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf)
        around = Around(self._retry.undo.remembered[0], device)
        if around.obstacle is not None:
            return around.obstacle
        first, why = self._first_pass(inputs, eager, around)
        if why is not None:
            return why
        # Run backward in this thread, so that the survey and the capture include it.
        with torch.autograd.set_multithreading_enabled(False):
            return self._proven(_Pass(self._workload, inputs, share, scaler), first, around)

    def _obstacle(self) -> str | None:
        if self._retry.hidden is not None:
            return self._retry.hidden
        if self._retry.extra_state:
            return "extra_state is given, and a pass may change it unnoticed"
        if torch.is_autocast_enabled(self._workload.device.type):
            return "the loop is inside torch.autocast, which caches casts of weights between passes"
        iterators = self._retry.undo.iterators()
        if iterators:
            return f"{min(iterators)} is an iterator, which a pass may advance"
        return "the model is compiled" if any(map(is_compiled, self._workload.model.modules())) else None

    def _first_pass(self, inputs: Any, eager: Eager, around: Around) -> tuple[Seen, str | None]:
        """Run an eager pass. Return its results, and why a replay would not reproduce them; ``None`` if it would."""
        versions, numbers = _versions(inputs), self._host_numbers()
        seen = self._seen(lambda: eager(inputs))
        changed = next(self._what_python_changed(), None) or around.what_a_pass_changed()
        why = None
        if changed is not None:
            why = f"a pass changes {changed}, and a replay runs no Python"
        elif _versions(inputs) != versions:
            why = "a pass writes to its micro-batch"
        elif not is_same_state(numbers, self._host_numbers()):
            why = "a pass draws random numbers on the host"
        elif any(one.grad is not None and one.grad.layout != torch.strided for one in self._parameters()):
            why = "gradients are sparse"
        self._go_back()
        return seen, why

    def _proven(self, one_pass: _Pass, first: Seen, around: Around) -> Captured | str:
        survey = Survey(self._workload.device)
        eager = [first, self._seen(lambda: survey.of(one_pass))]
        is_exact = first.has_bits_of(eager[-1])
        for _ in range(0 if is_exact or survey.reason else _MORE_PASSES):
            self._go_back()
            eager.append(self._seen(one_pass))
        gradients = [(one, one.grad) for one in self._parameters() if one.grad is not None]
        self._go_back()
        if survey.reason is not None or not are_alike(eager):
            return survey.reason or "eager passes of the same samples differ"
        one_pass.read = survey.read
        with ExitStack() as stack:
            graph = GRAPHS[self._workload.device.type](self._workload.device)
            stack.callback(graph.release)
            _begin_with(gradients)
            torch.clear_autocast_cache()
            loss = graph.capture(one_pass.loss)
            self._go_back()
            _begin_with(gradients)
            if not is_again(eager, self._seen(lambda: _replayed(graph, loss, one_pass.share))):
                return "its replay gives other results than the pass"
            stack.pop_all()
        before = self._retry.undo.remembered[0]
        assert one_pass.seed is not None
        return Captured(graph, one_pass.inputs, loss, one_pass.seed, gradients, before.reached, before.contents, around)

    def _seen(self, work: Callable[[], Tensor]) -> Seen:
        loss = work()
        gradients = [one.grad for one in self._parameters() if one.grad is not None]
        return Seen.of([loss, *gradients, *self._retry.undo.written()], self._backend.random_state())

    def _go_back(self) -> None:
        self._retry.go_back([*self._parameters()])

    def _what_python_changed(self) -> Iterator[str]:
        """Yield the names of Python containers, arrays and random generators that have changed since the step began."""
        for before in self._retry.undo.remembered:
            yield from (name for name, *_ in before.changed() if not is_of_the_update(name))
            yield from (name for name, saved in before.copies if isinstance(saved, SavedArray) and saved.is_changed())
            yield from ("a generator of random numbers" for one in before.generators if one.is_changed())

    def _host_numbers(self) -> dict[str, Any]:
        own = _OWN_NUMBERS[self._backend.kind]
        return {name: state for name, state in self._backend.random_state().items() if name not in own}


class _Pass:
    """The forward and backward pass of a micro-batch whose tensors stay at the same addresses."""

    def __init__(self, workload: Workload, inputs: Any, share: float, scaler: Scaler) -> None:
        self.inputs, self.share = inputs, share
        self.seed: Tensor | None = None
        self.read: list[Any] = []
        self._workload, self._scaler = workload, scaler

    def __call__(self) -> Tensor:
        """Run the pass and return its part of the batch's mean loss."""
        return _part_of(self.loss(), self.share)

    def loss(self) -> Tensor:
        """Run the forward pass and return the mean loss of the micro-batch."""
        # Not in backward, because autograd accumulates gradients out of place under a dispatch mode.
        with ReadAgain(self.read) if self.read else nullcontext():
            loss = mean_loss(self._workload, self.inputs)
        if self.seed is None:
            self.seed = _seed_of(loss, self.share, self._scaler)
        torch.autograd.backward(loss, self.seed)
        return loss.detach()


def _replayed(graph: Graph, loss: Tensor, share: float) -> Tensor:
    graph.replay()
    return _part_of(loss, share)


def _num_holders(gradients: list[tuple[nn.Parameter, Tensor]]) -> list[int]:
    """Count the references to each gradient and to its storage."""
    storages = ((gradient, gradient.untyped_storage()._cdata) for _, gradient in gradients)
    return [sys.getrefcount(gradient) + torch._C._storage_Use_Count(storage) for gradient, storage in storages]


def _begin_with(gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
    # -0.0 and not 0.0, because -0.0 + x is bitwise equal to x.
    for parameter, gradient in gradients:
        parameter.grad = gradient.fill_(-0.0)


def _seed_of(loss: Tensor, share: float, scaler: Scaler) -> Tensor:
    """Return the gradient with which backward starts. As a graph input, it lets share and scale change."""
    leaf = torch.zeros_like(loss, requires_grad=True)
    part = leaf * share if share != 1 else leaf
    (seed,) = torch.autograd.grad(part if scaler is None else scaler.scale(part), leaf)
    return seed


def _part_of(loss: Tensor, share: float) -> Tensor:
    return at_least_fp32(loss * share if share != 1 else loss)


def _versions(batch: Any) -> list[int]:
    return [leaf._version for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
