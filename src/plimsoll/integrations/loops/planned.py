"""The plan for the loop of another library, with techniques that do not change its optimizer, precision and loss.

The budget is NOT enforced here: the caller enforces it while its loop runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from plimsoll.data.batch import Units, move_batch
from plimsoll.device.base import backend_for
from plimsoll.errors import InputError
from plimsoll.models.workload import LossFunction, Precision
from plimsoll.planning.given_plan import require_that_fits
from plimsoll.planning.plan import plan_step
from plimsoll.records.plan import LossCheck, Plan
from plimsoll.techniques import TECHNIQUES


def planned(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: LossFunction,
    *,
    budget: str | int,
    units: Units | None,
    device: torch.device,
    offered: Iterable[str],
    clip_norm: float | None = None,
    precision: Precision = "fp32",
    loss_check: LossCheck | None = None,
) -> Plan:
    """Return the plan with the fastest combination of the offered techniques that fits. Random states are restored.

    Args:
        model: the model as the loop calls it.
        optimizer: the ``torch.optim`` optimizer, without a wrapper.
        batch: the largest batch of the training.
        loss: ``loss(model, batch)`` returns the mean loss.
        budget: device memory for the process, such as ``"8GiB"`` or a number of bytes.
        units: the loss normalizer.
        device: the training device.
        offered: names of the techniques that the loop can use.
        clip_norm: the global gradient norm that the loop clips to.
        precision: the precision of autocast in the loop; ``"fp32"`` if ``loss`` applies autocast itself.
        loss_check: the result of the check whether batches may be split, if the loss of the loop differs from ``loss``;
            ``None`` checks ``loss``.

    Raises:
        BudgetError: if no plan fits; the error names a budget that would suffice.
        InputError: if the model cannot be traced.
    """
    backend = backend_for(str(device))
    random_state = backend.random_state()
    plan = plan_step(
        model,
        optimizer,
        move_batch(batch, torch.device("cpu")),
        loss,
        budget=budget,
        units=units,
        clip_norm=clip_norm,
        precision=precision,
        loss_check=loss_check,
        device="cpu" if device.type == "cpu" else "local",
        forbids=sorted(set(TECHNIQUES) - set(offered)),
    )
    backend.restore_random_state(random_state)
    require_that_fits(plan)
    return plan


def refuse_both(budget: str | int | None, batch: Any, options: dict[str, Any]) -> None:
    """Refuse ``micro_batch`` or ``fallbacks`` together with a budget, and ``batch`` without a budget.

    With a budget, the plan sets the micro-batch and the fallbacks. A batch is used only for planning.

    Raises:
        InputError: if they contradict each other.
    """
    given = [name for name in ("micro_batch", "fallbacks") if options.get(name) is not None]
    if budget is not None and given:
        raise InputError(
            f"budget={budget!r} was given with {given[0]}, which the plan for that budget sets: leave one of the two "
            "out"
        )
    if budget is None and batch is not None:
        raise InputError(
            f"a batch to plan with, a {type(batch).__name__}, was given without a budget: give budget=, for example "
            'budget="8GiB"'
        )
