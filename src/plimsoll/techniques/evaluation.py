"""Evaluation in smaller passes, so that it does not need more memory than training.

Without gradients, a pass saves nothing for backward, but its logits and its largest layer may still be the peak of a
run. This happens if training is checkpointed, uses micro-batches, or computes its loss in chunks. This module decides
the number of samples per pass, and `plimsoll.step.evaluate` splits the batches. Logits are freed once the loss of a
pass has been computed.

Numerics: training is bitwise identical. The loss of an evaluation is the same mean, but summed in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from plimsoll.models.workload import Workload, hooked
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting, Technique


class EvaluationPass(Technique):
    """`Technique`: bound the samples of one evaluation pass."""

    name = "evaluation"
    numerics = "reordered"
    summary = "evaluation in smaller passes than training"
    modifies = frozenset({"batch cut"})
    reaches = frozenset({"temporaries", "inputs"})
    only_in = frozenset({"evaluation"})
    works_on_shards = True
    keeps_state_between_passes = False
    exports: ClassVar = {
        "transformers": lambda choice, _: Exported({"per_device_eval_batch_size": int(choice.options["samples"])})
    }
    by_hand = "set the evaluation's batch size (per_device_eval_batch_size in the Trainer)"
    stage = "evaluation"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices of passes with a half, a quarter, ... of the batch, if the training evaluates at all."""
        if setting.batch_size == 1:
            return "a batch of one sample cannot be cut"
        if setting.trace is not None and "evaluation" not in setting.trace.ops.phase:
            return "the training does not evaluate"
        if workload.kept_whole is not None:
            return str(workload.kept_whole)
        sizes = [setting.batch_size]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(Choice(technique=self.name, options={"samples": size}) for size in sizes[1:])

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the number of samples is below 1, or the batch must not be split."""
        samples = int(choice.options["samples"])
        if workload.kept_whole is not None and samples < setting.batch_size:
            return workload.kept_whole.why
        return None if samples >= 1 else f"an evaluation pass of {samples} samples evaluates nothing: give 1 or more"

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Set the number of samples of an evaluation pass."""
        with hooked(workload, replace(workload.hooks, evaluation_samples=int(choice.options["samples"]))):
            yield
