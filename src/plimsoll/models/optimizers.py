"""The optimizer and the learning rate schedule of a job.

A job names a class of ``torch.optim`` in lower case, with its usual arguments. The formulas of the three schedules are
in `build_schedule`.

Not handled: optimizers outside ``torch.optim``. Build such an optimizer in code and pass a `Workload`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.optim.optimizer as optimizer_module  # global optimizer hooks have no public name
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from plimsoll.errors import JobError
from plimsoll.models.names import optimizer_arguments, require_optimizer
from plimsoll.records.job import OptimizerChoice


def build_optimizer(choice: OptimizerChoice, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build a ``torch.optim`` optimizer.

    Args:
        choice: the lower-case name of the class, the learning rate and further arguments.
        parameters: the parameters to update.

    Raises:
        JobError: if the name or an argument is unknown, the class rejects a value, or a job cannot use this class.
    """
    require_optimizer(choice)
    name = choice.name.lower()
    build = partial(_class_of(name), lr=choice.lr, **choice.arguments)
    try:
        # Built for one number first, so that a RuntimeError is about the arguments and not about memory.
        build([nn.Parameter(torch.zeros(()))])
    except (TypeError, ValueError, RuntimeError) as error:
        given = {"lr": choice.lr, **choice.arguments}
        raise JobError(
            f"optimizer: `{name}` refuses {given} ({error}): change it; it takes lr, "
            f"{', '.join(optimizer_arguments()[name])}"
        ) from None
    return build(parameters)


def build_schedule(choice: OptimizerChoice, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR | None:
    """Build the schedule that multiplies the learning rate of step ``s`` (from 0) by a factor.

    The result is ``None`` if the factor is 1 in every step.

    With W ``warmup_steps`` and N ``steps``, the factor is (s + 1) / W in the warm-up (s < W). After the warm-up it is:

    - constant: 1
    - linear: (N - s) / (N - W), which reaches 0 after the last step
    - cosine: (1 + cos(pi (s - W) / (N - W))) / 2, which also reaches 0 (Loshchilov and Hutter 2016, arXiv:1608.03983)

    Raises:
        JobError: if the warm-up is longer than the training.
    """
    require_optimizer(choice, steps)
    if choice.schedule == "constant" and choice.warmup_steps == 0:
        return None
    decay = _DECAYS[choice.schedule]
    return LambdaLR(optimizer, partial(_factor, warmup_steps=choice.warmup_steps, steps=steps, decay=decay))


def _factor(step: int, warmup_steps: int, steps: int, decay: Callable[[float], float]) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # The scheduler asks one step ahead, so beyond the last step the factor keeps its final value.
    share_done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return decay(share_done)


def _constant(share_done: float) -> float:
    return 1.0


def _linear(share_done: float) -> float:
    return 1 - share_done


def _cosine(share_done: float) -> float:
    return (1 + math.cos(math.pi * share_done)) / 2


_DECAYS: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


class SeparableOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of Plimsoll that updates each parameter separately and knows the memory of its update."""

    @abstractmethod
    def state_bytes_of(self, parameter: Tensor) -> int:
        """Return the maximum bytes of the optimizer states of a parameter."""

    @abstractmethod
    def temporary_bytes_of(self, parameter: Tensor) -> int:
        """Return the maximum temporary bytes during the update of a parameter. Parameters are updated one by one."""


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group: all its items except the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's class is from ``torch.optim``. These classes update each parameter separately."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")  # Adafactor's module is `torch.optim`


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can update its parameters one by one: no part of a step depends on several of them.

    A step hook of the optimizer prevents this. So does a global step hook, unless its attribute ``works_in_parts`` is
    true: such a hook can be called for some parameters at a time.
    """
    if not (is_of_torch(optimizer) or isinstance(optimizer, SeparableOptimizer)):
        return False
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    before, after = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks
    of_all = [hook for hook in (*before.values(), *after.values()) if not getattr(hook, "works_in_parts", False)]
    return not (own or of_all)


def _class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of ``torch.optim`` by its name in lower case."""
    classes = {member.__name__.lower(): member for member in vars(torch.optim).values() if isinstance(member, type)}
    return classes[name]
