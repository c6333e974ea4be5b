"""Gradient accumulation: a batch runs in micro-batches, whose gradients add up to the gradient of the whole batch.

The training step (`plimsoll.step.train_step`) splits the batch and weights the micro-batches. This module only lists
the sizes to consider: the smallest size for each number of micro-batches. For example, 40 samples in micro-batches of
16 take as long as in micro-batches of 14, but need more memory.

Numerics: sums are rounded in another order. Does NOT cover losses that compare samples of the batch, and BatchNorm
unless the user allows it. Batches of models with ``scale_grad_by_freq`` are never split (see `mechanisms.uncuttable`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from plimsoll.models.workload import Reason, Workload
from plimsoll.records.plan import MICRO_BATCH, Choice, micro_batch_choice
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique
from plimsoll.techniques.mechanisms.uncuttable import WholeBatch


class MicroBatch(Technique):
    """`Technique`: accumulate gradients over micro-batches."""

    name = MICRO_BATCH
    numerics = "reordered"
    summary = "the batch in micro-batches, whose gradients are summed"
    modifies = frozenset({"batch cut"})
    reaches = frozenset({"activations", "temporaries", "inputs"})
    works_on_shards = True
    is_for_trainers = True
    decides_time = True
    keeps_state_between_passes = False
    by_hand = "accumulate gradients over smaller micro-batches (gradient_accumulation_steps in the Trainer)"
    remedies: ClassVar = {"attention_scores": 2, "logits": 1}
    stage = "batch"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices of the smallest micro-batch size for each number of micro-batches, largest size first."""
        if setting.batch_size == 1:
            return "a batch of one sample cannot be cut"
        reason = self._whole(workload, setting)
        if reason is not None:
            return str(reason)
        return tuple(micro_batch_choice(size) for size in sizes_of(setting.batch_size))

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the size is not from 1 to the batch size, or the batch must not be split."""
        size = int(choice.options["samples"])
        if not 1 <= size <= setting.batch_size:
            return f"a micro-batch of {size} is not a part of a batch of {setting.batch_size}: give 1 to that many"
        reason = self._whole(workload, setting)
        return reason.why if reason is not None and size < setting.batch_size else None

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Do nothing: the step reads the size from the choice, because a longer batch may need a smaller size."""
        return nullcontext()

    @staticmethod
    def _whole(workload: Workload, setting: Setting) -> Reason | None:
        return WholeBatch(workload, "recut_batch_norm" in setting.allow).reason(also_idle=True)


def sizes_of(batch_size: int) -> tuple[int, ...]:
    """Return the smallest size, in samples, for every possible number of micro-batches; largest first.

    >>> sizes_of(12)
    (12, 6, 4, 3, 2, 1)
    """
    return tuple(sorted({-(-batch_size // number) for number in range(1, batch_size + 1)}, reverse=True))
