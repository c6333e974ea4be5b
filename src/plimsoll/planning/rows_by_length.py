"""The maximum number of samples of each length, for batches sized by predicted memory.

    rows = plimsoll.rows_by_length(model, optimizer, batch, lengths=[32, 64, 128, 256, 512], budget="8GiB")
    loader = Loader(samples, Buckets(rows_for=rows), seed=0)  # of plimsoll.data.batches

For each length, whole steps with different numbers of samples are predicted, including one with the returned number.
The result therefore includes size-dependent effects of kernels and allocators. Not covered: samples longer than those
in ``batch``, and (B, T) fields other than those that `plimsoll.techniques.mechanisms.lengths` knows to have a time
dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from plimsoll.data.batch import Units, batch_size_of, pick_samples
from plimsoll.errors import BudgetError, InputError
from plimsoll.memory.largest_size import largest_that_fits
from plimsoll.models.workload import LossFunction, Precision, model_loss
from plimsoll.planning.predict_step import predict
from plimsoll.records.prediction import Prediction
from plimsoll.records.units import format_bytes
from plimsoll.techniques.mechanisms.lengths import lengths_of, trimmed


def rows_by_length(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    loss: LossFunction = model_loss,
    *,
    lengths: Sequence[int],
    budget: str | int,
    most_rows: int = 4096,
    units: Units | None = None,
    clip_norm: float | None = None,
    precision: Precision = "fp32",
    device: str = "local",
) -> dict[int, int]:
    """Find, for each length, the maximum number of samples that fit one step.

    Args:
        model: see `plimsoll.predict`, also for other arguments without a description.
        optimizer: see ``model``.
        batch: a batch of some samples of the greatest length, with an ``attention_mask`` of shape (B, T), on the CPU.
        loss: see ``model``.
        lengths: sample lengths in tokens, at most the length of ``batch``.
        budget: memory that the training may use. The upper end of each prediction's range stays below it.
        most_rows: largest number of samples to consider.
        units: see ``model``.
        clip_norm: see ``model``.
        precision: see ``model``.
        device: see ``model``.

    Returns:
        the maximum number of samples, by length.

    Raises:
        BudgetError: if not even one sample of some length fits.
        InputError: if a length exceeds the length of the batch, or for the reasons given at `plimsoll.predict`.
        DeviceError: if there is no such device.
    """
    _refuse_unknown_lengths(batch, lengths)

    def try_rows(length: int, num_rows: int) -> tuple[int, bool, Prediction]:
        repeated = pick_samples(batch, [row % batch_size_of(batch) for row in range(num_rows)])
        prediction = predict(
            model,
            optimizer,
            trimmed(repeated, length),
            loss,
            units=units,
            clip_norm=clip_norm,
            precision=precision,
            device=device,
            budget=budget,
        )
        beyond_bytes = prediction.peak.high_bytes - prediction.limit_bytes
        return beyond_bytes, beyond_bytes <= 0 and prediction.fits, prediction

    rows: dict[int, int] = {}
    start = 1
    for length in sorted(set(lengths), reverse=True):
        found = largest_that_fits(partial(try_rows, length), start, most_rows)
        if found.value is None:
            needed = try_rows(length, 1)[2]
            raise BudgetError(
                f"one sample of {length} tokens needs {format_bytes(needed.peak.high_bytes)}, but the budget leaves "
                f"{format_bytes(needed.limit_bytes)}: give a larger budget, shorter samples or a smaller model"
            )
        rows[length] = start = found.value
    return dict(sorted(rows.items()))


def _refuse_unknown_lengths(batch: Mapping[str, Any], lengths: Sequence[int]) -> None:
    known = lengths_of(batch)
    if known is None:
        raise InputError(
            f"cannot tell which fields of the batch have a time dimension, of {', '.join(batch)}: give one with an "
            "attention_mask of (B, T) and no other field of T columns than input_ids, labels, token_type_ids and "
            "position_ids"
        )
    num_columns = batch["attention_mask"].shape[1]
    if not lengths or not all(1 <= length <= num_columns for length in lengths):
        raise InputError(
            f"lengths={list(lengths)} are not all from 1 to {num_columns}, the tokens of a sample of the batch: give a "
            "batch of the longest samples, and lengths up to its length"
        )
