"""The check that autocast can run an LSTM on this processor. Its use for models is tested with `autocast`."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.device.cpu import lstm_kernels


@pytest.mark.parametrize("stage", [nullcontext, FakeTensorMode])
def test_whether_an_lstm_runs_is_asked_of_real_tensors(stage, monkeypatch):
    """With fake tensors, every processor would seem to have every kernel."""
    made = []
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **given: made.append(real(*size, **given)) or made[-1])
    with stage():
        answer = lstm_kernels._runs_lstm.__wrapped__(torch.bfloat16)
    assert answer == lstm_kernels._ran_lstm(torch.bfloat16)
    assert {type(tensor) for tensor in made} == {torch.Tensor}
