"""Kernels of the update: the same training with different rounding, and the optimizer restored afterwards."""

import copy

import pytest
import torch
from torch import nn

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.trace import trace_training
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from workloads import CASES, largest_relative_difference, weights_of

KERNEL = TECHNIQUES["optimizer_kernel"]
CPU, CUDA = Setting(device="cpu", batch_size=8), Setting(device="cuda", batch_size=8)
CLOSE = 1e-5
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def kernel(name):
    return Choice(technique="optimizer_kernel", options={"kernel": name})


def workload_of(optimizer, model=None):
    return Workload(model or nn.Linear(2, 2), optimizer, model_loss, "samples")


def made(name="AdamW", size=3, **options):
    parameters = [nn.Parameter(torch.randn(size, size)), nn.Parameter(torch.randn(size))]
    return getattr(torch.optim, name)(parameters, lr=1e-2, **options)


def names(choices):
    return [choice.options["kernel"] for choice in choices]


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("name", ["Adadelta", "Adafactor", "Adam", "NAdam", "RMSprop", *FUSED])
def test_the_choices_have_fused_or_what_is_not_in_force(name):
    fused = ["fused"] if name in FUSED else None
    assert names(KERNEL.choices(workload_of(made(name)), CPU)) == (fused or ["foreach"])
    assert names(KERNEL.choices(workload_of(made(name)), CUDA)) == (fused or ["loop"])
    assert names(KERNEL.choices(workload_of(made(name, foreach=True)), CPU)) == (fused or ["loop"])


@pytest.mark.parametrize("setting", [CPU, CUDA])
def test_there_is_no_choice_beside_fused(setting):
    answer = KERNEL.choices(workload_of(made(fused=True)), setting)
    assert answer == "AdamW uses its `fused` kernel, the fastest with the least memory"


def test_without_choices_the_reason_is_given():
    class Own(torch.optim.AdamW):
        pass

    own = Own([nn.Parameter(torch.zeros(2))])
    assert KERNEL.choices(workload_of(own), CPU) == "Own has one kernel only"
    assert KERNEL.choices(workload_of(torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))])), CPU).startswith(
        "Muon has one"
    )
    assert KERNEL.choices(workload_of(made(differentiable=True)), CUDA) == (
        "AdamW uses its `loop` kernel, and for `foreach` the update must be differentiable, which only `loop` supports "
        "and for `fused` the update must be differentiable, which only `loop` supports"
    )


def test_what_a_kernel_cannot_do_is_a_conflict():
    def conflict(optimizer, name, *others, model=None):
        return KERNEL.conflicts(kernel(name), others, workload_of(optimizer, model), CPU)

    assert conflict(made(), "fused") is None
    assert "AdamW" not in str(conflict(made(), "loop"))
    assert "NAdam has no `fused` kernel" in conflict(made("NAdam"), "fused")
    assert "choose foreach, loop or fused" in conflict(made(), "fast")
    assert "sparse gradients" in conflict(made("SGD"), "fused", model=nn.Embedding(3, 2, sparse=True))
    assert "learning rate is a tensor" in conflict(
        torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1)), "foreach"
    )
    assert "floating-point" in conflict(torch.optim.Adam([nn.Parameter(torch.zeros(2, dtype=torch.cfloat))]), "fused")
    assert "adafactor replaces the optimizer" in conflict(made(), "fused", Choice(technique="adafactor"))
    assert conflict(made(), "loop", Choice(technique="adafactor")) is None


@pytest.mark.parametrize("chosen", ["foreach", "loop", "fused"])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"fused": True}])
def test_a_training_goes_on_in_another_kernel_and_back(chosen, options):
    """The original kernel makes the states of steps 1 and 2; step 5 continues from the states of the other kernel."""
    torch.manual_seed(0)
    optimizer = made(size=20, **options)
    other = copy.deepcopy(optimizer)
    for number in range(6):
        step(other, number)
    for number in (0, 1):
        step(optimizer, number)
    with installed(workload_of(optimizer), [kernel(chosen)]):
        for number in (2, 3):
            step(optimizer, number)
    for number in (4, 5):
        step(optimizer, number)
    for one, expected in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one, expected, rtol=CLOSE, atol=1e-6)
        assert optimizer.state[one]["step"] == 6


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
def test_everything_is_as_it_was_afterwards(options):
    optimizer = made("SGD", momentum=0.9, **options)
    step(optimizer, 0)
    before = {**vars(optimizer), "defaults": dict(optimizer.defaults)}
    groups = [dict(group) for group in optimizer.param_groups]
    with installed(workload_of(optimizer), [kernel("foreach")]):
        assert optimizer.param_groups[0]["foreach"]
        assert not optimizer.param_groups[0]["fused"]
        step(optimizer, 1)
    assert vars(optimizer) == before
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_checkpoint_says_the_kernel_that_was_given_and_one_can_be_loaded_meanwhile():
    optimizer = made(size=4)
    step(optimizer, 0)
    plain = optimizer.state_dict()
    with installed(workload_of(optimizer), [kernel("fused")]):
        step(optimizer, 1)
        saved = optimizer.state_dict()
        assert saved["param_groups"] == plain["param_groups"]
        optimizer.load_state_dict(plain)
        assert optimizer.param_groups[0]["fused"]
        step(optimizer, 1)
    assert optimizer.param_groups[0]["fused"] is None
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][index][key]) for key, value in state.items())


