"""Truncated backpropagation through time: the gradient ends where a segment of the sequence begins.

    Choice(technique="truncated_bptt", options={"steps": 128})

``steps`` is the length of a segment, 0 what it is in `time_segments`. The hidden state goes on from segment to segment,
its gradient does not (Williams and Peng 1990, https://doi.org/10.1162/neco.1990.2.4.490): a loss sees what the
parameters did in at most ``steps`` steps before it, in the mean half as many. The gradient is biased. `time_segments`
is exact, needs as little memory, and takes longer: it computes segments twice.

For models that run in segments and give nothing but their loss, as a sum over the segments
(`plimsoll.models.recurrent.segments`); others are refused. Does NOT cover fp16: gradients are made before the scale of
the loss arrives.
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
    """`Technique`: gradients that reach back a segment."""

    name = "truncated_bptt"
    numerics = "lossy"
    summary = "gradients through time end where a segment begins"
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
        """The same lengths as `time_segments` offers."""
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
        """What is not allowed, a number of steps that is none, and fp16."""
        if self.name not in setting.allow:
            return f"it is lossy: allow it with `allow: [{self.name}]`"
        wrong = wrong_numbers(choice, {"steps": "the default"})
        if wrong is not None:
            return wrong
        if workload.precision == "fp16" or any(other.options.get("dtype") == "fp16" for other in others):
            return "its gradients are made before fp16's scale of the loss arrives: use bf16"
        return self.excluded(others) or _why_not(workload)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the forward of the model, on the instance.

        Raises:
            InputError: if it cannot be cut.
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
        """Return the steps back to the beginning of a segment."""
        _, segment_steps = Cut(int(choice.options["steps"])).spans(num_steps)[0]
        return segment_steps


def _why_not(workload: Workload) -> str | None:
    model = workload.model
    if isinstance(workload.loss, Distillation):
        return "a teacher is compared with what the model says of whole sequences: time_segments is exact"
    if runs_in_segments(model) and not sums_its_loss(model):
        return (
            f"the loss of {type(model).__name__} is of the end of the sequence (judges_the_end), whose gradient would "
            "reach back a segment and no further: time_segments is exact"
        )
    if not sums_its_loss(model):
        return (
            f"{type(model).__name__} does not say how the loss of a stretch of time is computed: that takes "
            "`in_segments`, which the recurrent language models have"
        )
    counted = counts_rows(model)
    return None if counted is None else str(counted)
