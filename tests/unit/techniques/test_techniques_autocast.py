"""The offered precisions, and steps that compute in the chosen one."""

import pytest
import torch
from torch import nn

from plimsoll.device.cpu.lstm_kernels import lstm_fault
from plimsoll.errors import InputError
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice
from plimsoll.step.checks import refuse
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.autocast import Autocast

BF16, FP16 = (Choice(technique="autocast", options={"dtype": dtype}) for dtype in ("bf16", "fp16"))


def workload(dtype=torch.float32):
    model = nn.Linear(2, 2, dtype=dtype)
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, "samples")


def setting(precision="auto", device="cuda"):
    return Setting(device=device, batch_size=4, precision=precision)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (setting(), (BF16, FP16)),
        (setting(device="cpu"), (BF16,)),
        (setting("bf16"), (BF16,)),
        (setting("fp16", "cpu"), (FP16,)),
        (setting("fp32"), "the job sets precision: fp32; `precision: auto` leaves it to the plan"),
    ],
)
def test_the_choices_follow_the_job_and_the_device(asked, expected):
    assert Autocast().choices(workload(), asked) == expected


def test_a_precision_that_the_step_has_already_needs_no_technique():
    made = workload()
    made.precision = "bf16"
    assert "which the step uses already" in Autocast().choices(made, setting("bf16"))


def test_an_lstm_is_refused_where_plain_autocast_fails_and_runs_elsewhere():
    model = nn.LSTM(3, 3)
    made = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, "samples")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(2, 1, 3))
    except RuntimeError:
        fault = lstm_fault(model, "bf16")
        assert "on this processor" in fault
        assert Autocast().choices(made, setting(device="cpu")) == fault
        assert Autocast().choices(made, setting("bf16", "cpu")) == fault
        assert Autocast().conflicts(BF16, (), made, setting("bf16", "cpu")) == fault
        with pytest.raises(InputError, match="precision bf16: oneDNN has no bf16 kernels"):
            TrainStep(model, made.optimizer, precision="bf16", units="samples")
    else:
        assert lstm_fault(model, "bf16") is None
        assert Autocast().choices(made, setting(device="cpu")) == (BF16,)
    assert Autocast().choices(made, setting()) == (BF16, FP16)  # CUDA's kernels are cuDNN's
    assert lstm_fault(nn.GRU(3, 3), "bf16") is None
    refuse(model, made.optimizer, "bf16", None, kind="cuda")


def test_weights_in_half_precision_have_nothing_to_gain():
    assert "the model's weights are not float32" in Autocast().choices(workload(torch.bfloat16), setting())


@pytest.mark.parametrize(
    ("choice", "asked", "reason"),
    [
        (BF16, setting(), None),
        (FP16, setting(), None),
        (FP16, setting("fp16", "cpu"), None),
        (
            FP16,
            setting(device="cpu"),
            "on a CPU float16 is slower than float32 and overflows, and bf16 needs as little",
        ),
        (BF16, setting("fp32"), "the job sets precision: fp32; change it to auto or to bf16"),
        (BF16, setting("fp16"), "the job sets precision: fp16; change it to auto or to bf16"),
        (Choice(technique="autocast", options={"dtype": "int8"}), setting(), "dtype is int8: give bf16 or fp16"),
    ],
)
def test_a_precision_that_the_job_does_not_have_is_refused(choice, asked, reason):
    found = Autocast().conflicts(choice, (), workload(), asked)
    assert found == reason or found.startswith(reason)


@pytest.mark.parametrize(("choice", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)])
def test_the_step_computes_in_it_and_afterwards_as_before(choice, dtype):
    made, seen = workload(), []

    def loss(model, batch):
        seen.append(model(batch).dtype)
        return model(batch).float().sum()

    step = TrainStep(made.model, made.optimizer, loss, units="samples")
    with installed(step.workload, [choice]):
        step(torch.ones(4, 2))
    step(torch.ones(4, 2))
    assert seen == [dtype, torch.float32]
    assert made.model.weight.dtype == torch.float32
