"""The split of a batch into weighted micro-batches, for training steps and evaluations.

`plimsoll.step.recovery` chooses the size of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll.data.batch import Units, batch_size_of, count_elements, count_units, move_batch, pick_samples, split_batch
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError
from plimsoll.models.workload import Reason, Workload
from plimsoll.records.run import OomEvent

_OF_BATCH_NORM = "Expected more than 1 value per channel"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Shape(NamedTuple):
    """The samples, loss units and elements per sample of a batch, which determine how it is split and weighted."""

    num_samples: int
    num_units: float
    elements_per_sample: float


NOTHING = Shape(num_samples=0, num_units=0, elements_per_sample=0.0)
"""The shape of a rank's empty part, if a batch has fewer samples than ranks."""


class MicroBatch(NamedTuple):
    """A micro-batch, its share of the batch's loss units, and the indices of its samples in the batch."""

    batch: Any
    share: float
    numbers: Sequence[int]


def shape_of(batch: Any, workload: Workload) -> Shape:
    """Return the shape of a batch. Its elements are counted with the function that the workload's hooks provide."""
    num_samples, num_units = batch_size_of(batch), count_units(batch, workload.units)
    return Shape(num_samples, num_units, workload.hooks.cut.elements_per_sample(batch, num_samples))


def shape_of_any(batch: Any, units: Units) -> Shape:
    """Return the shape of any batch. A batch that cannot be split counts as a single sample."""
    try:
        num_samples = batch_size_of(batch)
    except InputError:
        return Shape(1, 1, count_elements(batch))
    return Shape(num_samples, count_units(batch, units), count_elements(batch) / num_samples)


class Parts(NamedTuple):
    """The shape that determines how ranks split their parts of a batch, and the number of samples in the whole batch.

    ``shape.num_units`` is the sum over all ranks. The samples and elements in ``shape`` are the maximum of any rank.
    ``some_have_none`` is true if some rank has no sample with a target, for example if there are fewer samples than
    ranks.
    """

    shape: Shape
    num_samples: int
    some_have_none: bool


def parts_of_all(shape: Shape, ranks: Ranks) -> Parts:
    """Combine the shapes of all ranks' parts of a batch. ``shape`` is for this rank's part. All ranks must call it."""
    if ranks.is_alone:
        return Parts(shape, shape.num_samples, some_have_none=False)
    samples, units, elements = zip(*ranks.each(shape), strict=True)
    num_units = sum(units)
    whole = Shape(int(max(samples)), int(num_units) if num_units.is_integer() else num_units, max(elements))
    return Parts(whole, int(sum(samples)), some_have_none=not all(units))


def weighted_micro_batches(
    batch: Any, micro_batch: int, shape: Shape, workload: Workload, total_units: float | None = None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a batch. A micro-batch without a target is skipped, because it has no mean loss.

    ``micro_batch`` is in samples. Shares are relative to ``total_units``, by default the units of this batch.
    """
    if not shape.num_units:
        return

    def count(part: Any) -> float:
        return shape.num_units if part is batch else count_units(part, workload.units)

    cut = workload.hooks.cut.micro_batches(batch, shape.num_samples, micro_batch, count)
    for part, num_units, numbers in cut:
        yield MicroBatch(part, num_units / (total_units or shape.num_units), numbers)


def equal_micro_batches(batch: Any, micro_batch: int, num_samples: int) -> Iterator[MicroBatch]:
    """Split a batch without a target into micro-batches whose samples have equal weight."""
    for part in split_batch(batch, micro_batch):
        yield MicroBatch(part, batch_size_of(part) / num_samples, ())


class Filler:
    """A sample of weight zero, with which a rank without work computes because other ranks need it to take part.

    Blocks sharded over ranks are gathered by all ranks, or by none. A rank without a target in its part of the batch
    computes with a sample of another rank.

    Args:
        workload: provides the ranks and the units; a sample without units has no loss.
        is_lent: whether some rank has no sample with a target, and therefore borrows a sample of another rank.
    """

    def __init__(self, workload: Workload, is_lent: bool) -> None:
        self._ranks, self._units, self._is_lent = workload.ranks, workload.units, is_lent
        self._is_told = workload.hooks.cut.depends_on_values

    def filled(self, micro_batches: Iterator[MicroBatch], num_micro_batches: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank, then fillers, so that all ranks yield equally many.

        All ranks must call it. ``num_micro_batches`` is the maximum number of micro-batches on any rank. If this number
        depends on the contents of batches, the argument is ignored, and the ranks exchange their numbers instead.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before it could lend a sample.
        """
        if self._is_told:
            micro_batches = iter(own_batches := list(micro_batches))
            self._ranks.require_all()
            num_micro_batches = int(max(number for (number,) in self._ranks.each([len(own_batches)])))
        first = next(micro_batches, None)
        own = None if first is None else self._with_target(first.batch)
        filler = self._lent(own) if self._is_lent else own
        for one in chain(() if first is None else (first,), micro_batches):
            yield one
            num_micro_batches -= 1
        for _ in range(num_micro_batches):
            yield MicroBatch(filler, 0.0, ())

    def _lent(self, own: Any) -> Any:
        """Return this rank's own sample, or else the sample of the first rank that has one. All ranks must call it."""
        here = None if own is None else move_batch(own, torch.device("cpu"))
        every = self._ranks.gather_agreed(here)
        return next(one for one in every if one is not None) if own is None else own

    def _with_target(self, micro_batch: Any) -> Any:
        """Return the first sample that has a target, or the whole micro-batch if no single sample has one."""
        each = (pick_samples(micro_batch, [number]) for number in range(batch_size_of(micro_batch)))
        return next((one for one in each if count_units(one, self._units)), micro_batch)


def autocast(workload: Workload) -> torch.autocast:
    """Return the autocast context for a forward pass and its loss."""
    dtype = _AUTOCAST.get(workload.precision)
    return torch.autocast(workload.device.type, dtype=dtype, enabled=dtype is not None)


def mean_loss(workload: Workload, micro_batch: Any) -> Tensor:
    """Compute the mean loss of a micro-batch that is on the device.

    Raises:
        InputError: if the loss function does not return a tensor of one number, or BatchNorm gets a single value per
            channel.
    """
    try:
        with autocast(workload):
            loss = workload.loss(workload.model, micro_batch)
    except ValueError as error:
        if _OF_BATCH_NORM not in str(error):
            raise
        raise InputError(
            f"BatchNorm has no statistics in a pass with a single value per channel ({error}): give micro-batches with "
            "at least 2 samples in each pass, or put BatchNorm into evaluation mode"
        ) from error
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError(f"loss(model, batch) returned {found}: return the mean loss, a tensor of one number")


def no_way_out(event: OomEvent, micro_batch: int, shape: Shape, whole: Reason | None) -> str:
    """Return the error message for a step that does not fit in memory.

    ``whole`` is the reason why the batch must not be split; ``None`` if it may be split.
    """
    where = f"memory ran out in the {event.phase} phase of step {event.step}"
    if event.phase == "optimizer":
        why = "no micro-batch changes what the update needs: give a larger budget, or an optimizer with fewer states"
    elif whole is not None:
        why = f"the batch of {shape.num_samples} samples was not cut, because {whole}, or give a larger budget"
    else:
        why = (
            f"micro-batch {micro_batch} is the smallest possible: give a larger budget, shorter sequences or a smaller "
            "model"
        )
    return f"{where} ({event.shortage}); the step was undone. {why}"
