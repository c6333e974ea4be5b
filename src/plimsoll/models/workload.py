"""A training run in memory: its model, optimizer and loss, and the bytes that stay allocated between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.data.batch import Units
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.models.hooks import StepHooks
from plimsoll.records.job import OptimizerChoice

LossFunction = Callable[[nn.Module, Any], Tensor]
"""``(model, batch) -> mean loss``, a scalar tensor with a graph."""

Precision = Literal["fp32", "bf16", "fp16"]
"""The dtype of autocast; fp32 means no autocast."""


class Reason(NamedTuple):
    """The reason why a batch must not be split, and the remedy."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}"


@dataclass(slots=True)
class Workload:
    """Everything that a training step needs.

    Attributes:
        model: the model to train; its parameters keep their dtype.
        optimizer: the optimizer of the model's parameters.
        loss: returns the mean loss over ``units``.
        units: the units over which the loss is a mean, such as samples or tokens.
        schedule: the learning rate schedule, if any.
        clip_norm: the upper bound for the 2-norm of all gradients, if any.
        precision: the dtype of autocast.
        device: the device of the training.
        full_length: number of tokens of the longest sample in the data set; ``None``: use the longest of each batch.
        files: the pool of mapped files that holds the parameters, if they are not in memory.
        ranks: the processes that train the same model, each on its part of a batch.
        hooks: the parts of the step that techniques have changed.
        kept_whole: the reason why the loss of a batch must not be computed in micro-batches, if known
            (`plimsoll.step.losses.additive`).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    units: Units
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    clip_norm: float | None = None
    precision: Precision = "fp32"
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- a torch.device is immutable
    full_length: int | None = None
    files: MappedPool | None = None
    ranks: Ranks = field(default_factory=Ranks)
    hooks: StepHooks = field(default_factory=StepHooks)
    kept_whole: Reason | None = None


@contextmanager
def hooked(workload: Workload, hooks: StepHooks) -> Iterator[None]:
    """Give a workload other hooks while the block runs. On exit, the hooks that differed are restored.

    Other hooks may have changed in the block and stay so. For example, ``sharding`` stays set if memory is too small to
    gather the parameters.
    """
    before = workload.hooks
    names = [one.name for one in fields(hooks) if getattr(hooks, one.name) is not getattr(before, one.name)]
    workload.hooks = hooks
    try:
        yield
    finally:
        workload.hooks = replace(workload.hooks, **{name: getattr(before, name) for name in names})


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerChoice) -> dict[str, int | None]:
    """Compute the bytes that stay allocated between steps. The model may be on the meta device.

    Tied parameters count once. Frozen parameters have no gradient and no state. Gradients and states have the dtype of
    their parameter. Buffers and the step counters of an optimizer (a few bytes per tensor) are left out.

    Returns:
        Bytes of ``parameters``, ``gradients`` and ``optimizer_states``. The last is ``None`` (unknown) for optimizers
        outside ``torch.optim``, and for classes that are not in `_STATE_COPIES`, such as Adafactor.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "parameters": _bytes_of(model.parameters()),
        "gradients": _bytes_of(trainable),
        "optimizer_states": _state_bytes(optimizer, trainable),
    }


def _state_bytes(optimizer: torch.optim.Optimizer | OptimizerChoice, trainable: list[nn.Parameter]) -> int | None:
    if isinstance(optimizer, OptimizerChoice):
        name, groups = optimizer.name.lower(), [{**optimizer.arguments, "params": trainable}]
    elif type(optimizer).__module__.startswith("torch.optim."):
        name, groups = type(optimizer).__name__.lower(), optimizer.param_groups
    else:
        return None
    if name not in _STATE_COPIES:
        return None
    return sum(
        _STATE_COPIES[name](group) * _bytes_of(parameter for parameter in group["params"] if parameter.requires_grad)
        for group in groups
    )


_STATE_COPIES: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "adadelta": lambda arguments: 2,
    "adagrad": lambda arguments: 1,
    "adam": lambda arguments: 3 if arguments.get("amsgrad") else 2,
    "adamax": lambda arguments: 2,
    "adamw": lambda arguments: 3 if arguments.get("amsgrad") else 2,
    "asgd": lambda arguments: 1,
    "nadam": lambda arguments: 2,
    "radam": lambda arguments: 2,
    "rmsprop": lambda arguments: 1 + bool(arguments.get("momentum")) + bool(arguments.get("centered")),
    "rprop": lambda arguments: 2,
    "sgd": lambda arguments: int(bool(arguments.get("momentum"))),
}
"""Tensors of the parameter's shape in the state of each ``torch.optim`` class (torch 2.13; tests count them)."""


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model computes itself, as Hugging Face models do: ``model(**batch).loss``."""
    loss: Tensor = model(**batch).loss
    return loss
