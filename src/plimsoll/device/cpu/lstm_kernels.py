"""A check that autocast can run an LSTM on this processor.

oneDNN runs LSTMs, and has half-precision kernels for some processors only (on x86-64: those with AVX-512). On other
processors, plain autocast fails in the first forward pass.
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
    """Return the reason why autocast cannot run the LSTMs of a model on this processor.

    ``None`` if it can, or the model has no LSTM.
    """
    num_layers = sum(isinstance(module, nn.LSTM) and module.proj_size == 0 for module in model.modules())
    if not num_layers or _runs_lstm(torch.bfloat16 if dtype == "bf16" else torch.float16):
        return None
    return (
        f"oneDNN has no {dtype} kernels for nn.LSTM ({num_layers} in this model) on this processor, so torch's "
        "autocast fails"
    )


@functools.cache
def _runs_lstm(dtype: torch.dtype) -> bool:
    """Try whether an LSTM runs on the CPU under autocast to this type, and return the result."""
    if not _get_current_dispatch_mode_stack():
        return _ran_lstm(dtype)
    with ThreadPoolExecutor(1) as beside:  # a dry run does not trace another thread, whose tensors are real
        return beside.submit(_ran_lstm, dtype).result()


def _ran_lstm(dtype: torch.dtype) -> bool:
    with torch.random.fork_rng(devices=[]):
        module = nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", dtype):
            module.forward(torch.zeros(1, 1, 1))  # `forward` does not run global module hooks
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True
