"""What Accelerate's prepared optimizer needs to be stepped and undone; `accelerate` and `transformers` use it.

Its scaler calls the step that the optimizer had when it was prepared, and notes of each step what cannot be taken back.
Uses private names of accelerate 1.15, in this module only.
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
    """Let a scaler call the step that the optimizer has in the block."""
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
    """Return what puts the scaler back as it was before a step, for `Transaction`'s ``remember``."""
    return partial(_put_back, accelerator, optimizer)


def _put_back(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    if optimizer.scaler is not None:
        optimizer.scaler = accelerator.scaler = scaler_as_now(optimizer.scaler)
        optimizer._accelerate_step_called = False
