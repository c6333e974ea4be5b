"""Every per-parameter optimizer of torch by name, faults by name, and schedules with factors computed by hand."""

import math

import pytest
import torch
from torch import nn

from plimsoll.errors import JobError
from plimsoll.models.optimizers import build_optimizer, build_schedule, is_separable
from plimsoll.records.job import OptimizerChoice
from plimsoll.techniques.mechanisms.low_bit_adam import LowBitAdam

NAMES = sorted(
    name.lower()
    for name, member in vars(torch.optim).items()
    if isinstance(member, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
)


def parameter(value=1.0):
    return nn.Parameter(torch.tensor([value]))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_built_by_name_and_updates(name):
    weight = parameter()
    optimizer = build_optimizer(OptimizerChoice(name=name, lr=0.01), iter([weight]))
    assert type(optimizer).__name__.lower() == name
    (weight * 3).sum().backward()
    optimizer.step()
    assert weight.item() < 1


def test_arguments_reach_the_optimizer():
    choice = OptimizerChoice(name="SGD", lr=0.5, arguments={"momentum": 0.9, "nesterov": True})
    group = build_optimizer(choice, [parameter()]).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.9, True)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "adamv"}, "no `adamv` in torch.optim; did you mean `adam"),
        ({"name": "lbfgs"}, "`lbfgs` cannot be used: it computes the loss several times"),
        ({"name": "SparseAdam"}, "`sparseadam` cannot be used: it takes sparse gradients only"),
        ({"name": "muon"}, "`muon` cannot be used: it takes matrices only"),
        ({"arguments": {"weight_decey": 0.1}}, "`adamw` has no argument `weight_decey`; did you mean `weight_decay`"),
        (
            {"arguments": {"weight_decay": -1.0}},
            r"refuses .*'weight_decay': -1.0.*Invalid weight_decay.*it takes lr, betas",
        ),
        ({"arguments": {"weight_decay": "much"}}, "refuses .*'weight_decay': 'much'"),
        ({"arguments": {"foreach": True, "fused": True}}, "refuses .*cannot be `True` together"),
    ],
)
def test_faults_are_named(choice, message):
    with pytest.raises(JobError, match=message):
        build_optimizer(OptimizerChoice(**choice), [parameter()])


def factors(steps, **choice):
    """Return the learning rates of all steps and of the one after the last, for a base rate of 1."""
    optimizer = build_optimizer(OptimizerChoice(name="sgd", lr=1.0), [parameter()])
    schedule = build_schedule(OptimizerChoice(**choice), optimizer, steps)
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_a_constant_rate_has_no_schedule():
    choice = OptimizerChoice()
    assert build_schedule(choice, build_optimizer(choice, [parameter()]), 10) is None


def test_constant_after_a_warm_up():
    assert factors(6, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_linear_falls_to_zero_after_the_last_step():
    assert factors(6, schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_cosine_falls_to_zero_after_the_last_step():
    half_root = math.sqrt(0.5)
    expected = [1, (1 + half_root) / 2, 0.5, (1 - half_root) / 2, 0]
    assert factors(4, schedule="cosine") == pytest.approx(expected, abs=1e-15)


def test_a_warm_up_may_fill_the_training_but_not_exceed_it():
    assert factors(4, schedule="linear", warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1]
    with pytest.raises(
        JobError, match=r"warm-up of 5 steps is longer than the training of 4 steps: set optimizer.warmup_steps to 4"
    ):
        factors(4, warmup_steps=5)


def test_a_schedule_goes_on_where_it_was_saved():
    def fresh():
        optimizer = build_optimizer(OptimizerChoice(name="sgd", lr=1.0), [parameter()])
        return optimizer, build_schedule(OptimizerChoice(schedule="cosine", warmup_steps=2), optimizer, 8)

    optimizer, schedule = fresh()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    resumed, resumed_schedule = fresh()
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    for pair in ((optimizer, schedule), (resumed, resumed_schedule)):
        pair[0].step()
        pair[1].step()
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["adafactor", "adam", "adamw", "sgd", "rmsprop"])
def test_an_optimizer_of_torch_is_updated_parameter_by_parameter_unless_somebody_looks_on(name):
    optimizer = build_optimizer(OptimizerChoice(name=name), [parameter()])
    assert is_separable(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert not is_separable(optimizer)
    handle.remove()
    assert is_separable(optimizer)


def test_an_optimizer_from_elsewhere_may_look_at_all_parameters_together():
    class Own(torch.optim.SGD):
        pass

    assert not is_separable(Own([parameter()]))


def test_an_optimizer_of_this_package_says_that_it_is_separable():
    assert is_separable(LowBitAdam([parameter()], bits=8))
