"""How a batch is cut into micro-batches and weighted; common to a training step and an evaluation.

Does NOT choose their size: see `plimsoll.step.recovery`.
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
    """What of a batch decides how it is cut and weighted."""

    num_samples: int
    num_units: float
    elements_per_sample: float


NOTHING = Shape(num_samples=0, num_units=0, elements_per_sample=0.0)
"""The part of a rank that has no sample of a batch, because there are fewer than ranks."""


class MicroBatch(NamedTuple):
    """A micro-batch, its share of what the loss averages over, and which samples of the batch it has, in its order."""

    batch: Any
    share: float
    numbers: Sequence[int]


def shape_of(batch: Any, workload: Workload) -> Shape:
    """Return the shape of a batch, as the cut of the workload sees it."""
    num_samples, num_units = batch_size_of(batch), count_units(batch, workload.units)
    return Shape(num_samples, num_units, workload.hooks.cut.elements_per_sample(batch, num_samples))


def shape_of_any(batch: Any, units: Units) -> Shape:
    """Return the shape of any batch; one that cannot be cut is like a single sample."""
    try:
        num_samples = batch_size_of(batch)
    except InputError:
        return Shape(1, 1, count_elements(batch))
    return Shape(num_samples, count_units(batch, units), count_elements(batch) / num_samples)


class Parts(NamedTuple):
    """The parts of a batch that all ranks have: what decides how they are cut, and the sum of their samples.

    The units of ``shape`` are those of all parts, samples and elements those of the rank that has most. Some ranks may
    have no target at all, because there are fewer samples than ranks.
    """

    shape: Shape
    num_samples: int
    some_have_none: bool


def parts_of_all(shape: Shape, ranks: Ranks) -> Parts:
    """Return what all ranks have, of which this one has a part of this shape."""
    if ranks.is_alone:
        return Parts(shape, shape.num_samples, some_have_none=False)
    samples, units, elements = zip(*ranks.each(shape), strict=True)
    num_units = sum(units)
    whole = Shape(int(max(samples)), int(num_units) if num_units.is_integer() else num_units, max(elements))
    return Parts(whole, int(sum(samples)), some_have_none=not all(units))


def weighted_micro_batches(
    batch: Any, micro_batch: int, shape: Shape, workload: Workload, total_units: float | None = None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches; one without a target, which has no mean loss, is left out.

    Shares are of ``total_units``, by default those of this batch.
    """
    if not shape.num_units:
        return

    def count(part: Any) -> float:
        return shape.num_units if part is batch else count_units(part, workload.units)

    cut = workload.hooks.cut.micro_batches(batch, shape.num_samples, micro_batch, count)
    for part, num_units, numbers in cut:
        yield MicroBatch(part, num_units / (total_units or shape.num_units), numbers)


def equal_micro_batches(batch: Any, micro_batch: int, num_samples: int) -> Iterator[MicroBatch]:
    """Cut a batch without a target, of which each sample counts as much."""
    for part in split_batch(batch, micro_batch):
        yield MicroBatch(part, batch_size_of(part) / num_samples, ())


class Filler:
    """A sample to compute with where a rank has nothing left to do, and the others need it: it counts for nothing.

    Blocks that are shared out over the ranks are gathered by all of them, or by none. A rank that has no target in its
    part of the batch computes with a sample of another.

    Args:
        workload: its ranks, and what its loss averages over; a sample without any has no loss.
        is_lent: whether some rank has none of its own.
    """

    def __init__(self, workload: Workload, is_lent: bool) -> None:
        self._ranks, self._units, self._is_lent = workload.ranks, workload.units, is_lent
        self._is_told = workload.hooks.cut.depends_on_values

    def filled(self, micro_batches: Iterator[MicroBatch], num_micro_batches: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches, and then the filler until there were as many as on the rank that has most.

        All ranks must ask for it. So many are ``num_micro_batches``, unless that depends on what is in the batches.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before it could lend one.
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
        """A sample of the first rank that has one, for those that have none."""
        here = None if own is None else move_batch(own, torch.device("cpu"))
        every = self._ranks.gather_agreed(here)
        return next(one for one in every if one is not None) if own is None else own

    def _with_target(self, micro_batch: Any) -> Any:
        """The first sample that the loss is defined for; the whole micro-batch has one."""
        each = (pick_samples(micro_batch, [number]) for number in range(batch_size_of(micro_batch)))
        return next((one for one in each if count_units(one, self._units)), micro_batch)


def autocast(workload: Workload) -> torch.autocast:
    """The context in which a forward pass and its loss run."""
    dtype = _AUTOCAST.get(workload.precision)
    return torch.autocast(workload.device.type, dtype=dtype, enabled=dtype is not None)


def mean_loss(workload: Workload, micro_batch: Any) -> Tensor:
    """Compute the mean loss of a micro-batch that is on the device.

    Raises:
        InputError: if the loss function returns anything else than a tensor of one number, or BatchNorm is to average
            over a single one.
    """
    try:
        with autocast(workload):
            loss = workload.loss(workload.model, micro_batch)
    except ValueError as error:
        if _OF_BATCH_NORM not in str(error):
            raise
        raise InputError(
            f"BatchNorm has no statistics in a pass of so few samples ({error}): give micro-batches that leave at "
            "least 2 samples to each pass, or put BatchNorm into evaluation mode"
        ) from error
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError(f"loss(model, batch) returned {found}: return the mean loss, a tensor of one number")


def no_way_out(event: OomEvent, micro_batch: int, shape: Shape, whole: Reason | None) -> str:
    """Say why a batch cannot be done, and what to type instead."""
    where = f"memory ran out in the {event.phase} phase of step {event.step}"
    if event.phase == "optimizer":
        why = "no micro-batch changes what the update needs: give a larger budget, or an optimizer with fewer states"
    elif whole is not None:
        why = f"the batch of {shape.num_samples} samples was not cut, because {whole}, or give a larger budget"
    else:
        why = (
            f"micro-batch {micro_batch} is the smallest there is: give a larger budget, shorter sequences or a smaller "
            "model"
        )
    return f"{where} ({event.shortage}); the step was undone. {why}"
