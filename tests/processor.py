"""What depends on the processor that runs the tests: kernels that it has not, and others that it can do without."""

from __future__ import annotations

import pytest
import torch

from plimsoll.device.cpu.lstm_kernels import lstm_fault

# The environment of a process that computes with all that this processor has, without bfloat16 and AMX, and without
# AVX-512. oneDNN reads it when it is first used.
INSTRUCTION_SETS = [
    pytest.param({}, id="own"),
    pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, id="avx512"),
    pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX2"}, id="avx2"),
]

_LSTM = torch.nn.LSTM(1, 1)


def skip_without_half_lstm(module: object = _LSTM) -> None:
    """Skip where torch's own autocast cannot run the LSTM that a model has."""
    fault = lstm_fault(module, "bf16") if isinstance(module, torch.nn.Module) else None
    if fault is not None:
        pytest.skip(fault)
