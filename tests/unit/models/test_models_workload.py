"""Hooks are removed as they were added, and the counted bytes equal real tensors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from plimsoll.models.hooks import StepHooks
from plimsoll.models.workload import Workload, hooked, model_loss, resident_bytes
from plimsoll.records.job import OptimizerChoice


class Tied(nn.Module):
    """A model with float32 parameters: a tied 10 x 4 table, a 4 x 4 layer, and a frozen vector of 4."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)


def test_resident_bytes_by_hand():
    with torch.device("meta"):
        model = Tied()
    assert resident_bytes(model, OptimizerChoice(name="AdamW")) == {
        "parameters": (40 + 16 + 4) * 4,
        "gradients": (40 + 16) * 4,
        "optimizer_states": 2 * (40 + 16) * 4,
    }
    assert resident_bytes(model.half(), OptimizerChoice(name="sgd"))["parameters"] == (40 + 16 + 4) * 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("Adamax", {}),
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
    ],
)
def test_optimizer_states_are_those_a_real_step_allocates(name, arguments):
    model = nn.Linear(8, 8)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **arguments)
    predicted = resident_bytes(model, optimizer)["optimizer_states"]
    assert predicted == resident_bytes(model, OptimizerChoice(name=name, arguments=arguments))["optimizer_states"]
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert predicted == sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


def test_states_of_other_optimizers_are_unknown():
    class AdamW(torch.optim.Optimizer):
        def step(self, closure=None):
            return None

    model = Tied()
    assert resident_bytes(model, AdamW(model.parameters(), {}))["optimizer_states"] is None
    assert resident_bytes(model, OptimizerChoice(name="adafactor"))["optimizer_states"] is None


def test_states_follow_the_groups_of_an_optimizer():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(2, 2, bias=False)
    groups = [{"params": first.parameters(), "momentum": 0.9}, {"params": second.parameters()}]
    states = resident_bytes(nn.Sequential(first, second), torch.optim.SGD(groups, lr=0.1))["optimizer_states"]
    assert states == 16 * 4


def test_the_exit_puts_back_what_it_has_changed_and_nothing_else():
    model = nn.Linear(1, 1)
    before = StepHooks(evaluation_samples=3)
    workload = Workload(model, torch.optim.SGD(model.parameters()), model_loss, "samples", hooks=before)
    with hooked(workload, replace(before, evaluation_samples=2, after_step=(print,))):
        assert workload.hooks == StepHooks(evaluation_samples=2, after_step=(print,))
        workload.hooks = replace(workload.hooks, captured=[])
    assert workload.hooks == StepHooks(evaluation_samples=3, captured=[])
    with pytest.raises(KeyError), hooked(workload, StepHooks()):
        raise KeyError
    assert workload.hooks == StepHooks(evaluation_samples=3, captured=[])
