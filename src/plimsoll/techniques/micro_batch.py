"""A batch in micro-batches whose gradients add up to the whole batch's.

The training step (`plimsoll.run.step`) cuts and weighs them; here is only which sizes there are: all that give another
number of pieces, since 40 samples in pieces of 16 take as long as in pieces of 14, and more memory.

Numerics: sums are rounded in another order. Does NOT cover losses that look at the whole batch, and BatchNorm (which is
not cut unless the user allows it).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from torch import nn

from plimsoll.records.plan import Choice, Numerics, micro_batch_choice
from plimsoll.records.trace import Category
from plimsoll.techniques._base import Choices, Setting
from plimsoll.workload import Workload


class MicroBatch:
    """`Technique`: accumulate gradients over pieces of the batch."""

    name: ClassVar[str] = "micro_batch"
    numerics: ClassVar[Numerics] = "reordered"
    summary: ClassVar[str] = "the batch in pieces, whose gradients add up to the whole batch's"
    reaches: ClassVar[frozenset[Category]] = frozenset({"activations", "temporaries", "inputs"})
    is_for_the_run: ClassVar[bool] = False
    may_be_faster: ClassVar[bool] = False

    def menu(self, workload: Workload, setting: Setting) -> Choices | str:
        """Every size that needs another number of pieces, largest first."""
        if setting.batch_size == 1:
            return "a batch of one sample cannot be cut"
        if self._must_stay_whole(workload, setting):
            return (
                "the model has BatchNorm, whose statistics would be of each piece: allow it with "
                "`allow: [recut_batch_norm]`"
            )
        return tuple(micro_batch_choice(size) for size in sizes_of(setting.batch_size))

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """A size is from 1 to the batch; BatchNorm keeps the batch whole."""
        size = int(choice.options["samples"])
        if not 1 <= size <= setting.batch_size:
            return f"a micro-batch of {size} is not a part of a batch of {setting.batch_size}: give 1 to that many"
        if size < setting.batch_size and self._must_stay_whole(workload, setting):
            return "the model has BatchNorm, whose statistics would be of each piece and not of the batch"
        return None

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Do nothing: the step reads the size from the choice, because an outlier may need a smaller one."""
        return nullcontext()

    @staticmethod
    def _must_stay_whole(workload: Workload, setting: Setting) -> bool:
        has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in workload.model.modules())
        return has_batch_norm and "recut_batch_norm" not in setting.allow


def sizes_of(batch_size: int) -> tuple[int, ...]:
    """The smallest size for every possible number of pieces, largest first.

    >>> sizes_of(12)
    (12, 6, 4, 3, 2, 1)
    """
    return tuple(sorted({-(-batch_size // pieces) for pieces in range(1, batch_size + 1)}, reverse=True))
