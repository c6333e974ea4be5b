"""Gradient release: the bits of plain PyTorch, even if memory runs out in the middle, with fewer gradients alive."""

import os

import pytest
import torch
from tests.tally import Tally
from torch import nn
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import InputError, NonFiniteLossError, OutOfMemoryError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.trace import dry_run
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import StageBackend
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from workloads import CASES, Case, largest_relative_difference, plain_loop, weights_of

RELEASE = TECHNIQUES["optimizer_in_backward"]
CHOICE = Choice(technique="optimizer_in_backward")
WHOLE = [CHOICE, micro_batch_choice(8)]
NUM_STEPS = 4
CPU = Setting(device="cpu", batch_size=8)


def made(case: Case, fallbacks=(WHOLE,), name="AdamW", lr=1e-2, **options) -> TrainStep:
    model, _ = case.fresh()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr)
    return TrainStep(model, optimizer, units=case.units, fallbacks=fallbacks, **options)


def plain(case: Case, num_steps=NUM_STEPS, name="AdamW", lr=1e-2):
    model, _ = case.fresh()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr)
    plain_loop(case, model, optimizer, [8] * num_steps, clip_norm=None)
    return weights_of(model, optimizer)


def weights(step: TrainStep):
    return weights_of(step.workload.model, step.workload.optimizer)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "RMSprop"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_has_the_bits_of_the_plain_loop_and_no_gradient_is_left_for_the_update(case, name):
    step = made(case, name=name)
    at_the_end = []

    def note(*_):
        at_the_end.append(sum(parameter.grad is not None for parameter in step.workload.model.parameters()))

    commit, step._commit.step = step._commit.step, lambda: (note(), commit())
    for batch in case.batches():
        assert step(batch).updated
    assert at_the_end == [0] * NUM_STEPS
    assert largest_relative_difference(plain(case, name=name), weights(step)) == 0