def test_the_count_of_steps_is_of_the_kind_the_kernel_wants():
    """In double precision, `fused` counts steps in float32, and the other kernels count in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = made()
        step(optimizer, 0)
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        with installed(workload_of(optimizer), [kernel("fused")]):
            step(optimizer, 1)
            assert state["step"].dtype == torch.float32
        assert state["step"].dtype == torch.float64
        step(optimizer, 2)
        assert state["step"] == 3
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_gradient_scaler_of_ones_own_unscales_for_any_kernel():
    optimizer = made("SGD", fused=True)
    expected = [parameter.detach() - 1e-2 for parameter in optimizer.param_groups[0]["params"]]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    with installed(workload_of(optimizer), [kernel("loop")]):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 8.0)
        scaler.step(optimizer)
    for parameter, value in zip(optimizer.param_groups[0]["params"], expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def trained(case, optimizer_class, precision, chosen=None, fails=False, **options):
    model, _ = case.fresh()
    optimizer = optimizer_class(model.parameters(), **options)
    train = TrainStep(model, optimizer, units=case.units, clip_norm=1.0, precision=precision)
    with (
        installed(train.workload, [kernel(chosen)] if chosen else []),
        armed("optimizer", *([1, 4, 6] if fails else [])),
    ):
        events = [event for batch in case.batches() for event in train(batch).oom_events]
    assert bool(events) == fails
    return weights_of(model, optimizer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", ["foreach", "loop", "fused"])
@pytest.mark.parametrize(
    ("case", "precision"),
    # oneDNN has no LSTM in half precision for every CPU.
    [
        (case, precision)
        for case in CASES
        for precision in ("fp32", "fp16")
        if (case.name, precision) != ("lstm", "fp16")
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_step_with_another_kernel_is_the_plain_one_and_survives_an_oom_in_the_update(case, chosen, precision):
    of_adam = {"optimizer_class": torch.optim.AdamW, "lr": 1e-2}
    undisturbed = trained(case, precision=precision, chosen=chosen, **of_adam)
    survived = trained(case, precision=precision, chosen=chosen, fails=True, **of_adam)
    assert largest_relative_difference(undisturbed, survived) == 0
    # Adam blows up the rounding of gradients that are zero in theory (the bias of an attention's keys): SGD does not.
    of_sgd = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    expected = trained(case, precision=precision, **of_sgd)
    assert largest_relative_difference(expected, trained(case, precision=precision, chosen=chosen, **of_sgd)) < CLOSE


def test_the_temporaries_of_an_update_are_as_predicted():
    """AdamW of 4 MiB: `foreach` and `loop` make intermediates, `fused` none; a dry run predicts it to the byte."""

    def train(place, name, device="cpu"):
        model = nn.ParameterList([nn.Parameter(torch.zeros(256, 1024, device=device)) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        with installed(workload_of(optimizer, model), [kernel(name)]):
            for number in (1, 2, 3):
                place.step = number
                for parameter in model:
                    parameter.grad = None
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()

    def measured(name):
        with Recorder() as recorder:
            train(recorder, name)
        return live_bytes(recorder.trace("measured", "cpu")).peak_bytes

    def predicted(name, lowering):
        trace = trace_training(lambda place: train(place.recorder, name, lowering.device), lowering)
        return live_bytes(trace).peak_bytes

    peaks = {name: predicted(name, CpuLowering()) for name in ("foreach", "loop", "fused")}
    assert peaks == {name: measured(name) for name in peaks}
    assert peaks["foreach"] > peaks["loop"] > peaks["fused"]
    resident = 4 * 4 * (1 << 20)  # parameters, gradients and two states
    assert 0 <= peaks["fused"] - resident < 4096
    assert predicted("fused", CudaLowering((8, 6))) == pytest.approx(peaks["fused"], abs=4096)
