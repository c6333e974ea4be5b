"""The result of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plimsoll.records.former import warn_of_former
from plimsoll.records.run import OomEvent


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step, over all ranks.

    ``loss`` is the mean over ``num_units`` loss units; ``micro_batch`` is in samples per rank. ``fallback`` is the
    index of the fallback that succeeded. ``gradient_norm`` is the norm before clipping; ``None`` without clipping.
    ``updated`` is False if fp16 gradients overflowed and the update was skipped.
    """

    step: int
    loss: float
    num_samples: int
    num_units: int | float
    micro_batch: int
    fallback: int
    gradient_norm: float | None
    learning_rate: float
    step_seconds: float
    updated: bool
    oom_events: tuple[OomEvent, ...]

    @property
    def rung(self) -> int:
        """The former name of ``fallback``."""
        warn_of_former("StepResult.rung", "StepResult.fallback")
        return self.fallback


class Outcome(NamedTuple):
    """The values that a successful try of a step produces, with the meaning that they have in `StepResult`."""

    loss: float
    gradient_norm: float | None
    learning_rate: float
    updated: bool


def note(event: OomEvent, events: list[OomEvent], on_oom: Callable[[OomEvent], None] | None) -> None:
    """Append ``event`` to ``events``, and pass it to ``on_oom`` unless this is ``None``."""
    events.append(event)
    if on_oom is not None:
        on_oom(event)


def at_least_fp32(loss: Tensor) -> Tensor:
    """Return a loss without its graph, in at least fp32, so that losses of micro-batches can be summed."""
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
