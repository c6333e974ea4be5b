"""Packed sequences of different lengths run as dense batches: one for each run of steps with the same samples.

On the CPU, torch processes a `PackedSequence` with different lengths step by step. In backward, each step allocates
zeros as large as the whole packed input, so the time grows with the square of the length. Between two lengths, however,
the rows are a dense batch of (steps, samples), a stretch, for which the dense kernels can be used. The technique is
offered for models whose class declares ``packs_sequences = True``.

Numerics: the dense kernels sum in another order. Dropout between layers of one direction is drawn stretch by stretch.
Does NOT cover layers with a custom forward, layers that `time_segments` has replaced, and compiled models.

Shapes: B samples, N rows of a packed batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from plimsoll.errors import InputError
from plimsoll.memory.known_values import values_of
from plimsoll.models.recurrent.segments import State
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.forwards import replaced_forward
from plimsoll.techniques.mechanisms.recurrent_layers import ComposedLayer, Sequences, is_plain_layer
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique


class PackedStretches(Technique):
    """`Technique`: run packed sequences as dense batches."""

    name = "packed_stretches"
    numerics = "reordered"
    summary = "packed sequences of different lengths run as dense batches, which is faster on the CPU"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    not_captured = "packed sequences have many different shapes"
    may_be_faster = True
    leaves_out_work = True
    stage = "time"
    turn = 2

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, on the CPU, for a model that declares that it packs its sequences."""
        reason = _why_not(workload.model)
        if reason is not None:
            return reason
        if setting.device != "cpu":
            return "cuDNN is fast on packed sequences: only the CPU kernels of torch are slow"
        if not setting.lengths_vary:
            return "no attention_mask shows that the samples of a batch have different lengths"
        if getattr(workload.model, "packs_sequences", False) is not True:
            return (
                f"it is unknown whether {type(workload.model).__name__} packs sequences (pack_padded_sequence): if it "
                "does, set `packs_sequences = True` in its class, or pin packed_stretches"
            )
        return (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if options are given, or the model has no recurrent layers."""
        if choice.options:
            return f"its options are {', '.join(choice.options)}: it has none, leave them out"
        return _why_not(workload.model)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the forward of each recurrent layer, on the instance, unless it is replaced already.

        Raises:
            InputError: if the model has no such layer.
        """
        reason = _why_not(workload.model)
        if reason is not None:
            raise InputError(f"{choice} cannot be used with {type(workload.model).__name__}: {reason}; leave it out")
        with ExitStack() as stack:
            for layer in _layers(workload.model):
                if "forward" not in vars(layer):
                    stack.enter_context(replaced_forward(layer, StretchedLayer(layer)))
            yield


class StretchedLayer(ComposedLayer):
    """The forward of a recurrent layer that runs packed sequences of different lengths in stretches."""

    def __call__(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """Compute the same result as the forward of the layer."""
        if isinstance(input, PackedSequence):
            sizes = values_of(input.batch_sizes)
            if sizes[0] != sizes[-1]:
                return self._packed(input, hx)
        return type(self._layer).forward(self._layer, input, hx)  # type: ignore[no-any-return]

    def _one_way(self, sequences: Sequences, state: State, layers: range, direction: int) -> tuple[Tensor, State]:
        """Return the outputs and the last state of ``layers`` in one direction.

        ``direction``: 0 runs forward in time, 1 from the last step to the first.
        """
        assert sequences.batch_sizes is not None
        weights = [self._weights(number, direction) for number in layers]  # once: a parametrization computes them
        shapes = [(len(list(steps)), num_samples) for num_samples, steps in groupby(sequences.batch_sizes)]
        rows = sequences.data.split_with_sizes([num_steps * num_samples for num_steps, num_samples in shapes])
        stretches = [part.view(*shape, -1) for part, shape in zip(rows, shapes, strict=True)]
        walk = self._to_the_first if direction else self._to_the_last
        outputs, state = walk(stretches, state, weights)
        return torch.cat([output.flatten(0, 1) for output in outputs]), state

    def _to_the_last(
        self, stretches: Sequence[Tensor], state: State, weights: list[list[Tensor]]
    ) -> tuple[list[Tensor], State]:
        """Run the stretches forward in time; return the output of each stretch and the last state of every sample.

        A sample ends when a stretch has fewer samples than the previous one.
        """
        outputs: list[Tensor] = []
        ended: list[State] = []
        for stretch in stretches:
            num_samples, num_before = stretch.shape[1], state[0].shape[1]
            if num_samples < num_before:
                state, rest = _split(state, [num_samples, num_before - num_samples])
                ended.append(rest)
            output, state = self._stretch(stretch, state, weights)
            outputs.append(output)
        return outputs, _joined([state, *reversed(ended)])

    def _to_the_first(
        self, stretches: Sequence[Tensor], state: State, weights: list[list[Tensor]]
    ) -> tuple[list[Tensor], State]:
        """Run the stretches backward in time; return the output of each stretch and the last state of every sample.

        A sample enters, with its initial state, when a stretch has more samples.
        """
        outputs: list[Tensor] = []
        back = stretches[::-1]
        counts = [0, *(stretch.shape[1] for stretch in back)]
        entering = _split(state, [after - before for before, after in pairwise(counts)])
        for number, stretch in enumerate(back):
            state = _joined([state, entering[number]]) if number else entering[0]
            output, state = self._stretch(stretch.flip(0), state, weights)
            outputs.append(output.flip(0))
        return outputs[::-1], state

    def _stretch(self, stretch: Tensor, state: State, weights: list[list[Tensor]]) -> tuple[Tensor, State]:
        state = tuple(part.contiguous() for part in state)  # a slice of the samples is not contiguous
        with _without_onednn() if self._layer.mode == "LSTM" else nullcontext():
            return self._together(Sequences(stretch, 0, None), state, weights)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN, so that torch runs an LSTM as matrix products, as it runs the other layers.

    oneDNN compiles code for each combination of steps and samples, and caches a thousand of them. Stretches keep having
    new shapes: the memory of a small tagger grew by 250 MiB in 150 steps.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of a module
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _split(state: State, counts: list[int]) -> list[State]:
    """Split a state into states of fewer samples. ``counts`` has the number of samples of each."""
    return list(zip(*(part.split_with_sizes(counts, 1) for part in state), strict=True))


def _joined(states: Sequence[State]) -> State:
    return tuple(torch.cat(parts, 1) for parts in zip(*states, strict=True))


def _layers(model: nn.Module) -> list[nn.RNNBase]:
    return [module for module in model.modules() if isinstance(module, nn.RNNBase) and is_plain_layer(module)]


def _why_not(model: nn.Module) -> str | None:
    if hasattr(model, "_orig_mod"):
        return "the model is compiled"
    if _layers(model):
        return None
    return f"{type(model).__name__} has no recurrent layers of torch (nn.LSTM, nn.GRU, nn.RNN)"
