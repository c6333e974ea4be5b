"""Tests that depend on the processor: missing kernels, and kernels that can be disabled."""

from __future__ import annotations

import pytest
import torch

from plimsoll.device.cpu.lstm_kernels import lstm_fault

# Environments of processes with all instructions of this processor, without bfloat16 and AMX, and without AVX-512.
# oneDNN reads the variable at its first use.
INSTRUCTION_SETS = [
    pytest.param({}, id="own"),
    pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, id="avx512"),
    pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX2"}, id="avx2"),
]

_LSTM = torch.nn.LSTM(1, 1)


def skip_without_half_lstm(module: object = _LSTM) -> None:
    """Skip the test if torch's own autocast cannot run a model's LSTM."""
    fault = lstm_fault(module, "bf16") if isinstance(module, torch.nn.Module) else None
    if fault is not None:
        pytest.skip(fault)
