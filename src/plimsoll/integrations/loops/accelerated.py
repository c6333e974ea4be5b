"""Helpers to step and undo an optimizer that Accelerate has prepared, for `accelerate` and `transformers`.

The gradient scaler calls the ``step`` method that the optimizer had when Accelerate prepared it. It also records state
in each step that it cannot undo. Only this module uses private names of accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from plimsoll.step.retry import scaler_as_now

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


@contextmanager
def stepped_as_now(optimizer: AcceleratedOptimizer) -> Iterator[None]:
    """Make the gradient scaler call the optimizer's current ``step`` method inside the block."""
    if optimizer.scaler is None:
        yield
        return
    from accelerate.optimizer import patch_optimizer_step

    before = optimizer._optimizer_patched_step_method
    optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, optimizer.optimizer.step)
    try:
        yield
    finally:
        optimizer._optimizer_patched_step_method = before


def put_back_of_scaler(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> Callable[[], None]:
    """Return a function that drops the records of a step in the gradient scaler.

    `Transaction` calls the function when it undoes the step.
    """
    return partial(_put_back, accelerator, optimizer)


def _put_back(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    if optimizer.scaler is not None:
        optimizer.scaler = accelerator.scaler = scaler_as_now(optimizer.scaler)
        optimizer._accelerate_step_called = False
