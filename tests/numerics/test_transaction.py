"""The transaction of a step: after any failure inside it, the training continues as in plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

from plimsoll.errors import InputError, NonFiniteLossError, OutOfMemoryError, TornStepError
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.commit import StepCommit
from workloads import BATCH_SIZE, CASES, Case, largest_relative_difference, plain_loop, weights_of

NUM_STEPS = 4
CLOSE = 1e-5
RECURRING = tuple(case for case in CASES if not case.has_batch_norm)
PHASES = ("copy", "forward", "loss", "backward", "clip", "optimizer")


def make_step(case: Case, chunk_bytes: int | None = None, **options: object) -> TrainStep:
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units, clip_norm=1.0, **options)
    if chunk_bytes is not None:
        step._commit = StepCommit(optimizer, step.backend, step.position, chunk_bytes)
    return step


def run(step: TrainStep, case: Case, num_steps: int = NUM_STEPS) -> list[int]:
    """Train and return the micro-batch of each step."""
    return [step(batch).micro_batch for batch in case.batches()[:num_steps]]


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return weights_of(step.workload.model, step.workload.optimizer)


def plain(case: Case, cuts: list[int]) -> dict[str, torch.Tensor]:
    model, optimizer = case.fresh()
    plain_loop(case, model, optimizer, cuts)
    return weights_of(model, optimizer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_an_error_the_whole_batch_has_the_bits_of_the_plain_loop(case):
    step = make_step(case)
    assert run(step, case) == [BATCH_SIZE] * NUM_STEPS
    assert largest_relative_difference(plain(case, [BATCH_SIZE] * NUM_STEPS), weights(step)) == 0


@pytest.mark.parametrize("cut", [1, 3, 4])
@pytest.mark.parametrize("case", RECURRING, ids=lambda case: case.name)
def test_accumulation_is_the_plain_loop_cut_the_same_way(case, cut):
    step = make_step(case, micro_batch=cut)
    run(step, case)
    assert largest_relative_difference(plain(case, [cut] * NUM_STEPS), weights(step)) < CLOSE


@pytest.mark.parametrize("cut", [1, 3, 4])
@pytest.mark.parametrize("case", RECURRING, ids=lambda case: case.name)
def test_without_dropout_the_cut_does_not_matter(case, cut):
    """With SGD: Adam divides by the gradient's size, which amplifies rounding if the gradient is zero in theory."""
    model = case.build(dropout=0.0)
    other = copy.deepcopy(model)
    step = TrainStep(model, sgd(model), units=case.units, clip_norm=1.0, micro_batch=cut)
    run(step, case)
    plain_loop(case, other, expected := sgd(other), [BATCH_SIZE] * NUM_STEPS)
    assert largest_relative_difference(weights_of(other, expected), weights(step)) < CLOSE


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at_step", [1, 3, NUM_STEPS])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_oom_in_any_phase_loses_nothing(case, phase, at_step):
    """Step 1 has not fitted before, so it is split (unless BatchNorm forbids it).

    After three clean steps the whole batch is used again. Later the same size is tried again.
    """
    step = make_step(case, chunk_bytes=1)
    num_pieces = len(list(step.workload.model.parameters()))
    hit = {"optimizer": (at_step - 1) * num_pieces + num_pieces // 2}.get(phase, at_step)
    with armed(phase, hit):
        cuts = run(step, case)
    is_cut = at_step == 1 and not case.has_batch_norm and phase != "optimizer"
    assert cuts == ([BATCH_SIZE // 2] * 3 if is_cut else [BATCH_SIZE] * 3) + [BATCH_SIZE]
    difference = largest_relative_difference(plain(case, cuts), weights(step))
    assert difference < CLOSE if is_cut else difference == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_oom_in_every_phase_of_one_step_is_survived(case):
    step = make_step(case)
    run(step, case, num_steps=1)
    step.fallback_schedule._grow_after = 10**9
    for phase in PHASES:
        with armed(phase, 1):
            step(case.batches()[1])
    model, optimizer = case.fresh()
    torch.manual_seed(1)
    other = TrainStep(model, optimizer, units=case.units, clip_norm=1.0)
    run(other, case, num_steps=1)
    for _ in PHASES:
        other(case.batches()[1])
    assert largest_relative_difference(weights(other), weights(step)) == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_oom_in_the_middle_of_backward_leaves_no_gradient(case):
    step = make_step(case)
    run(step, case, num_steps=1)
    parameter = list(step.workload.model.parameters())[-3]
    calls = []

    def fail_once(gradient):
        calls.append(1)
        if len(calls) == 1:
            exhaust_memory()

    parameter.register_hook(fail_once)
    for batch in case.batches()[1:]:
        step(batch)
    assert len(calls) == NUM_STEPS  # steps 2, 3, 4 and the failed one
    assert largest_relative_difference(plain(case, [BATCH_SIZE] * NUM_STEPS), weights(step)) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor", "Adamax", "Rprop", "ASGD"]
)
@pytest.mark.parametrize("hit", [1, 2, 9, 20, 28])
def test_an_oom_at_any_parameter_of_any_optimizer_is_undone(name, hit):
    case = CASES[0]

    def fresh():
        model, _ = case.fresh()
        return model, getattr(torch.optim, name)(model.parameters(), lr=1e-3)

    model, optimizer = fresh()
    plain_loop(case, model, optimizer, [BATCH_SIZE] * NUM_STEPS)
    expected = weights_of(model, optimizer)
    for at_step in (0, 2):
        model, optimizer = fresh()
        step = TrainStep(model, optimizer, units=case.units, clip_norm=1.0)
        step._commit = StepCommit(optimizer, step.backend, step.position, chunk_bytes=1)
        num_parameters = len(list(model.parameters()))
        with armed("optimizer", at_step * num_parameters + hit):
            assert run(step, case) == [BATCH_SIZE] * NUM_STEPS
        assert largest_relative_difference(expected, weights_of(model, optimizer)) == 0


class Stumbling(torch.optim.AdamW):
    """AdamW that runs out of memory after changing a state and before changing the parameter."""

    def __init__(self, *args, num_failures, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_failures = num_failures
        self.num_calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_calls += 1
        if self.num_calls > 2 and self.num_failures:
            self.num_failures -= 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["exp_avg"].mul_(0.5)
            exhaust_memory()
        return super().step(closure)


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_an_optimizer_torn_in_the_middle_is_put_together_again(num_failures):
    case = CASES[0]
    model, _ = case.fresh()
    optimizer = Stumbling(model.parameters(), lr=1e-2, num_failures=num_failures)
    step = TrainStep(model, optimizer, units=case.units, clip_norm=1.0)
    run(step, case)
    assert optimizer.num_failures == 0
    assert largest_relative_difference(plain(case, [BATCH_SIZE] * NUM_STEPS), weights(step)) == 0


def test_a_step_that_cannot_be_undone_or_done_says_so():
    case = CASES[0]
    step = make_step(case, chunk_bytes=1)
    run(step, case, num_steps=1)
    with armed("optimizer", 5, 6), pytest.raises(TornStepError, match="reload the last checkpoint"):
        step(case.batches()[1])


def test_when_nothing_smaller_is_left_the_step_is_undone_and_the_error_says_what_was_asked_for():
    case = CASES[0]
    step = make_step(case)
    before = weights(step)
    state = torch.get_rng_state()
    with armed("forward", *range(1, 50)), pytest.raises(OutOfMemoryError, match=r"micro-batch 1 is the smallest"):
        step(case.batches()[0])
    assert largest_relative_difference(before, weights(step)) == 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in step.workload.model.parameters())
    assert run(step, case)[0] == 1  # and the step remains usable


def test_batch_norm_is_not_cut_unless_allowed():
    case = CASES[3]
    with pytest.raises(InputError, match="recut_batch_norm=True"):
        make_step(case, micro_batch=4)(case.batches()[0])
    step = make_step(case)
    with armed("forward", 1, 2), pytest.raises(OutOfMemoryError, match="BatchNorm's statistics depend on the cut"):
        step(case.batches()[0])
    step = make_step(case, micro_batch=4, recut_batch_norm=True)
    run(step, case)
    assert largest_relative_difference(plain(case, [4] * NUM_STEPS), weights(step)) < CLOSE


def test_a_user_error_in_the_step_undoes_it_too():
    case = CASES[3]
    step = make_step(case)
    before = weights(step)

    def fail(module, arguments, output):
        raise KeyError("not a memory error")

    handle = step.workload.model.head.register_forward_hook(fail)
    with pytest.raises(KeyError, match="not a memory error"):
        step(case.batches()[0])
    handle.remove()
    assert largest_relative_difference(before, weights(step)) == 0
    run(step, case)
    assert largest_relative_difference(plain(case, [BATCH_SIZE] * NUM_STEPS), weights(step)) == 0


def test_a_loss_that_is_not_finite_stops_before_anything_is_updated():
    case = CASES[2]
    step = make_step(case)
    run(step, case, num_steps=2)
    before = weights(step)
    step.workload.loss = lambda model, batch: model(**batch).loss * float("nan")
    with pytest.raises(NonFiniteLossError, match="loss of step 3 is nan; the step was undone"):
        step(case.batches()[2])
    assert largest_relative_difference(before, weights(step)) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_equals_the_plain_loop_with_autocast(precision):
    case = CASES[0]
    step = make_step(case, precision=precision)
    run(step, case)
    model, optimizer = case.fresh()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for batch in case.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert largest_relative_difference(weights_of(model, optimizer), weights(step)) == 0


def test_fp16_survives_an_oom_between_unscaling_and_the_update():
    case = CASES[0]
    undisturbed = make_step(case, precision="fp16")
    run(undisturbed, case)
    step = make_step(case, chunk_bytes=1, precision="fp16")
    with armed("optimizer", 1, 40):
        run(step, case, num_steps=2)
    with armed("clip", 1), armed("copy", 3):
        for batch in case.batches()[2:]:
            step(batch)
    assert largest_relative_difference(weights(undisturbed), weights(step)) == 0
    assert step.state_dict()["scaler"] == undisturbed.state_dict()["scaler"]


def test_a_half_precision_model_under_a_scaler_is_refused_with_the_reason():
    model, optimizer = CASES[2].fresh()
    with pytest.raises(InputError, match=r"use model.float\(\)"):
        TrainStep(model.half(), optimizer, precision="fp16")


def test_evaluation_survives_an_oom_and_leaves_training_as_it_was():
    case = CASES[0]
    step = make_step(case)
    run(step, case, num_steps=2)
    state = torch.get_rng_state()
    expected = step.evaluate(case.batches())
    with armed("evaluation", 1, 5):
        evaluation = step.evaluate(case.batches())
    assert [event.next_micro_batch for event in evaluation.oom_events] == [8, 8]
    assert evaluation.loss == pytest.approx(expected.loss, rel=1e-6)
    assert (evaluation.num_samples, evaluation.num_units) == (32, expected.num_units)
    assert step.workload.model.training
    assert torch.equal(state, torch.get_rng_state())
