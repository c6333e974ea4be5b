"""Exact backpropagation through time in little memory: a sequence is split into segments, recomputed in backward.

    Choice(technique="time_segments", options={"steps": 128, "kept": 0})

``steps`` is the length of a segment. 0 is the square root of the sequence length, or a quarter of the sequence up to
128 steps if that is longer. ``kept`` is the number of states kept between segments; 0 keeps all of them.

With T steps in segments of S steps, T / S states and the activations of S steps are kept. Without segments, the
activations of T steps are kept. Fewer states need more computation (`mechanisms.recompute_schedule`).

Numerics: no gradient is truncated. Dropout masks are drawn per segment, and are the same in backward as in forward.
Does NOT cover loops over cells in a model's code (use `UnrolledCell`), and layers whose forward was replaced or is not
torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.errors import InputError
from plimsoll.models.recurrent.cells import StateForm, UnrolledCell, state_of_cell
from plimsoll.models.recurrent.segments import Passed, Run, State, runs_in_segments
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Value
from plimsoll.techniques.checkpointing import Checkpointing, chosen_blocks
from plimsoll.techniques.mechanisms.blocks import blocks_of
from plimsoll.techniques.mechanisms.forwards import replaced_forward
from plimsoll.techniques.mechanisms.purity import Attributes
from plimsoll.techniques.mechanisms.recurrent_layers import Cut, SegmentedLayer, is_plain_layer
from plimsoll.techniques.mechanisms.segment_recompute import Walk, has_hook, over_time
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique
from plimsoll.techniques.mechanisms.uncuttable import counts_rows

_FEWEST_STEPS = 16  # of a segment: with fewer, the setup of a kernel takes longer than its steps
_STEPS_PER_SEGMENT = 4  # ratio of the sequence to the longest segment, and of two lengths that are offered
_MOST_SEGMENTS_KEPT = 256  # with more segments, a choice that keeps fewer states is offered too


class TimeSegments(Technique):
    """`Technique`: exact backpropagation through time, segment by segment."""

    name = "time_segments"
    numerics = "reordered"
    summary = "recurrent layers run segment by segment, and each segment is recomputed in backward"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    is_for_trainers = True
    not_captured = "Python loops over the segments"
    cuts_time = True
    may_be_faster = True
    unoffered: ClassVar = {"kept": 0}
    stage = "time"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return a choice for each of the `segment_lengths`; the default if the sequence length is unknown.

        If there are many segments of the shortest length, a further choice keeps only some of the states between them.
        """
        reason = _why_not(workload.model)
        if reason is not None:
            return reason
        if setting.sequence_length is None:
            return (time_segments_choice(0),)
        lengths = list(segment_lengths(setting.sequence_length))
        if not lengths:
            return f"sequences of {setting.sequence_length} steps are too short to be cut"
        choices = [time_segments_choice(steps) for steps in lengths]
        num_segments = -(-setting.sequence_length // lengths[-1])
        if num_segments > _MOST_SEGMENTS_KEPT:
            choices.append(time_segments_choice(lengths[-1], kept=num_segments // _STEPS_PER_SEGMENT**2))
        return tuple(choices)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if an option is invalid, no layer can be split, or checkpointing covers the same layers."""
        wrong = wrong_numbers(choice, {"steps": "the default", "kept": "all"})
        if wrong is not None:
            return wrong
        checkpointed = (other for other in others if other.technique == Checkpointing.name)
        if any(_is_checkpointed(workload.model, other) for other in checkpointed):
            return "checkpointing recomputes the same layers: leave one of the two out"
        return _why_not(workload.model)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the forward of each recurrent part of the model, on the instance.

        Raises:
            InputError: if the model has no part that can be split over time.
        """
        reason = _why_not(workload.model)
        if reason is not None:
            raise InputError(f"cannot cut {type(workload.model).__name__} into segments: {reason}; leave {choice} out")
        cut = Cut(int(choice.options["steps"]), int(choice.options.get("kept", 0)))
        with ExitStack() as stack:
            for part in parts_in_time(workload.model):
                stack.enter_context(replaced_forward(part, _in_segments(part, cut)))
            yield


def time_segments_choice(steps: int, kept: int = 0) -> Choice:
    """Return the choice of segments of `steps` steps; the module docstring explains 0."""
    options: dict[str, Value] = {"steps": steps, "kept": kept} if kept else {"steps": steps}
    return Choice(technique=TimeSegments.name, options=options)


def wrong_numbers(choice: Choice, meanings: dict[str, str]) -> str | None:
    """Return the reason why options for numbers of steps or states are invalid; ``None`` if they are valid.

    Args:
        choice: A choice of a technique that splits sequences over time; ``steps`` is required.
        meanings: For each possible option, the meaning of 0.
    """
    if set(choice.options) - set(meanings) or "steps" not in choice.options:
        more = ", and kept if it is not all" if "kept" in meanings else " and nothing else"
        return f"its options are {', '.join(choice.options) or 'none'}: give steps{more}"
    for name, meaning in meanings.items():
        value = choice.options.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"{name} is {value}: give a whole number, 0 for {meaning}"
    return None


def segment_lengths(num_steps: int) -> Iterator[int]:
    """Yield the segment lengths offered for a sequence, longest first: powers of two, each a quarter of the previous.

    >>> list(segment_lengths(1000)), list(segment_lengths(10_000)), list(segment_lengths(40))
    ([128, 32], [2048, 512, 128, 32], [])
    """
    steps = 1 << max((num_steps // _STEPS_PER_SEGMENT).bit_length() - 1, 0)
    while steps >= _FEWEST_STEPS and steps < num_steps:
        yield steps
        steps //= _STEPS_PER_SEGMENT


def parts_in_time(model: nn.Module) -> list[nn.Module]:
    """Return the modules to split over time: outermost modules that run in segments, and other recurrent layers.

    A module that runs in segments is split with its embedding, output layer and loss. If only a layer is split, its
    input and output are still as long as the sequence.
    """
    if runs_in_segments(model) or isinstance(model, UnrolledCell) or is_plain_layer(model):
        return [model]
    return [part for child in model.children() for part in parts_in_time(child)]


def _why_not(model: nn.Module) -> str | None:
    if hasattr(model, "_orig_mod"):
        return "the model is compiled"
    parts = parts_in_time(model)
    if not parts:
        own = [type(part).__name__ for part in model.modules() if isinstance(part, nn.RNNBase)]
        if own:
            return f"{own[0]} has a custom forward, which cannot be cut"
        return f"{type(model).__name__} has no recurrent layers (nn.LSTM, nn.GRU, nn.RNN or plimsoll.UnrolledCell)"
    if any(has_hook(parameter) for part in parts for parameter in part.parameters()):
        return "a parameter has a hook (register_hook), which would see each segment's part of its gradient"
    counted = next(filter(None, map(counts_rows, parts)), None)
    if counted is not None:
        return str(counted)
    replaced = [type(part).__name__ for part in parts if "forward" in vars(part)]
    return f"the forward of {replaced[0]} was replaced" if replaced else None


def _is_checkpointed(model: nn.Module, choice: Choice) -> bool:
    blocks = blocks_of(model)
    numbers = chosen_blocks(str(choice.options["blocks"]), len(blocks))
    inside = {id(module) for part in parts_in_time(model) for module in part.modules()}
    return any(id(module) in inside for number in numbers for module in blocks[number][1].modules())


def _in_segments(part: nn.Module, cut: Cut) -> Any:
    if runs_in_segments(part):
        return SegmentedModel(part, cut)
    return _SegmentedCell(part, cut) if isinstance(part, UnrolledCell) else SegmentedLayer(part, cut)  # type: ignore[arg-type]


class SegmentedModel:
    """The forward of a model in segments; with ``truncates``, gradients end at the beginning of a segment."""

    def __init__(self, model: nn.Module, cut: Cut, *, truncates: bool = False) -> None:
        functools.update_wrapper(self, type(model).forward)
        self._model, self._cut, self._truncates = model, cut, truncates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the same result as the forward of the model."""
        unroll = Unrolled(self._model, self._cut, truncates=self._truncates and torch.is_grad_enabled())
        return self._model.in_segments(unroll, *args, **kwargs)  # type: ignore[operator]


class Unrolled(NamedTuple):
    """An `Unroll` that runs sequences in the segments of ``cut``.

    All trainable parameters of the model get gradients. ``truncates``: whether gradients end at the beginning of a
    segment.
    """

    model: nn.Module
    cut: Cut
    truncates: bool

    def __call__(self, run: Run, sequences: Sequence[Tensor], state: State = (), dim: int = 1) -> Passed:
        """Run the sequences segment by segment."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kept_sparse = {
            id(part.weight) for part in self.model.modules() if isinstance(part, nn.Embedding) and part.sparse
        }
        walk = Walk(
            partial(_purely, self.model, run),
            self.cut.spans(sequences[0].shape[dim]),
            dim,
            self.cut.num_slots,
            truncates=self.truncates,
            sparse=frozenset(number for number, one in enumerate(parameters) if id(one) in kept_sparse),
        )
        return over_time(walk, sequences, state, parameters)


def _purely(module: nn.Module, run: Run, segment: int, state: State, slices: tuple[Tensor, ...]) -> Passed:
    """Compute one segment, and raise an error if the module changes its attributes meanwhile."""
    attributes = Attributes(module)
    passed = run(state, *slices)
    attributes.require_unchanged()
    return passed


class _SegmentedCell:
    """The forward of an `UnrolledCell`, computed in segments."""

    def __init__(self, layer: UnrolledCell, cut: Cut) -> None:
        functools.update_wrapper(self, UnrolledCell.forward)
        self._layer, self._cut = layer, cut

    def __call__(self, input: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        layer = self._layer
        if input.dim() < 2 or input.shape[layer.step_dim] == 0:
            return UnrolledCell.forward(layer, input, state)
        form = StateForm.of(state)
        unroll = Unrolled(layer, self._cut, truncates=False)
        passed = unroll(partial(layer.stretch, form), (input,), state_of_cell(state), layer.step_dim)
        return passed.outputs[0], form.given(passed.state)
