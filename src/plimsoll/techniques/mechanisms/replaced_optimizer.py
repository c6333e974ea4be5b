"""Another optimizer in the place of Adam or AdamW, for the whole run: what every technique that does so shares.

The new optimizer takes over the parameter groups with their learning rates and what a schedule notes in them, and the
schedule goes on with it. It begins without states. Afterwards the workload has its own optimizer and schedule again, as
they were: their states and learning rates are those of before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from plimsoll.models.workload import Workload
from plimsoll.techniques import technique_of
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

_REPLACED = (torch.optim.Adam, torch.optim.AdamW)


class ReplacedOptimizer(Technique):
    """A technique that does so: a run has one optimizer. ``kernels`` are those of the new one that can be chosen."""

    modifies = frozenset({"optimizer"})
    reaches = frozenset({"optimizer states"})
    is_for_the_run = True
    keeps_state_between_passes = False
    stage = "optimizer"
    kernels: ClassVar[tuple[str, ...]] = ()


def obstacle(workload: Workload) -> str | None:
    """Why the optimizer cannot be replaced, whoever allows it, or ``None``."""
    optimizer = workload.optimizer
    if type(optimizer) not in _REPLACED:
        return f"it stands in for Adam and AdamW, and the optimizer is {type(optimizer).__name__}"
    if any(len(state) for state in optimizer.state.values()):
        return (
            f"the optimizer has states of {len(optimizer.state)} parameters, which the other could not go on from: "
            "start a new training"
        )
    if any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"]):
        return "some parameters are complex numbers"
    if any(getattr(module, "sparse", False) for module in workload.model.modules()):
        return "an embedding has sparse gradients, which it does not take"
    return None


def conflict(name: str, others: Choices, workload: Workload, setting: Setting) -> str | None:
    """Why one of these techniques is impossible, or ``None``."""
    if name not in setting.allow:
        return f"is lossy: allow it with `allow: [{name}]`"
    names = (other.technique for other in others)
    other = next((one for one in names if isinstance(technique_of(one), ReplacedOptimizer)), None)
    return f"{other} replaces the optimizer as well" if other else obstacle(workload)


def groups_for(optimizer: torch.optim.Optimizer, settings: Sequence[str]) -> list[dict[str, Any]]:
    """The parameter groups with these of the optimizer's settings, and all that its class does not know."""
    return [
        {key: value for key, value in group.items() if key in ("params", *settings) or key not in optimizer.defaults}
        for group in optimizer.param_groups
    ]


@contextmanager
def optimizer_replaced(workload: Workload, new: torch.optim.Optimizer) -> Iterator[None]:
    """Let the workload, and its schedule, have another optimizer in the block."""
    old, schedules = workload.optimizer, list(_all_of(workload.schedule))
    if schedules:
        _let_schedules_know(new)
    workload.optimizer = new
    for schedule in schedules:
        schedule.optimizer = new
    try:
        yield
    finally:
        workload.optimizer = old
        for schedule in schedules:
            schedule.optimizer = old


def _all_of(schedule: Any) -> Iterator[LRScheduler]:
    """A schedule and those it is made of."""
    if schedule is not None:
        yield schedule
        for inner in getattr(schedule, "_schedulers", ()):
            yield from _all_of(inner)


def _let_schedules_know(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer count its steps as a schedule's own does, which torch does where one is made of it."""
    before = [dict(group) for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda step: 1.0)
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)
