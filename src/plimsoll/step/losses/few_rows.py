"""A question about a training, asked with a few real samples before a plan says what the training can have.

What is computed is undone: random numbers and buffers are as before, and no gradient is made. Does NOT answer for a
model without memory, nor where the loss itself fails with fewer samples: the first step sees it then.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.data.batch import batch_size_of, move_batch, split_batch
from plimsoll.device.base import backend_for
from plimsoll.models.workload import Workload
from plimsoll.step.micro_batches import autocast
from plimsoll.step.undo.step_state import Undo
from plimsoll.techniques.mechanisms.technique import OfRows

_NUM_SAMPLES = 8
_OF_FEWER_SAMPLES = (RuntimeError, ValueError, IndexError, TypeError)


def ask_few_rows(workload: Workload, batch: Any, question: OfRows) -> str | None:
    """Ask why something cannot be; returns ``None`` where it can, or where nothing can be told.

    Args:
        workload: the training; it is as before afterwards.
        batch: one of its batches.
        question: is asked of some of its samples.
    """
    parameters = list(workload.model.parameters())
    if not parameters or any(one.is_meta or isinstance(one, FakeTensor) for one in parameters):
        return None
    rows = split_batch(batch, _NUM_SAMPLES)[0]
    if batch_size_of(rows) == 1:
        return None
    device = parameters[0].device
    undo = Undo({"model": workload.model, "loss": workload.loss}, backend_for(str(device)))
    undo.remember()
    try:
        with autocast(workload):
            return question(workload, move_batch(rows, device))
    except _OF_FEWER_SAMPLES:
        return None
    finally:
        undo.restore()
