"""What the processor that runs the tests has no kernels for: where plain PyTorch fails there is nothing to compare."""

from __future__ import annotations

import pytest
import torch

from plimsoll.techniques.autocast import lstm_fault

_LSTM = torch.nn.LSTM(1, 1)


def skip_without_half_lstm(module: object = _LSTM) -> None:
    """Skip where torch's own autocast cannot run the LSTM that a model has."""
    fault = lstm_fault(module, "bf16") if isinstance(module, torch.nn.Module) else None
    if fault is not None:
        pytest.skip(fault)
