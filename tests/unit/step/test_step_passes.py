"""Micro-batches accumulate their parts of the gradients, phase by phase."""

import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.errors import NonFiniteLossError
from plimsoll.models.workload import Workload
from plimsoll.step.oom_boundary import Position
from plimsoll.step.passes import Passes
from plimsoll.step.retry import Retry


def passes_of(loss):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, "samples")
    backend, position = backend_for("cpu"), Position()
    retry = Retry({"model": model, "loss": loss}, backend, position)
    return Passes(workload, retry, backend, position, model.parameters, is_dry_run=False), workload, position


def test_parts_of_the_loss_and_their_gradients_add_up():
    passes, workload, position = passes_of(lambda model, x: model(x).mean())
    parts = [passes.add(torch.full((1, 2), value), 0.25, None) for value in (1.0, 3.0)]
    assert [part.item() for part in parts] == [0.5, 1.5]
    assert workload.model.weight.grad.tolist() == [[1.0, 1.0]]
    assert position.phase == "backward"
    assert not any(part.requires_grad for part in parts)


def test_a_scaler_scales_the_gradients_and_not_the_loss():
    passes, workload, _ = passes_of(lambda model, x: model(x).mean())
    part = passes.add(torch.ones(1, 2), 1, torch.amp.GradScaler("cpu", init_scale=8.0))
    assert part.item() == 2.0
    assert workload.model.weight.grad.tolist() == [[8.0, 8.0]]


def test_where_parameters_are_updated_in_backward_the_loss_is_looked_at_before():
    passes, workload, _ = passes_of(lambda model, x: model(x).mean() * float("nan"))
    with pytest.raises(NonFiniteLossError):
        passes.add(torch.ones(1, 2), 1, None, releases_gradients=True)
    assert workload.model.weight.grad is None
    passes.add(torch.ones(1, 2), 1, None)
    assert workload.model.weight.grad.isnan().all()
