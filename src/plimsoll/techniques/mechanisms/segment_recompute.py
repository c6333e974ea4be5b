"""Checkpointing over time: segments run forward without a graph, and are recomputed one by one in backward.

    passed = over_time(walk, sequences, state, parameters)

For T steps in segments of S steps, memory holds T / S states and the activations of S steps. Plain backpropagation
holds the activations of T steps. Fewer states may be kept: see `mechanisms.recompute_schedule`.

Numerics: plain backpropagation through time, except that gradients of parameters are summed in another order. The
recomputation uses the random numbers and the autocast state of the forward pass. Second derivatives and hooks on
parameters (``Tensor.register_hook``, called with the partial gradient of each segment) are refused. Not handled: random
number generators other than torch's default ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import InputError
from plimsoll.models.recurrent.segments import Passed, State
from plimsoll.techniques.mechanisms.outside_tensors import next_operation, refuse_what_is_outside
from plimsoll.techniques.mechanisms.purity import run_purely
from plimsoll.techniques.mechanisms.recompute_schedule import backward_states, kept_on_the_way
from plimsoll.techniques.mechanisms.rng_replay import Autocast, RandomNumbers

RunNumbered = Callable[[int, State, tuple[Tensor, ...]], Passed]
"""``run(segment, state, slices)`` computes the segment with this index from its initial state and slices."""


class SecondBackward(InputError):
    """Raised by a second backward pass through segments whose saved states have been freed."""


@dataclass(frozen=True)
class Walk:
    """The description of a chain of segments and of the way to run it.

    Args:
        run: computes one segment, given its index, the state before it (empty at first) and its slice of each sequence.
        spans: the first step and the number of steps of each segment, in the order of computation. Each step occurs
            once.
        dim: the time dimension of the sequences and the outputs.
        num_slots: number of states to keep in addition to the first state; ``None`` keeps all.
        draws: whether ``run`` may draw random numbers.
        truncates: whether gradients stop at the start of each segment (truncated backpropagation through time).
        sparse: indices of the parameters whose sparse gradients stay sparse; other sparse gradients become dense.
    """

    run: RunNumbered
    spans: tuple[tuple[int, int], ...]
    dim: int
    num_slots: int | None = None
    draws: bool = True
    truncates: bool = False
    sparse: frozenset[int] = frozenset()

    @property
    def num_slots_at_most(self) -> int:
        """The number of states to keep in addition to the first state, limited by the number of segments."""
        most = len(self.spans) - 1
        return most if self.num_slots is None else min(self.num_slots, most)


def equal_spans(num_steps: int, segment_steps: int) -> tuple[tuple[int, int], ...]:
    """Split steps into segments of ``segment_steps``; the last segment may be shorter.

    >>> equal_spans(10, 4)
    ((0, 4), (4, 4), (8, 2))
    """
    return tuple((start, min(segment_steps, num_steps - start)) for start in range(0, num_steps, segment_steps))


def over_time(walk: Walk, sequences: Sequence[Tensor], state: State, parameters: Sequence[Tensor]) -> Passed:
    """Run a chain of segments. The result is differentiable with respect to sequences, first state and parameters.

    Args:
        walk: the chain. If it has a single segment, that is computed without recomputation.
        sequences: tensors to split into segments.
        state: the state before the first segment.
        parameters: all other tensors that ``walk.run`` uses and that need a gradient.

    Raises:
        InputError: if a parameter has a hook; in backward, for a second derivative or a second backward pass.
    """
    # A parameter that is given twice (by layers that share weights) would get its whole gradient twice.
    parameters = [*{id(parameter): parameter for parameter in parameters}.values()]
    inputs = [*state, *sequences, *parameters]
    _refuse_hooks(parameters, len(walk.spans))
    if len(walk.spans) == 1:
        return walk.run(0, state, tuple(sequences))
    places = _Places(len(state), len(sequences))
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        with Autocast.now(sequences[0].device).again():
            return _walked(walk, tuple(sequences), state, lambda segment, state: None)
    # Parameters are inputs of a single node, which returns each gradient once. So hooks on accumulated gradients
    # (DDP's, and hooks that update parameters in backward) run once.
    node = _Truncated if walk.truncates else _Recomputed
    shape: list[int] = []
    flat = node.apply(walk, places, shape, *inputs)  # type: ignore[no-untyped-call]
    num_outputs, num_sums = shape
    return Passed(flat[:num_outputs], flat[num_outputs : num_outputs + num_sums], flat[num_outputs + num_sums :])


def has_hook(parameter: Tensor) -> bool:
    """Return whether a parameter has a ``Tensor.register_hook`` hook.

    Each segment would call such a hook with its part of the gradient.
    """
    return parameter.is_leaf and bool(parameter._backward_hooks)


def _refuse_hooks(parameters: Sequence[Tensor], num_segments: int) -> None:
    if any(map(has_hook, parameters)):
        raise InputError(
            f"a parameter has a hook (register_hook) that each of {num_segments} segments in time would call with a "
            "part of its gradient: use register_post_accumulate_grad_hook, or leave the technique out"
        )


@dataclass(frozen=True)
class _Places:
    """The positions of state, sequences and parameters among the tensors of an autograd node, in this order."""

    num_state: int
    num_sequences: int

    def split(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Return the state, the sequences and the parameters."""
        end = self.num_state + self.num_sequences
        return tuple(tensors[: self.num_state]), tuple(tensors[self.num_state : end]), tuple(tensors[end:])


