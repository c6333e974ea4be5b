"""The base class of techniques that replace Adam or AdamW by another optimizer for the whole run.

The new optimizer takes over the parameter groups, with their learning rates and the entries of a schedule, and the
schedule continues with it. It starts without states. At the exit, the workload gets its original optimizer and schedule
back, with the states and learning rates from before.
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
    """A technique that replaces the optimizer. A run has at most one such technique.

    ``kernels``: the kernels that the new optimizer has, by their names in `plimsoll.techniques.optimizer_kernel`.
    """

    modifies = frozenset({"optimizer"})
    reaches = frozenset({"optimizer states"})
    is_for_the_run = True
    keeps_state_between_passes = False
    stage = "optimizer"
    kernels: ClassVar[tuple[str, ...]] = ()


def obstacle(workload: Workload) -> str | None:
    """Return the reason why the optimizer cannot be replaced, even if the user allows it; ``None`` if it can."""
    optimizer = workload.optimizer
    if type(optimizer) not in _REPLACED:
        return f"it replaces Adam and AdamW, but the optimizer is {type(optimizer).__name__}"
    if any(len(state) for state in optimizer.state.values()):
        return (
            f"the optimizer already has states of {len(optimizer.state)} parameters, which another optimizer cannot "
            "use: start a new training"
        )
    if any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"]):
        return "some parameters are complex numbers"
    if any(getattr(module, "sparse", False) for module in workload.model.modules()):
        return "an embedding has sparse gradients, which it does not support"
    return None


def conflict(name: str, others: Choices, workload: Workload, setting: Setting) -> str | None:
    """Return the reason why the technique ``name``, which replaces the optimizer, is impossible.

    ``None``: it is possible.
    """
    if name not in setting.allow:
        return f"is lossy: allow it with `allow: [{name}]`"
    names = (other.technique for other in others)
    other = next((one for one in names if isinstance(technique_of(one), ReplacedOptimizer)), None)
    return f"{other} replaces the optimizer as well" if other else obstacle(workload)


def groups_for(optimizer: torch.optim.Optimizer, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups for an optimizer of another class.

    The groups keep ``settings``, and keys that are no settings of the old class, such as ``initial_lr`` of a schedule.
    """
    return [
        {key: value for key, value in group.items() if key in ("params", *settings) or key not in optimizer.defaults}
        for group in optimizer.param_groups
    ]


@contextmanager
def optimizer_replaced(workload: Workload, new: torch.optim.Optimizer) -> Iterator[None]:
    """Give the workload and its schedules another optimizer while the block runs."""
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
    """Yield a learning rate schedule and, recursively, the schedules that it contains."""
    if schedule is not None:
        yield schedule
        for inner in getattr(schedule, "_schedulers", ()):
            yield from _all_of(inner)


def _let_schedules_know(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer count its steps, as torch does when a schedule is created. Parameter groups do not change."""
    before = [dict(group) for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda step: 1.0)
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)
