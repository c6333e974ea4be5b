"""The optimizer and the learning rate schedule that a job names.

Optimizers are the classes of ``torch.optim``, by their name in lower case and with their own arguments; what a class
does is its own documentation. Schedules are three formulas, given in `build_schedule`. It does NOT cover optimizers
that are not in ``torch.optim``: build them yourself and give a `Workload`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.optim.optimizer as optimizer_module  # the hooks that see every optimizer are here and nowhere public
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from plimsoll.errors import JobError
from plimsoll.models.names import optimizer_arguments, require_optimizer
from plimsoll.records.job import OptimizerChoice


def build_optimizer(choice: OptimizerChoice, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build a ``torch.optim`` optimizer.

    Args:
        choice: the class by its name in lower case, the learning rate and further arguments of the class.
        parameters: what it updates.

    Raises:
        JobError: if the name or an argument is unknown, the class refuses a value, or it cannot be used here.
    """
    require_optimizer(choice)
    name = choice.name.lower()
    build = partial(_class_of(name), lr=choice.lr, **choice.arguments)
    try:
        # On one number first: there a RuntimeError is about the arguments and cannot be for want of memory.
        build([nn.Parameter(torch.zeros(()))])
    except (TypeError, ValueError, RuntimeError) as error:
        given = {"lr": choice.lr, **choice.arguments}
        raise JobError(
            f"optimizer: `{name}` refuses {given} ({error}): change it; it takes lr, "
            f"{', '.join(optimizer_arguments()[name])}"
        ) from None
    return build(parameters)


def build_schedule(choice: OptimizerChoice, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR | None:
    """Build the schedule that multiplies the learning rate of step ``s`` (from 0), or ``None`` if it never changes.

    With W ``warmup_steps`` and N ``steps``, the factor is (s + 1) / W in the warm-up, where s < W, and after it:

    - constant: 1
    - linear: (N - s) / (N - W), which reaches 0 after the last step
    - cosine: (1 + cos(pi (s - W) / (N - W))) / 2, likewise (Loshchilov and Hutter 2016, arXiv:1608.03983)

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
    # Beyond the last step (the scheduler asks one step ahead) the factor stays what it is at the end.
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
    """An optimizer of this package: it updates a parameter by that parameter alone, and knows what that takes."""

    @abstractmethod
    def state_bytes_of(self, parameter: Tensor) -> int:
        """The bytes of the states of a parameter, at most."""

    @abstractmethod
    def temporary_bytes_of(self, parameter: Tensor) -> int:
        """The bytes that the update of a parameter takes and gives back, at most; parameters take turns."""


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return all that each parameter group has but its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is one of ``torch.optim``'s own: each updates a parameter by that parameter alone."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")  # Adafactor says `torch.optim`


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters can be updated one after another: nothing in a step depends on several of them.

    A hook on the steps of all optimizers that may be called with some of the parameters after the others says so in an
    attribute ``works_in_parts``.
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
