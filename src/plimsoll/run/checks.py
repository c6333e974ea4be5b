"""What `plimsoll.run.step` refuses before anything is done, each with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InputError

PRECISIONS = ("fp32", "bf16", "fp16")


def described(value: object) -> str:
    """What a value is, for a message: its type, and the shape of a tensor."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def refuse_many_labels(batch: Any) -> None:
    """Refuse a batch with several labels per sample where nobody said what the loss averages over.

    Raises:
        InputError: if it has.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.ndim > 1:
        raise InputError(
            f"labels of shape {tuple(labels.shape)} are several for each sample, and what the loss averages over "
            'decides how the pieces of a batch are weighted: give units="next-tokens" (a causal model that shifts its '
            'labels), "tokens", "samples", or a function'
        )


def device_of(model: nn.Module) -> torch.device:
    """The one device that all parameters are on.

    Raises:
        InputError: if there is none, or more than one.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise InputError(
            f"the model's parameters are on {sorted(map(str, devices)) or 'no device'}: put it on one device before "
            "making the step"
        )
    return devices.pop()


def refuse(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, micro_batch: int | None) -> None:
    """Refuse what a step cannot be made of.

    Raises:
        InputError: if the precision is unknown, the model is in half precision under fp16, the optimizer needs a
            closure, or the micro-batch is no positive number of samples.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown: choose fp32, bf16 or fp16")
    num_half = sum(parameter.dtype == torch.float16 for parameter in model.parameters())
    if precision == "fp16" and num_half:
        raise InputError(
            f"precision fp16 scales gradients for a model whose parameters are float32, but {num_half} of this one are "
            "float16 (model.half() or torch_dtype=float16): small updates would be lost in its weights and the scaler "
            "refuses to unscale float16 gradients; use model.float(), autocast does the rest"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            f"{type(optimizer).__name__} evaluates the loss several times in one step and needs a closure: use another "
            "optimizer, for example AdamW"
        )
    if micro_batch is not None and micro_batch < 1:
        raise InputError(
            f"micro_batch is {micro_batch} samples, but a pass needs at least 1: give a positive number or None"
        )
