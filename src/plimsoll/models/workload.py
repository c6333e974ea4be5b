"""What one training is: its model, optimizer, loss, and the bytes that stay of them from step to step."""

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
"""``(model, batch) -> mean loss``, a scalar that can be differentiated."""

Precision = Literal["fp32", "bf16", "fp16"]
"""What autocast computes in; fp32 is without autocast."""


class Reason(NamedTuple):
    """Why nothing is cut, and what lets it be."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}"


@dataclass(slots=True)
class Workload:
    """One training: everything a step needs, and the only mutable thing with a name.

    ``loss`` returns the mean over ``units``; ``clip_norm`` bounds the 2-norm of all gradients. Parameters are
    kept as the model has them; ``precision`` says what autocast computes in. ``full_length`` is the tokens of the
    longest sample there will be (``None``: those of each batch), ``files`` what the parameters were made in, where that
    was not memory, and ``ranks`` are the processes that train the same model on other parts of each batch.

    ``hooks`` are what techniques change of the step. ``kept_whole`` is why the loss must not be computed of parts of a
    batch, where that is known (`plimsoll.step.losses.additive`).
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
    """Let steps have these hooks while the block runs; on exit those that differ are as before.

    Others are left alone: parameters that memory is too small to gather stay sharded.
    """
    before = workload.hooks
    names = [one.name for one in fields(hooks) if getattr(hooks, one.name) is not getattr(before, one.name)]
    workload.hooks = hooks
    try:
        yield
    finally:
        workload.hooks = replace(workload.hooks, **{name: getattr(before, name) for name in names})


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerChoice) -> dict[str, int | None]:
    """Compute the bytes that stay allocated from step to step; the model may be on the meta device.

    Tied parameters count once; frozen parameters have no gradient and no state. Gradients and states have the dtype of
    their parameter. Buffers, and the step counters of an optimizer (a few bytes per tensor), are left out.

    Returns:
        Bytes of ``parameters``, ``gradients`` and ``optimizer_states``; the last is ``None`` (unknown) for an optimizer
        that is not of ``torch.optim``, and for adafactor, whose states depend on the shapes.
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
"""Tensors of the parameter's shape in the state of each ``torch.optim`` class (torch 2.13; the tests count them)."""


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a Hugging Face model, or one called like it, computes itself: ``model(**batch).loss``."""
    loss: Tensor = model(**batch).loss
    return loss