class _Recomputed(torch.autograd.Function):
    """Autograd function for exact backpropagation through time. Backward recomputes the segments, last one first."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, places: _Places, shape: list[int], *inputs: Tensor) -> tuple[Tensor, ...]:
        state, sequences, _ = places.split(inputs)
        ctx.walk, ctx.places, ctx.autocast = walk, places, Autocast.now(sequences[0].device)
        kept: dict[int, _Before] = {0: _Before(state, _random_numbers(walk, sequences))}
        keeps = set(kept_on_the_way(len(walk.spans), walk.num_slots_at_most))

        def keep(segment: int, state: State) -> None:
            if segment in keeps:
                kept[segment] = _Before(state, _random_numbers(walk, sequences))

        with ctx.autocast.again():
            passed = _walked(walk, sequences, state, keep)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return _flat(passed, ctx, shape)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        _refuse_second(ctx, ctx.kept)
        walk: Walk = ctx.walk
        inputs = ctx.saved_tensors
        _, sequences, _ = ctx.places.split(inputs)
        gradients = _Gradients(walk, ctx.places, inputs, ctx.needs_input_grad[3:], _arriving(ctx, arriving))
        kept, ctx.kept = ctx.kept, None

        def advance(before: _Before, begin: int, end: int) -> _Before:
            before.random.restore()
            state = before.state
            with torch.no_grad(), ctx.autocast.again():
                for segment in range(begin, end):
                    state = run_purely(walk.run, segment, state, _slices(walk, segment, sequences)).state
            return _Before(state, _random_numbers(walk, sequences))

        with _random_numbers(walk, sequences).kept():
            for segment, before in backward_states(len(walk.spans), walk.num_slots_at_most, kept, advance):
                before.random.restore()
                gradients.add_segment(segment, before.state, ctx.autocast)
        return (None, None, None, *gradients.result())


class _Truncated(torch.autograd.Function):
    """Autograd function for truncated backpropagation through time, for a loss that is a single sum.

    Its forward already computes the gradients.
    """

    @staticmethod
    def forward(ctx: Any, walk: Walk, places: _Places, shape: list[int], *inputs: Tensor) -> tuple[Tensor, ...]:
        state, sequences, _ = places.split(inputs)
        autocast = Autocast.now(sequences[0].device)
        gradients = _Gradients(walk, places, inputs, ctx.needs_input_grad[3:], _Arriving((), (None,), ()))
        sums: list[Tensor] = []
        for segment in range(len(walk.spans)):
            passed = gradients.add_segment(segment, state, autocast)
            if passed.outputs or len(passed.sums) != 1:
                raise InputError(
                    f"truncated_bptt needs a model whose segments return one sum, its loss, and no outputs, but this "
                    f"one returns {len(passed.outputs)} outputs and {len(passed.sums)} sums: use time_segments, or "
                    "return the loss of a segment as its sum"
                )
            state = tuple(part.detach() for part in passed.state)
            sums = _added(sums, passed.sums)
        ctx.walk, ctx.gradients = walk, gradients.result()
        ctx.set_materialize_grads(False)
        flat = _flat(Passed((), tuple(sums), state), ctx, shape)
        ctx.mark_non_differentiable(*flat[1:])
        return flat

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        _refuse_second(ctx, ctx.gradients)
        gradients, ctx.gradients = ctx.gradients, None
        of_loss = arriving[0]
        if of_loss is None:
            return (None,) * (3 + len(gradients))
        return (None, None, None, *(None if one is None else one * of_loss for one in gradients))


@dataclass(frozen=True)
class _Arriving:
    """The incoming gradients of the outputs, the sums and the last state.

    ``None``: no gradient arrives. With truncated backpropagation, ``None`` in ``sums`` stands for a gradient of 1.
    """

    outputs: tuple[Tensor | None, ...]
    sums: tuple[Tensor | None, ...]
    state: tuple[Tensor | None, ...]


class _Gradients:
    """The gradients of an autograd node's inputs, accumulated segment by segment."""

    def __init__(
        self, walk: Walk, places: _Places, inputs: Sequence[Tensor], needed: Sequence[bool], arriving: _Arriving
    ) -> None:
        self._walk, self._arriving = walk, arriving
        self._first_state, self._sequences, self._parameters = places.split(inputs)
        _, self._needs_sequence, self._needs_parameter = places.split(needed)
        self._of_state: tuple[Tensor | None, ...] = arriving.state
        self._of_sequences: list[Tensor | None] = [
            torch.empty_like(sequence) if needs else None
            for sequence, needs in zip(self._sequences, self._needs_sequence, strict=True)
        ]
        self._of_parameters: list[Tensor | None] = [None] * len(self._parameters)
        self._is_checked = False  # all segments use the same tensors, so one check is enough
        self._are_sums: set[int] = set()  # sums that we own and can add to in place

    def add_segment(self, segment: int, state: State, autocast: Autocast) -> Passed:
        """Compute a segment with its graph from ``state``, run backward through it, and accumulate the gradients."""
        walk = self._walk
        differ = [part.is_floating_point() and not walk.truncates for part in state]
        with torch.enable_grad(), autocast.again():
            begin = tuple(part.detach().requires_grad_(differs) for part, differs in zip(state, differ, strict=True))
            slices = tuple(
                one.detach().requires_grad_(needs)
                for one, needs in zip(_slices(walk, segment, self._sequences), self._needs_sequence, strict=True)
            )
            number = next_operation()
            passed = run_purely(walk.run, segment, begin, slices)
        if not self._is_checked:
            refuse_what_is_outside(
                [*passed.outputs, *passed.sums, *passed.state], [*begin, *slices, *self._parameters], number
            )
            self._is_checked = True
        wanted = [
            *(one for one in begin if one.requires_grad),
            *(one for one in slices if one.requires_grad),
            *self._wanted_parameters(),
        ]
        found = iter(self._differentiated(segment, passed, wanted))
        self._of_state = tuple(next(found) if differs else None for differs in differ)
        for number, needs in enumerate(self._needs_sequence):
            if needs:
                _put(_slices(walk, segment, (self._of_sequences[number],))[0], next(found))
        for number, needs in enumerate(self._needs_parameter):
            if needs:
                self._add_parameter(number, next(found))
        return passed

    def result(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs; ``None`` for an input without a gradient."""
        of_state = self._of_state if not self._walk.truncates else (None,) * len(self._first_state)
        if len(of_state) != len(self._first_state):  # there was no state before the first segment
            of_state = ()
        return (*of_state, *self._of_sequences, *self._of_parameters)

    def _wanted_parameters(self) -> Iterator[Tensor]:
        return (one for one, needs in zip(self._parameters, self._needs_parameter, strict=True) if needs)

    def _differentiated(self, segment: int, passed: Passed, wanted: list[Tensor]) -> Sequence[Tensor | None]:
        pairs = []
        for output, arriving in zip(passed.outputs, self._arriving.outputs, strict=False):
            pairs.append((output, None if arriving is None else _slices(self._walk, segment, (arriving,))[0]))
        for total, arriving in zip(passed.sums, self._arriving.sums, strict=False):
            pairs.append((total, torch.ones_like(total) if arriving is None and self._walk.truncates else arriving))
        if not self._walk.truncates:
            pairs += zip(passed.state, self._of_state, strict=False)
        roots = [(root, given) for root, given in pairs if given is not None and root.requires_grad]
        if not roots or not wanted:
            return [None] * len(wanted)
        return torch.autograd.grad(
            [root for root, _ in roots], wanted, [given for _, given in roots], allow_unused=True
        )

    def _add_parameter(self, number: int, part: Tensor | None) -> None:
        if part is None:
            return
        total = self._of_parameters[number]
        if total is None and part.layout is torch.sparse_coo and number not in self._walk.sparse:
            # It is from a row lookup. Adding its few rows to a sum is cheap; a dense gradient for each segment is not.
            total = torch.zeros_like(self._parameters[number])
            self._are_sums.add(number)
        if total is None:
            self._of_parameters[number] = part  # the tensor may also be the gradient of another parameter
        elif number in self._are_sums and total.layout is torch.strided:
            self._of_parameters[number] = _with_added(total, part)
        else:
            self._of_parameters[number] = total + part
            self._are_sums.add(number)


def _with_added(total: Tensor, part: Tensor) -> Tensor:
    """Add a partial gradient to a sum in place."""
    if part.layout is not torch.sparse_coo:
        return total.add_(part)
    # Same as `add_`. In a dry run, `add_` fails for a single row, because it assumes that the row is coalesced.
    return total.index_add_(0, part._indices()[0], part._values())


def _put(place: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        place.zero_()
    else:
        place.copy_(gradient)


@dataclass(frozen=True)
class _Before:
    """The recurrent state, and the states of random number generators, at the start of a segment."""

    state: State
    random: RandomNumbers


def _random_numbers(walk: Walk, tensors: Sequence[Tensor]) -> RandomNumbers:
    return RandomNumbers.now(tensors) if walk.draws else RandomNumbers.none()


def _walked(walk: Walk, sequences: tuple[Tensor, ...], state: State, keep: Callable[[int, State], None]) -> Passed:
    """Run all segments without a graph. ``keep`` receives the state before each segment but the first."""
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for segment, (start, length) in enumerate(walk.spans):
        if segment:
            keep(segment, state)
        passed = run_purely(walk.run, segment, state, _slices(walk, segment, sequences))
        if not outputs:
            outputs = [_empty_for(output, sequences[0].shape[walk.dim], walk.dim) for output in passed.outputs]
        for whole, part in zip(outputs, passed.outputs, strict=True):
            whole.narrow(walk.dim, start, length).copy_(part)
        sums, state = _added(sums, passed.sums), passed.state
    return Passed(tuple(outputs), tuple(sums), state)


def _added(sums: list[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.detach() for part in parts] if not sums else [a + b.detach() for a, b in zip(sums, parts, strict=True)]


def _empty_for(output: Tensor, num_steps: int, dim: int) -> Tensor:
    shape = list(output.shape)
    shape[dim] = num_steps
    return output.new_empty(shape)


def _slices(walk: Walk, segment: int, sequences: Sequence[Any]) -> tuple[Tensor, ...]:
    start, length = walk.spans[segment]
    return tuple(sequence.narrow(walk.dim, start, length) for sequence in sequences)


def _flat(passed: Passed, ctx: Any, shape: list[int]) -> tuple[Tensor, ...]:
    """Return all tensors of a pass in one tuple; record the numbers of outputs and sums in ``ctx`` and ``shape``."""
    ctx.counts = len(passed.outputs), len(passed.sums)
    shape[:] = ctx.counts
    return (*passed.outputs, *passed.sums, *passed.state)


def _arriving(ctx: Any, gradients: Sequence[Tensor | None]) -> _Arriving:
    num_outputs, num_sums = ctx.counts
    end = num_outputs + num_sums
    return _Arriving(tuple(gradients[:num_outputs]), tuple(gradients[num_outputs:end]), tuple(gradients[end:]))


def _refuse_second(ctx: Any, kept: Any) -> None:
    num_segments = len(ctx.walk.spans)
    if torch.is_grad_enabled():
        raise InputError(
            f"create_graph=True does not work with {num_segments} time segments, because their gradients are computed "
            "without a graph: leave out time_segments"
        )
    if kept is None:
        raise SecondBackward(
            f"cannot run backward through {num_segments} segments in time a second time, because the first backward "
            "freed their saved states: add up the losses and call backward once"
        )
