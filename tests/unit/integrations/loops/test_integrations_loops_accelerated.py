"""Accelerate's gradient scaler: it calls the step in force, and is restored afterwards."""

import torch
from accelerate import Accelerator
from torch import nn

from plimsoll.integrations.loops.accelerated import put_back_of_scaler, stepped_as_now


def prepared(with_scaler):
    accelerator = Accelerator(cpu=True)
    if with_scaler:  # Accelerate creates one on a GPU only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_the_scaler_calls_the_step_that_the_optimizer_has_in_the_block():
    accelerator, model, optimizer = prepared(with_scaler=True)
    before, calls = optimizer._optimizer_patched_step_method, []
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.optimizer.step = lambda *_: calls.append("mine")
    with stepped_as_now(optimizer):
        optimizer.step()
    assert calls == ["mine"]
    assert optimizer._optimizer_patched_step_method is before
    assert not optimizer.step_was_skipped


def test_a_scaler_that_has_seen_gradients_may_see_them_again():
    accelerator, model, optimizer = prepared(with_scaler=True)
    put_back = put_back_of_scaler(accelerator, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.scaler.unscale_(optimizer.optimizer)  # two calls for the same update are an error
        put_back()
    assert optimizer.scaler is accelerator.scaler
    assert optimizer.scaler.get_scale() == 8.0


def test_without_a_scaler_there_is_nothing_to_do():
    accelerator, model, optimizer = prepared(with_scaler=False)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with stepped_as_now(optimizer):
        optimizer.step()
    put_back_of_scaler(accelerator, optimizer)()
    assert optimizer.scaler is None
