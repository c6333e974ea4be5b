"""One captured pass of a micro-batch, and the proof that its replay is that pass.

    found = Capture(workload, retry, backend, parameters).of(micro_batch, share, scaler, eager)

The graph reads a static copy of its inputs and adds to static gradients. Equal or refused: its first replay must have
the bits of eager passes from the same state (loss, gradients, what they wrote and random numbers), or be as near to
them as they are to each other. Who calls puts the state back.

Does NOT see what Python does beyond what `plimsoll.step.undo.find_state` reaches and
`plimsoll.step.cuda_graphs.surroundings` compares: what a loss prints, or writes to a file, it prints and writes in
eager passes only, and what it reads there stays as it was.
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
"""Adds the gradients of a micro-batch that is on the device, and returns its part of the loss."""

_MORE_PASSES = 2  # where two differ, to see what is repeated and what is not
_OWN_NUMBERS = {"cpu": {"torch"}, "cuda": {"device", "cudnn_dropout"}}
"""The random states of a backend that are the device's; the others are the host's."""


class Graph(Protocol):
    """What captures work and replays it: see `plimsoll.device.cuda.graphs.CudaGraph`."""

    num_bytes: int

    def capture(self, work: Callable[[], T]) -> T:
        """Capture what work launches, and return what the first replay will fill."""

    def replay(self) -> None:
        """Launch it."""

    def release(self) -> None:
        """Give its memory back."""


GRAPHS: dict[str, Callable[[torch.device], Graph]] = {"cuda": CudaGraph}
"""What captures, by the type of the device."""


@dataclass(slots=True)
class Captured:
    """A graph with what it reads and writes, and what was around it."""

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
        """Give the graph's memory back."""
        self.graph.release()

    def let_go(self) -> None:
        """Note, when no step is under way, that nobody else has the gradients, which the next ones will change."""
        self.num_holders = _num_holders(self.gradients)

    def replay(self, micro_batch: Any, share: float, scaler: Scaler) -> Tensor:
        """Add the gradients of a micro-batch of the same shape, and return its part of the loss."""
        with torch.no_grad():
            for (_, static), (_, leaf) in zip(leaves_of(self.inputs), leaves_of(micro_batch), strict=True):
                if isinstance(static, Tensor):
                    # From pageable memory the copy would wait for the replay before it.
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
        """What is not as it was at the capture, of what a pass may read, before another step; ``None`` if all is."""
        if before.reached is not self.reached:
            return "the model's modules"
        if any(now > then for now, then in zip(_num_holders(self.gradients), self.num_holders, strict=True)):
            return "what keeps gradients of earlier steps"
        for number in self.contents.differing(before.contents):
            name = before.reached.places[number][0]
            if not (is_of_the_update(name) or are_equal(*map(flat, (self.contents[number], before.contents[number])))):
                return name
        return self.around.what_changed(before)


