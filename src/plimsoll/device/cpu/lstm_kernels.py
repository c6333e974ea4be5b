"""Whether autocast can run an LSTM on this processor.

An LSTM goes to oneDNN, which has half-precision kernels of it for some processors only (on x86-64: for those with
AVX-512). On the others plain autocast fails in the first forward pass.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Half = Literal["bf16", "fp16"]


def lstm_fault(model: nn.Module, dtype: Half) -> str | None:
    """Say why autocast cannot run a model's LSTM on this processor; ``None`` where it can, or there is none."""
    num_layers = sum(isinstance(module, nn.LSTM) and module.proj_size == 0 for module in model.modules())
    if not num_layers or _runs_lstm(torch.bfloat16 if dtype == "bf16" else torch.float16):
        return None
    return (
        f"oneDNN has no {dtype} kernels of nn.LSTM ({num_layers} in this model) for this processor, and torch's "
        "autocast fails"
    )


@functools.cache
def _runs_lstm(dtype: torch.dtype) -> bool:
    """Whether an LSTM of a CPU runs in autocast, found out by one."""
    if not _get_current_dispatch_mode_stack():
        return _ran_lstm(dtype)
    with ThreadPoolExecutor(1) as beside:  # in a dry run: a thread has real tensors, and is no part of the trace
        return beside.submit(_ran_lstm, dtype).result()


def _ran_lstm(dtype: torch.dtype) -> bool:
    with torch.random.fork_rng(devices=[]):
        module = nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", dtype):
            module.forward(torch.zeros(1, 1, 1))  # without the hooks of all modules
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True
