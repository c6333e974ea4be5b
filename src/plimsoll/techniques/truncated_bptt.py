"""Truncated backpropagation through time: the gradient ends at the beginning of a segment of the sequence.

    Choice(technique="truncated_bptt", options={"steps": 128})

``steps`` is the length of a segment. 0 is the square root of the sequence length, or a quarter of the sequence up to
128 steps if that is longer. The hidden state passes from segment to segment, but its gradient does not (see Williams
and Peng 1990, https://doi.org/10.1162/neco.1990.2.4.490).

The gradient of a loss reaches back at most ``steps`` steps, and half as many on average. It is biased. `time_segments`
is exact and needs as little memory, but takes longer, because it computes segments twice.

It is for models that run in segments and return only their loss, as a sum over the segments
(`plimsoll.models.recurrent.segments`); other models are refused. Does NOT cover fp16: gradients are computed before the
loss is scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from plimsoll.errors import InputError
from plimsoll.models.distillation.loss import Distillation
from plimsoll.models.recurrent.segments import runs_in_segments, sums_its_loss
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.forwards import replaced_forward
from plimsoll.techniques.mechanisms.recurrent_layers import Cut
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique
from plimsoll.techniques.mechanisms.uncuttable import counts_rows
from plimsoll.techniques.time_segments import SegmentedModel, TimeSegments, segment_lengths, wrong_numbers


class TruncatedBptt(Technique):
    """`Technique`: gradients that reach back one segment."""

    name = "truncated_bptt"
    numerics = "lossy"
    summary = "gradients through time end at the beginning of a segment"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    is_for_the_run = True
    excludes: ClassVar = {TimeSegments.name: "time_segments cuts the same sequences"}
    not_captured = "Python carries the state from segment to segment"
    cuts_time = True
    may_be_faster = True
    by_hand = "cut the sequences and detach the state in the loader and the model"
    stage = "time"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return a choice for each segment length that `time_segments` offers."""
        reason = _why_not(workload)
        if reason is not None:
            return reason
        if setting.sequence_length is None:
            return (Choice(technique=self.name, options={"steps": 0}),)
        lengths = list(segment_lengths(setting.sequence_length))
        if not lengths:
            return f"sequences of {setting.sequence_length} steps are too short to be cut"
        return tuple(Choice(technique=self.name, options={"steps": steps}) for steps in lengths)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the job does not allow this technique, or ``steps``, the model or fp16 excludes it."""
        if self.name not in setting.allow:
            return f"it is lossy: allow it with `allow: [{self.name}]`"
        wrong = wrong_numbers(choice, {"steps": "the default"})
        if wrong is not None:
            return wrong
        if workload.precision == "fp16" or any(other.options.get("dtype") == "fp16" for other in others):
            return "its gradients are computed before the loss is scaled for fp16: use bf16"
        return self.excluded(others) or _why_not(workload)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the forward of the model, on the instance.

        Raises:
            InputError: if the model cannot be split over time.
        """
        reason = _why_not(workload)
        if reason is not None:
            raise InputError(
                f"cannot truncate the gradients of {type(workload.model).__name__}: {reason}; leave it out"
            )
        forward = SegmentedModel(workload.model, Cut(int(choice.options["steps"])), truncates=True)
        with replaced_forward(workload.model, forward):
            yield

    def gradient_steps(self, choice: Choice, num_steps: int) -> int | None:
        """Return the length of the first segment, which is the maximum distance that gradients reach back."""
        _, segment_steps = Cut(int(choice.options["steps"])).spans(num_steps)[0]
        return segment_steps


def _why_not(workload: Workload) -> str | None:
    model = workload.model
    if isinstance(workload.loss, Distillation):
        return "a teacher is compared with the model's output for whole sequences: use time_segments, which is exact"
    if runs_in_segments(model) and not sums_its_loss(model):
        return (
            f"the loss of {type(model).__name__} is computed at the end of the sequence (judges_the_end), and its "
            "gradient would reach back only one segment: use time_segments, which is exact"
        )
    if not sums_its_loss(model):
        return (
            f"{type(model).__name__} does not define how to compute the loss of one segment: it needs "
            "`in_segments`, which the recurrent language models have"
        )
    counted = counts_rows(model)
    return None if counted is None else str(counted)