def test_a_tied_weight_is_updated_once():
    """GPT-2's embedding and head are one parameter, whose gradient has two parts."""
    step = made(CASES[0])
    assert step.workload.model.lm_head.weight is step.workload.model.transformer.wte.weight
    step(CASES[0].batches()[0])
    assert {int(state["step"]) for state in step.workload.optimizer.state.values()} == {1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at_step", [1, 3])
@pytest.mark.parametrize("phase", ["copy", "forward", "loss", "backward", "clip", "optimizer"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_oom_in_any_phase_is_undone_and_done_again_with_the_same_bits(case, phase, at_step):
    """``backward`` and ``clip`` fail after all parameters are updated. The two fallbacks have the same cut."""
    step = made(case, fallbacks=[WHOLE, [Choice(technique="optimizer_kernel", options={"kernel": "loop"}), *WHOLE]])
    batches = case.batches()
    for batch in batches[: at_step - 1]:
        step(batch)
    before, undone = weights(step), []
    with armed(phase, 1):
        step(batches[at_step - 1], on_oom=lambda _: undone.append(weights(step)))
    assert [largest_relative_difference(before, one) for one in undone] == [0]
    for batch in batches[at_step:]:
        step(batch)
    assert largest_relative_difference(plain(case), weights(step)) == 0


@pytest.mark.parametrize("at_step", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_oom_in_the_middle_of_backward_puts_back_what_was_updated(case, at_step, monkeypatch):
    """Parameters are updated one by one, and memory runs out at the gradient of the middle one."""
    monkeypatch.setattr("plimsoll.step.update.gradient_release._CHUNK_BYTES", {"cpu": 1})
    step = made(case, fallbacks=[WHOLE])
    for batch in case.batches()[: at_step - 1]:
        step(batch)
    before, generator = weights(step), torch.get_rng_state()
    parameters = list(step.workload.model.parameters())
    changed = Tally()

    def fail(gradient):
        changed.number += sum("step" in state for state in step.workload.optimizer.state.values())
        exhaust_memory()

    handle = parameters[len(parameters) // 2].register_hook(fail)
    with pytest.raises(OutOfMemoryError):
        step(case.batches()[at_step - 1])
    handle.remove()
    assert changed.number > 0
    assert largest_relative_difference(before, weights(step)) == 0
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in parameters)
    for batch in case.batches()[at_step - 1 :]:
        step(batch)
    assert largest_relative_difference(plain(case), weights(step)) == 0


def test_a_smaller_fallback_updates_at_the_end_as_without_it():
    case = CASES[2]
    step = made(case, fallbacks=[WHOLE, [micro_batch_choice(4)]])
    with armed("optimizer", 1):
        assert step(case.batches()[0]).micro_batch == 4
    model, optimizer = case.fresh()
    plain_loop(case, model, optimizer, [4], clip_norm=None)
    assert largest_relative_difference(weights_of(model, optimizer), weights(step)) < 1e-5


def test_a_loss_that_is_not_finite_is_found_before_anything_is_updated():
    case = CASES[2]
    step = made(case)
    step(case.batches()[0])
    before, updates = weights(step), []
    step.workload.loss = lambda model, batch: model(**batch).loss * float("inf")
    step.workload.optimizer.step = lambda: updates.append(1)
    with pytest.raises(NonFiniteLossError, match="loss of step 2 is inf; the step was undone"):
        step(case.batches()[1])
    assert not updates
    assert largest_relative_difference(before, weights(step)) == 0


class Twice(nn.Module):
    """A model that uses a layer in two reentrantly checkpointed blocks, so that its gradient comes in two parts."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=self.use_reentrant)
        return hidden.square().mean()


def loss_of(model, x):
    return model(x)


def test_a_gradient_that_comes_in_parts_is_refused_and_the_step_undone(monkeypatch):
    monkeypatch.setattr("plimsoll.step.update.gradient_release._CHUNK_BYTES", {"cpu": 1})
    torch.manual_seed(0)
    for use_reentrant in (False, True):
        model = Twice(use_reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, optimizer, loss_of, units="samples", fallbacks=[WHOLE])
        before = weights_of(model, optimizer)
        if use_reentrant:
            with pytest.raises(InputError, match="came in more than one part.*use_reentrant=False"):
                step(torch.ones(8, 4))
            assert largest_relative_difference(before, weights_of(model, optimizer)) == 0
        else:
            step(torch.ones(8, 4))
            assert largest_relative_difference(before, weights_of(model, optimizer)) > 0


def test_frozen_parameters_and_a_schedule_are_as_without_it():
    case = CASES[1]

    def trained(fallbacks):
        model, _ = case.fresh()
        model.bert.embeddings.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        step = TrainStep(model, optimizer, units=case.units, schedule=schedule, fallbacks=fallbacks)
        rates = [step(batch).learning_rate for batch in case.batches()]
        return rates, weights_of(model, optimizer)

    rates, found = trained([WHOLE])
    plain_rates, expected = trained([[micro_batch_choice(8)]])
    assert rates == plain_rates
    assert largest_relative_difference(expected, found) == 0


def test_what_needs_all_gradients_first_is_a_conflict():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def conflict(*others, workload=None, setting=CPU):
        return RELEASE.conflicts(CHOICE, others, workload or Workload(model, optimizer, model_loss, "samples"), setting)

    assert conflict() is None
    assert conflict(micro_batch_choice(8)) is None
    assert "micro-batches of 4 of 8" in conflict(micro_batch_choice(4))
    assert "cuts the batch" in conflict(Choice(technique="by_length"))
    assert "scaler" in conflict(Choice(technique="autocast", options={"precision": "fp16"}))
    assert conflict(Choice(technique="autocast", options={"precision": "bf16"})) is None
    assert "scaler" in conflict(setting=Setting(device="cpu", batch_size=8, precision="fp16"))
    clipped = Workload(model, optimizer, model_loss, "samples", clip_norm=1.0)
    assert "clip_norm (1) needs the norm of all gradients" in conflict(workload=clipped)
    assert RELEASE.choices(clipped, CPU) == conflict(workload=clipped)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "SGD (or a hook on its step) may look at several" in conflict()


def test_nothing_stays_behind():
    case = CASES[2]
    model, optimizer = case.fresh()
    workload = Workload(model, optimizer, model_loss, "next-tokens")
    num_files = len(os.listdir("/proc/self/fd"))
    keys = list(model.state_dict())
    with installed(workload, [CHOICE]):
        assert list(model.state_dict()) == keys
        assert workload.hooks.update_early is not None
    assert workload.hooks.update_early is None
    step = made(case)
    step(case.batches()[0])
    assert all(parameter._post_accumulate_grad_hooks in (None, {}) for parameter in step.workload.model.parameters())
    step.close()
    assert len(os.listdir("/proc/self/fd")) == num_files


def wide():
    """Return eight layers of 256 KiB; the activations of four samples are small."""
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


def wide_loss(model, batch):
    return model(batch).square().mean()


def peak_of(recorder_of, step_of, chosen):
    model = wide()
    step = step_of(model, [[*chosen, micro_batch_choice(4)]])
    with recorder_of(step) as recorder:
        recorder.know_model(model)
        for number in (1, 2, 3):
            recorder.step = number
            step(torch.ones(4, 256))
            recorder.know_optimizer(step.workload.optimizer)
    live = live_bytes(recorder.trace("measured", "cpu"))
    return live.peak_bytes, int(live.by_category["gradients"].max())


def measured(chosen):
    def step_of(model, fallbacks):
        return TrainStep(
            model, torch.optim.AdamW(model.parameters(), fused=True), wide_loss, units="samples", fallbacks=fallbacks
        )

    return peak_of(lambda step: Recorder(phase=lambda: phase_of(step.position)), step_of, chosen)


def phase_of(position):
    return "copy" if position.phase == "fetch" else position.phase


def predicted(chosen, lowering):
    position = Position()
    with dry_run(lowering, lambda: phase_of(position)) as stage:
        real = wide()
        model, optimizer = stage.fake_training(real, torch.optim.AdamW(real.parameters(), fused=True))
        stage.recorder.know_model(model)
        step = TrainStep(
            model, optimizer, wide_loss, units="samples", fallbacks=[[*chosen, micro_batch_choice(4)]],
            backend=StageBackend(lowering.kind), position=position,
        )  # fmt: skip
        for number in (1, 2, 3):
            stage.recorder.step = number
            step(stage.fake_batch(torch.ones(4, 256)))
            stage.recorder.know_optimizer(optimizer)
    live = live_bytes(stage.trace())
    return live.peak_bytes, int(live.by_category["gradients"].max())


def test_gradients_fall_as_predicted(monkeypatch):
    """Of eight gradients of 256 KiB, only one is alive at a time."""
    monkeypatch.setattr("plimsoll.step.update.gradient_release._CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    layer_bytes = 256 * 256 * 4
    whole, whole_gradients = measured([])
    released, released_gradients = measured([CHOICE])
    assert whole_gradients == 8 * layer_bytes
    assert released_gradients == layer_bytes
    assert predicted([], CpuLowering())[1] == whole_gradients
    assert predicted([CHOICE], CpuLowering()) == (released, released_gradients)
    on_cuda, on_cuda_gradients = predicted([CHOICE], CudaLowering((8, 6)))
    assert on_cuda_gradients == layer_bytes
    assert on_cuda < predicted([], CudaLowering((8, 6)))[0]
    assert whole - released >= 6 * layer_bytes


OTHERS = {
    "kernel": [Choice(technique="optimizer_kernel", options={"kernel": "fused"})],
    "offload": [Choice(technique="optimizer_offload", options={"to": "disk"})],
    "streamed": [Choice(technique="optimizer_offload", options={"to": "host"})],
    "adafactor": [Choice(technique="adafactor")],
    "adafactor and offload": [
        Choice(technique="adafactor"),
        Choice(technique="optimizer_offload", options={"to": "disk"}),
    ],
    "kernel and offload": [
        Choice(technique="optimizer_kernel", options={"kernel": "fused"}),
        Choice(technique="optimizer_offload", options={"to": "disk"}),
    ],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fails", [(), (2,), (30,)])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_with_others_of_the_optimizer_the_bits_are_theirs_also_after_an_oom(others, fails, monkeypatch):
    monkeypatch.setattr("plimsoll.step.update.gradient_release._CHUNK_BYTES", {"cpu": 1})
    case = CASES[0]
    expected = made(case, fallbacks=[[*others, micro_batch_choice(8)]])
    for batch in case.batches():
        expected(batch)
    step = made(case, fallbacks=[[*others, *WHOLE]])
    model, before = step.workload.model, list(step.workload.model.parameters())
    for batch in case.batches():
        with armed("optimizer", *fails):
            try:
                step(batch)
            except OutOfMemoryError:  # there is no other fallback: the step was undone, and is done again
                step(batch)
    assert all(map(torch.equal, model.parameters(), expected.workload.model.parameters()))
    assert largest_relative_difference(weights(expected), weights(step)) == 0
    step.close()
    assert [*map(id, model.parameters())] == [*map(id, before)]
