"""Trainings that a step refuses, and trainings that it accepts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.device.off_device import mark_outside
from plimsoll.distributed.ranks import Ranks
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.errors import DataError, InputError, NonFiniteLossError
from plimsoll.models.workload import Workload
from plimsoll.step.checks import (
    device_of,
    refuse,
    refuse_no_target,
    refuse_non_finite,
    refuse_recut,
    refuse_unclear_labels,
)
from plimsoll.step.micro_batches import Shape
from plimsoll.step.oom_boundary import Position
from plimsoll.techniques.mechanisms.uncuttable import Reason

MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "optimizer", "precision", "micro_batch", "text"),
    [
        (MODEL, SGD, "fp8", None, "choose fp32, bf16 or fp16"),
        (nn.Linear(2, 2).half(), SGD, "fp16", None, "but 2 of this one are float16.*use model.float"),
        (MODEL, torch.optim.LBFGS(MODEL.parameters()), "fp32", None, "needs a closure"),
        (MODEL, SGD, "fp32", 0, "at least 1"),
        (MODEL, SGD, "fp32", 2.0, "micro_batch is 2.0, a float, but must count samples"),
        (MODEL, SGD, "fp32", True, "micro_batch is True, a bool, but must count samples"),
    ],
)
def test_what_cannot_be_stepped_is_refused_with_the_reason(model, optimizer, precision, micro_batch, text):
    with pytest.raises(InputError, match=text):
        refuse(model, optimizer, precision, micro_batch)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.CrossEntropyLoss(), "CrossEntropyLoss"), (nn.functional.mse_loss, "mse_loss"), (None, "None")],
    ids=["module", "function", "nothing"],
)
def test_a_loss_that_takes_no_model_is_refused_with_one_that_does(loss, name):
    with pytest.raises(InputError, match=rf"loss is {name}, but it is called as loss\(model, batch\).*give a function"):
        refuse(MODEL, SGD, "fp32", None, loss=loss)


def test_a_loss_that_is_a_module_of_the_users_passes():
    class Distilled(nn.Module):
        def forward(self, model, batch):
            return model(batch).mean()

    refuse(MODEL, SGD, "fp32", None, loss=Distilled(), units="samples")


def test_unknown_units_are_refused():
    with pytest.raises(InputError, match="units 'token' is unknown: choose samples, tokens or next-tokens"):
        refuse(MODEL, SGD, "fp32", None, units="token")
    refuse(MODEL, SGD, "fp32", None, units=len)


def optimizer_of(*modules):
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(InputError, match=r"updates 2 parameters, of which 0 are among the 2 that .* make it of this"):
        refuse(MODEL, optimizer_of(nn.Linear(2, 2)), "fp32", None)
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"updates 4 parameters, of which 2 are among the 4"):
        refuse(parts, optimizer_of(parts[0], nn.Linear(2, 2)), "fp32", None)
    with pytest.raises(InputError, match=r"updates 2 parameters, of which 0 are among the 0"):
        refuse(nn.Linear(2, 2).requires_grad_(False), SGD, "fp32", None)


def test_an_optimizer_of_a_part_of_the_model_or_of_more_than_it_passes():
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse(parts, optimizer_of(parts[0]), "fp32", None)
    refuse(parts, optimizer_of(parts, nn.Linear(2, 2)), "fp32", None)
    refuse(parts.requires_grad_(False), optimizer_of(parts), "fp32", None)


@pytest.mark.parametrize(("precision", "kind"), [("bf16", "cpu"), ("fp16", "cpu"), ("fp32", "cpu"), ("bf16", "cuda")])
def test_where_autocast_runs_no_lstm_half_precision_is_refused(precision, kind, monkeypatch):
    """Processors without AVX-512 behave like this."""
    monkeypatch.setattr("plimsoll.step.checks.lstm_fault", lambda model, dtype: f"no {dtype} kernels")
    model = nn.LSTM(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    if precision == "fp32" or kind == "cuda":
        refuse(model, optimizer, precision, None, kind=kind)
    else:
        with pytest.raises(InputError, match=f"precision {precision}: no {precision} kernels; use precision fp32"):
            refuse(model, optimizer, precision, None, kind=kind)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_in_half_precision_passes_where_no_gradients_are_scaled(precision):
    model = nn.Linear(2, 2).half()
    refuse(model, optimizer_of(model), precision, None)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [None, 1, 4])
def test_what_can_be_stepped_passes(precision, micro_batch):
    refuse(MODEL, SGD, precision, micro_batch)
    assert device_of(MODEL) == torch.device("cpu")


def test_a_table_on_the_host_may_be_elsewhere_than_the_model():
    model = nn.Sequential(HostEmbedding(3, 2), nn.Linear(2, 2)).to("meta")
    assert device_of(model) == torch.device("meta")
    assert device_of(model[0]) == torch.device("cpu")
    mark_outside(model[1].weight)
    mark_outside(model[1].bias)
    assert device_of(nn.Sequential(model[1], nn.Linear(1, 1))) == torch.device("cpu")


def test_a_model_on_no_device_or_two_is_refused():
    with pytest.raises(InputError, match="no device"):
        device_of(nn.ReLU())
    with pytest.raises(InputError, match="'cpu', 'meta'"):
        device_of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ({"labels": torch.zeros(3, 4)}, r"labels of shape \(3, 4\) have several values for each sample"),
        ({"labels": torch.tensor([1, -100, -100])}, "2 of 3 labels are -100, ignored"),
        ({"ids": torch.zeros(3, 4), "y": torch.zeros(3)}, r"no tensor `labels` \(fields: ids, y\)"),
    ],
)
def test_where_a_sample_is_not_one_term_of_the_mean_units_are_needed(batch, what):
    refuse_unclear_labels({"labels": torch.zeros(3)})
    refuse_unclear_labels({"labels": torch.zeros(3, 1)})
    with pytest.raises(InputError, match=f"{what}: the units .* give units="):
        refuse_unclear_labels(batch)


def test_a_loss_of_the_users_needs_units():
    with pytest.raises(InputError, match="loss= was given without units=: the units"):
        refuse(MODEL, SGD, "fp32", None, loss=lambda model, batch: model(batch).mean())


def test_under_fp16_an_optimizer_of_some_parameters_is_refused():
    """Gradients of other parameters would stay scaled by up to 2^16, and be clipped together with unscaled ones."""
    some = torch.optim.SGD([MODEL.weight], lr=0.1)
    refuse(MODEL, some, "fp32", None)
    refuse(MODEL, some, "bf16", None)
    with pytest.raises(InputError, match=r"updates 1 of the 2 parameters .* set requires_grad_\(False\)"):
        refuse(MODEL, some, "fp16", None)


def test_data_parallel_is_refused_with_the_reason():
    model = nn.DataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"gathers outputs and gradients on the first.*plimsoll train --nproc"):
        refuse(model, optimizer, "fp32", None)


def test_distributed_data_parallel_is_refused_with_the_reason():
    class Stub(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:  # a real one needs a process group
            nn.Module.__init__(self)
            self.weight = nn.Parameter(torch.zeros(2))

    model = Stub()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="adds gradients up inside backward"):
        refuse(model, optimizer, "fp32", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_is_of_the_step_that_was_begun(value):
    """The error reports the learning rate of the first parameter group."""
    groups = [{"params": [MODEL.weight], "lr": 0.1}, {"params": [MODEL.bias], "lr": 0.3}]
    workload = Workload(MODEL, torch.optim.SGD(groups, lr=0.2), lambda *_: None, "samples")
    refuse_non_finite("loss", 1e30, workload, Position(step=5))
    with pytest.raises(NonFiniteLossError, match=rf"the loss of step 6 is {value}; .* after step 5: .*\(now 0\.1\)"):
        refuse_non_finite("loss", value, workload, Position(step=5))


def test_a_batch_without_a_target_is_refused():
    refuse_no_target(Shape(num_samples=3, num_units=1, elements_per_sample=1.0), step=5)
    with pytest.raises(DataError, match="step 5: none of the 3 samples has a target"):
        refuse_no_target(Shape(num_samples=3, num_units=0, elements_per_sample=1.0), step=5)


class OfTwo(Ranks):
    """One of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2


def test_a_batch_that_must_stay_whole_is_neither_cut_nor_shared():
    shape, reason = Shape(num_samples=4, num_units=4, elements_per_sample=1.0), Reason("it is one", "leave it")
    refuse_recut(reason, 4, shape, Ranks())
    refuse_recut(reason, 5, shape, Ranks())
    refuse_recut(None, 3, shape, Ranks())
    refuse_recut(None, 4, shape, OfTwo())
    with pytest.raises(InputError, match=r"micro-batch of 3 would cut the batch of 4 samples, but it is one.*leave it"):
        refuse_recut(reason, 3, shape, Ranks())
    with pytest.raises(InputError, match=r"2 ranks would each have a part of the batch, but it is one.*or leave it"):
        refuse_recut(reason, 4, shape, OfTwo())
