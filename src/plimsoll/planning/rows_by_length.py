"""How many samples of each length fit: what batches sized by predicted memory are made with.

    rows = plimsoll.rows_by_length(model, optimizer, batch, lengths=[32, 64, 128, 256, 512], budget="8GiB")
    loader = Loader(samples, Buckets(rows_for=rows), seed=0)  # of plimsoll.data.batches

Every entry is found by predictions of whole steps, the last of them at the entry itself, so what a kernel or an
allocator does at some size is in it. Does NOT cover samples longer than those of ``batch``, and fields of (B, T) other
than those that `plimsoll.techniques.mechanisms.lengths` knows to be along time.
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
    """Find, for each length, the most samples of it that fit one step.

    Args:
        model: see `plimsoll.predict`, as are the arguments that are not said here.
        optimizer: see ``model``.
        batch: some samples of the greatest length, with an ``attention_mask`` of (B, T), on the CPU.
        loss: see ``model``.
        lengths: in tokens; at most that of ``batch``.
        budget: what the training may use; the upper end of each prediction's range is kept under it.
        most_rows: where to stop looking.
        units: see ``model``.
        clip_norm: see ``model``.
        precision: see ``model``.
        device: see ``model``.

    Raises:
        BudgetError: if not even one sample of some length fits.
        InputError: if a length is not one of ``batch``, or as `plimsoll.predict`.
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
            f"nothing says which of the fields {', '.join(batch)} of the batch are along time: give one with an "
            "attention_mask of (B, T) and no other field of T columns than input_ids, labels, token_type_ids and "
            "position_ids"
        )
    num_columns = batch["attention_mask"].shape[1]
    if not lengths or not all(1 <= length <= num_columns for length in lengths):
        raise InputError(
            f"lengths={list(lengths)} are not all from 1 to {num_columns}, the tokens of a sample of the batch: give a "
            "batch of the longest samples, and lengths up to theirs"
        )
