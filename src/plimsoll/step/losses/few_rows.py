"""A check with passes of a few real samples, made before a plan relies on a technique.

The effects of the passes are undone: random state and buffers are restored, and no gradients are left. Not handled: a
model of fake or meta tensors, and a loss that fails for a few samples. In these cases, only the first step reveals a
problem.
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
    """Run a check on a few samples, and return the reason why it fails.

    Returns ``None`` if the check succeeds or cannot be run.

    Args:
        workload: the training run. It is restored afterwards.
        batch: one of its batches.
        question: the check, called with some of the samples. It returns the reason, or ``None`` if it succeeds.
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
