"""Models for job files (`model: slow_models:slow`): an LSTM whose steps take extra time or extra memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from plimsoll.models.recurrent.model import build_recurrent

STEP_SECONDS = 0.04
FOREVER_SECONDS = 600.0
NUM_SMALL_STEPS = 8
BALLAST_BYTES_PER_SAMPLE = 32 << 20


def lstm(vocab_size: int) -> nn.Module:
    shape: dict[str, Any] = {"embedding_size": 32, "hidden_size": 32, "num_layers": 2, "dropout": 0.1}
    return build_recurrent({"architecture": "lstm", "vocab_size": vocab_size, **shape})


def slow(vocab_size: int) -> nn.Module:
    """Build a model whose forward pass sleeps for 40 ms."""
    return with_hook(lstm(vocab_size), lambda: time.sleep(STEP_SECONDS))


def endless(vocab_size: int) -> nn.Module:
    """Build a model whose first step does not end."""
    return with_hook(lstm(vocab_size), lambda: time.sleep(FOREVER_SECONDS))


def with_hook(model: nn.Module, action: Any) -> nn.Module:
    def act(module: nn.Module, arguments: Any) -> None:
        if module.training and next(module.parameters()).device.type != "meta":
            action()

    model.register_forward_pre_hook(act)
    return model


def growing(vocab_size: int) -> nn.Module:
    """Build a model that needs 32 MiB more per sample from its ninth training pass on; a buffer counts the passes."""
    model = lstm(vocab_size)
    model.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def grow(module: nn.Module, arguments: Any, fields: dict[str, torch.Tensor]) -> None:
        if not module.training:
            return
        module.num_passes += 1
        if module.num_passes > NUM_SMALL_STEPS:
            torch.ones(len(fields["input_ids"]) * BALLAST_BYTES_PER_SAMPLE, dtype=torch.uint8)

    model.register_forward_pre_hook(grow, with_kwargs=True)
    return model
