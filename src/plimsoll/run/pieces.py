"""How a batch is cut into micro-batches and weighted; common to a training step and an evaluation.

Does NOT decide how large the pieces are: see `plimsoll.run.recover`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from plimsoll.records.run import OomEvent
from plimsoll.techniques._lengths import Group, groups_by_length, trimmed
from plimsoll.workload import Units, Workload, count_units, pick_samples, split_batch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Shape(NamedTuple):
    """What of a batch decides how it is cut and weighted."""

    num_samples: int
    num_units: int
    elements_per_sample: float


def weighted_pieces(
    batch: Any, micro_batch: int, shape: Shape, units: Units, by_length: bool = False
) -> Iterator[tuple[Any, float]]:
    """Yield the micro-batches, each with its share of what the loss averages over.

    ``by_length`` puts samples of alike length together, without the padding that none of them needs and as many as
    have no more elements than ``micro_batch`` samples of the batch, where the batch says how long they are.
    """
    groups = groups_by_length(batch, micro_batch) if by_length else None
    if groups is not None:
        yield from _weighted_groups(batch, groups, shape, units)
        return
    if micro_batch >= shape.num_samples:
        yield batch, 1.0
        return
    for piece in split_batch(batch, micro_batch):
        share = count_units(piece, units) / shape.num_units
        if share:  # a piece without a target has no mean loss
            yield piece, share


def _weighted_groups(batch: Any, groups: list[Group], shape: Shape, units: Units) -> Iterator[tuple[Any, float]]:
    if len(groups) == 1:
        yield trimmed(batch, groups[0][1]), 1.0
        return
    for numbers, num_columns in groups:
        piece = pick_samples(batch, numbers)
        share = count_units(piece, units) / shape.num_units
        if share:
            yield trimmed(piece, num_columns), share


def autocast(workload: Workload) -> torch.autocast:
    """The context in which a forward pass and its loss run."""
    dtype = _AUTOCAST.get(workload.precision)
    return torch.autocast(workload.device.type, dtype=dtype, enabled=dtype is not None)


def no_way_out(event: OomEvent, micro_batch: int, shape: Shape, must_stay_whole: bool) -> str:
    """Say why a batch cannot be done, and what to type instead."""
    where = f"memory ran out in the {event.phase} phase of step {event.step}"
    if event.phase == "optimizer":
        why = "no micro-batch changes what the update needs: give a larger budget, or an optimizer with fewer states"
    elif must_stay_whole:
        why = (
            f"the batch of {shape.num_samples} samples was not cut, because BatchNorm's statistics depend on the cut: "
            "allow it with recut_batch_norm=True (job.yaml: allow: [recut_batch_norm]), or give a larger budget"
        )
    else:
        why = (
            f"micro-batch {micro_batch} is the smallest there is: give a larger budget, shorter sequences or a smaller "
            "model"
        )
    return f"{where} ({event.shortage}); the step was undone. {why}"