class Capture:
    """Captures passes of one training, from the state that `Retry.remember` has taken.

    Args:
        workload: the training.
        retry: goes back to the state.
        backend: of the device.
        parameters: iterates over what has gradients.
    """

    def __init__(
        self, workload: Workload, retry: Retry, backend: Backend, parameters: Callable[[], Iterable[nn.Parameter]]
    ) -> None:
        self._workload, self._retry, self._backend, self._parameters = workload, retry, backend, parameters

    def of(self, micro_batch: Any, share: float, scaler: Scaler, eager: Eager) -> Captured | str:
        """Capture the pass of a micro-batch; returns why not where a replay would not be that pass.

        Args:
            micro_batch: the micro-batch, on any device.
            share: its share of the mean loss.
            scaler: of the loss, for fp16.
            eager: the pass without a graph.
        """
        device = self._workload.device
        why = self._obstacle()
        if why is not None:
            return why
        self._go_back()  # where a step is one of several from the state that is remembered
        inputs = map_leaves(micro_batch, lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf)
        around = Around(self._retry.undo.remembered[0], device)
        if around.obstacle is not None:
            return around.obstacle
        first, why = self._first_pass(inputs, eager, around)
        if why is not None:
            return why
        # In this thread the survey sees the backward pass, and a capture of this thread takes it.
        with torch.autograd.set_multithreading_enabled(False):
            return self._proven(_Pass(self._workload, inputs, share, scaler), first, around)

    def _obstacle(self) -> str | None:
        if self._retry.hidden is not None:
            return self._retry.hidden
        if self._retry.extra_state:
            return "extra_state is given, of which it is not seen what a pass changes"
        if torch.is_autocast_enabled(self._workload.device.type):
            return "the loop is inside of torch.autocast, which keeps casts of weights from pass to pass"
        iterators = self._retry.undo.iterators()
        if iterators:
            return f"{min(iterators)} is an iterator, which a pass may move"
        return "the model is compiled" if any(map(is_compiled, self._workload.model.modules())) else None

    def _first_pass(self, inputs: Any, eager: Eager, around: Around) -> tuple[Seen, str | None]:
        """An eager pass, and what it does that a replay would not."""
        versions, numbers = _versions(inputs), self._host_numbers()
        seen = self._seen(lambda: eager(inputs))
        changed = next(self._what_python_changed(), None) or around.what_a_pass_changed()
        why = None
        if changed is not None:
            why = f"a pass changes {changed}, and a replay runs no Python"
        elif _versions(inputs) != versions:
            why = "a pass writes what is in its micro-batch"
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
                return "its replay has other bits than the pass"
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
        """Names of what is in other places, or in arrays and generators, since the step began."""
        for before in self._retry.undo.remembered:
            yield from (name for name, *_ in before.changed() if not is_of_the_update(name))
            yield from (name for name, saved in before.copies if isinstance(saved, SavedArray) and saved.is_changed())
            yield from ("a generator of random numbers" for one in before.generators if one.is_changed())

    def _host_numbers(self) -> dict[str, Any]:
        own = _OWN_NUMBERS[self._backend.kind]
        return {name: state for name, state in self._backend.random_state().items() if name not in own}


class _Pass:
    """Forward and backward of a micro-batch that lies where it will always lie."""

    def __init__(self, workload: Workload, inputs: Any, share: float, scaler: Scaler) -> None:
        self.inputs, self.share = inputs, share
        self.seed: Tensor | None = None
        self.read: list[Any] = []
        self._workload, self._scaler = workload, scaler

    def __call__(self) -> Tensor:
        """Do it; returns its part of the loss."""
        return _part_of(self.loss(), self.share)

    def loss(self) -> Tensor:
        """Do it; returns the mean loss of the micro-batch."""
        # Not in backward: under a dispatch mode autograd adds gradients up out of place.
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
    """Count who has each gradient, by itself or a view of it."""
    storages = ((gradient, gradient.untyped_storage()._cdata) for _, gradient in gradients)
    return [sys.getrefcount(gradient) + torch._C._storage_Use_Count(storage) for gradient, storage in storages]


def _begin_with(gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
    # -0.0 and not 0.0: the first addition to it leaves what was added, to the last bit.
    for parameter, gradient in gradients:
        parameter.grad = gradient.fill_(-0.0)


def _seed_of(loss: Tensor, share: float, scaler: Scaler) -> Tensor:
    """What backward begins with: static, so that another share of the loss or another scale needs no other graph."""
    leaf = torch.zeros_like(loss, requires_grad=True)
    part = leaf * share if share != 1 else leaf
    (seed,) = torch.autograd.grad(part if scaler is None else scaler.scale(part), leaf)
    return seed


def _part_of(loss: Tensor, share: float) -> Tensor:
    return at_least_fp32(loss * share if share != 1 else loss)


def _versions(batch: Any) -> list[int]:
    return [leaf._version for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
