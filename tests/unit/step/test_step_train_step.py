"""The results and errors of a step, and its state from step to step.

tests/numerics/test_transaction.py tests that a step is a transaction.
"""

import pytest
import torch
from torch import nn

from plimsoll.errors import DataError, InputError, NonFiniteLossError
from plimsoll.models.hooks import StepHooks
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.train_step import TrainStep
from workloads import mean_square


def line_through(num_samples=4):
    """Return samples of y = 2x for x = 1, 2, ...: with weight 0 and no bias, the loss is the mean of (2x)^2."""
    x = torch.arange(1.0, num_samples + 1).unsqueeze(1)
    return {"x": x, "y": 2 * x}


def step_of(lr=0.01, optimizer=torch.optim.SGD, **options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    made = optimizer(model.parameters(), lr=lr)
    return TrainStep(model, made, mean_square, **{"units": "samples", **options})


def weight(step):
    return step.workload.model.weight.item()


def test_one_step_by_hand():
    """x = 1..4, y = 2x, w = 0: loss = 4 x 30 / 4 = 30, gradient = -2 x 2 x 30 / 4 = -30, w = 0.01 x 30."""
    result = step_of()(line_through())
    assert (result.step, result.num_samples, result.num_units, result.micro_batch) == (1, 4, 4, 4)
    assert result.loss == 30
    assert (result.gradient_norm, result.learning_rate, result.updated) == (None, 0.01, True)
    assert result.oom_events == ()


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_the_cut_changes_neither_loss_nor_update(micro_batch):
    step = step_of(micro_batch=micro_batch)
    result = step(line_through())
    assert result.loss == pytest.approx(30)
    assert weight(step) == pytest.approx(0.3)
    assert result.micro_batch == micro_batch


def test_the_gradient_is_clipped_after_all_of_it_is_there():
    step = step_of(micro_batch=1, clip_norm=3.0)
    assert step(line_through()).gradient_norm == pytest.approx(30)
    assert weight(step) == pytest.approx(0.03)


def test_units_may_be_counted_by_a_function():
    step = step_of(units=lambda batch: 10 * len(batch["x"]))
    assert step(line_through()).num_units == 40


def test_the_learning_rate_of_a_step_is_the_one_it_was_done_with():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    step = TrainStep(model, optimizer, mean_square, units="samples", schedule=schedule)
    with armed("clip", 2):  # the second step is done twice, the rate lowered once
        rates = [step(line_through()).learning_rate for _ in range(3)]
    assert rates == [1, 1 / 2, 1 / 3]


def test_each_event_is_told_when_it_happens():
    step = step_of()
    told = []
    with armed("backward", 1, 2):
        result = step(line_through(), on_oom=told.append)
    assert told == list(result.oom_events)
    assert [(event.step, event.micro_batch, event.next_micro_batch, event.action) for event in told] == [
        (1, 4, 2, "micro-batch 4 -> 2"),
        (1, 2, 1, "micro-batch 2 -> 1"),
    ]
    assert step.num_steps == 1


def test_a_cut_batch_grows_again_and_a_larger_batch_is_not_cut_for_it():
    step = step_of(grow_after=2)
    with armed("forward", 1):
        assert step(line_through()).micro_batch == 2
    step.fallback_schedule._failed_elements = [None]  # as if that had been a moment's shortage ...
    step.fallback_schedule._limit_bytes = None  # ... and nothing had been measured
    assert [step(line_through()).micro_batch for _ in range(3)] == [2, 4, 4]
    assert step(line_through(8)).micro_batch == 8


def test_the_last_batch_of_an_epoch_may_be_smaller():
    step = step_of()
    assert [step(line_through(num_samples)).micro_batch for num_samples in (4, 3, 4)] == [4, 3, 4]


def test_before_the_first_batch_the_micro_batch_is_what_was_given():
    assert (step_of().micro_batch, step_of().fallback) == (None, 0)
    assert (step_of(micro_batch=3).micro_batch, step_of(micro_batch=3).fallback) == (3, 0)


def test_unless_it_is_said_a_cut_batch_grows_again_after_50_clean_steps():
    step = step_of(lr=0.0)
    with armed("forward", 1):
        step(line_through())
    step.fallback_schedule._failed_elements = [None]  # as if that had been a moment's shortage ...
    step.fallback_schedule._limit_bytes = None  # ... and nothing had been measured
    assert [step(line_through()).micro_batch for _ in range(50)] == [2] * 49 + [4]


def test_a_batch_that_was_cut_for_one_event_is_whole_again_after_three_clean_steps():
    """The measured peak of the smaller micro-batches leaves memory free, so the one huge request is ignored."""
    step = step_of(lr=0.0)
    with armed("forward", 1):
        step(line_through())
    assert [step(line_through()).micro_batch for _ in range(10)] == [2] * 2 + [4] * 8


def test_an_update_in_pieces_is_told_and_one_that_cannot_be_done_is_tried_again_with_the_whole_step():
    told, step = [], step_of()
    with armed("optimizer", 1, 2, 3):  # at once; then its one piece, twice
        result = step(line_through(), on_oom=told.append)
    assert (weight(step), result.micro_batch, result.fallback) == (pytest.approx(0.3), 4, 0)
    assert [event.action for event in told] == ["same micro-batch once more"]
    with armed("optimizer", 1):
        result = step(line_through(), on_oom=told.append)
    assert told[1:] == list(result.oom_events)
    assert [event.action for event in result.oom_events] == ["update not started, done in chunks"]


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, [4, 2]),
        ({"micro_batch": 3}, [2, 1]),
        ({"fallbacks": [[micro_batch_choice(4)], [micro_batch_choice(1)]]}, [4, 2]),
        ({"fallbacks": [[micro_batch_choice(2)], [micro_batch_choice(1)]]}, [2, 1]),
    ],
)
def test_an_evaluation_begins_with_passes_no_larger_than_those_of_the_training(options, samples):
    step = step_of(**options)
    with armed("evaluation", 1):
        (event,) = step.evaluate([line_through()]).oom_events
    assert [event.micro_batch, event.next_micro_batch] == samples


def test_it_goes_on_where_another_stopped():
    step = step_of(optimizer=torch.optim.Adam)
    with armed("forward", 1):
        step(line_through())
    other = step_of(optimizer=torch.optim.Adam)
    other.load_state_dict(step.state_dict())
    assert (other.num_steps, other.micro_batch) == (1, 2)
    result = other(line_through())
    assert (result.step, result.micro_batch) == (2, 2)


def test_a_cut_that_was_learned_is_not_taken_over_by_a_model_that_must_stay_whole():
    step = step_of()
    with armed("forward", 1):
        step(line_through())
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    whole = TrainStep(model, torch.optim.SGD(model.parameters()), mean_square, units="samples")
    whole.load_state_dict(step.state_dict())
    assert whole.micro_batch is None
    assert whole(line_through()).micro_batch == 4


@pytest.mark.parametrize("before", [{}, {"with_schedule": True}, {"precision": "fp16"}])
@pytest.mark.parametrize("after", [{}, {"with_schedule": True}, {"precision": "fp16"}])
def test_schedule_and_scaler_go_on_where_both_have_one(before, after):
    def made(with_schedule=False, **options):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if with_schedule else None
        return TrainStep(model, optimizer, mean_square, units="samples", schedule=schedule, **options)

    step, other = made(**before), made(**after)
    for _ in range(3):
        step(line_through())
    fresh = made(**after).state_dict()
    other.load_state_dict(step.state_dict())
    expected = step.state_dict() if before == after else fresh
    for name in ("schedule", "scaler"):
        assert other.state_dict()[name] == expected[name]
    assert other.num_steps == 3


def infinite_for(num_steps):
    """Return a finite loss with non-finite gradients in the first steps."""
    passes = []

    def loss(model, batch):
        passes.append(1)
        found = mean_square(model, batch) / 1000  # scaled by 65536 its gradients are numbers of fp16
        return found + (model.weight * 0).sum().sqrt() if len(passes) <= num_steps else found

    return loss


def test_an_update_that_a_scaler_skips_is_a_step_without_one():
    """The schedule keeps its learning rate for the next update that happens."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = TrainStep(model, optimizer, infinite_for(1), units="samples", precision="fp16", schedule=schedule)
    results = [step(line_through()) for _ in range(3)]
    assert [(one.step, one.updated, one.learning_rate) for one in results] == [
        (1, False, 0.01),
        (2, True, 0.01),
        (3, True, 0.005),
    ]


def test_gradients_that_no_scale_makes_finite_end_the_training():
    """From 65536 the scale is halved until it is less than 1, which takes 17 steps. fp32 has no scale."""
    for precision, num_steps in (("fp32", 0), ("fp16", 17)):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = TrainStep(model, optimizer, infinite_for(1000), units="samples", precision=precision, clip_norm=1.0)
        for _ in range(num_steps):
            assert not step(line_through()).updated
        with pytest.raises(NonFiniteLossError, match="gradient norm"):
            step(line_through())
        assert step.num_steps == num_steps


@pytest.mark.parametrize(
    "loss", [lambda model, batch: 1.5, lambda model, batch: (model(batch["x"]) - batch["y"]).square()]
)
def test_a_loss_that_is_no_mean_is_refused_and_the_step_undone(loss):
    model = nn.Linear(1, 1, bias=False)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss, units="samples")
    with pytest.raises(InputError, match="return the mean loss, a tensor of one number"):
        step(line_through())
    assert (step.num_steps, model.weight.grad) == (0, None)


def test_a_batch_for_a_model_with_its_own_loss_has_names():
    model = nn.Linear(1, 1)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), units="samples")
    with pytest.raises(InputError, match=r"a batch that is a tuple cannot be passed to model\(\*\*batch\).loss"):
        step((torch.ones(2, 1),))


def test_what_a_technique_tidies_up_is_after_each_step_that_happened():
    step, tidied = step_of(), []
    step.workload.hooks = StepHooks(after_step=(lambda: tidied.append(step.num_steps),))
    with armed("backward", 1):
        step(line_through())
    step(line_through())
    assert tidied == [1, 2]


def test_closing_says_what_stays_where_it_is_in_the_line_that_closes():
    step = step_of()
    step._fallbacks.close = exhaust_memory
    with pytest.warns(UserWarning, match="memory ran out while the techniques of the plan were removed") as caught:
        step.close()
    assert caught[0].filename == __file__


def test_gradients_from_before_are_dropped():
    step = step_of()
    step.workload.model.weight.grad = torch.full((1, 1), 1000.0)
    step(line_through())
    assert weight(step) == pytest.approx(0.3)


def test_a_batch_without_a_target_is_refused():
    labels = torch.full((2, 3), -100)
    step = step_of(units="tokens")
    with pytest.raises(DataError, match=r"step 1: none of the 2 samples has a target \(every label is -100\)"):
        step({"x": torch.ones(2, 1), "y": torch.ones(2, 1), "labels": labels})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is unknown: choose fp32, bf16 or fp16"),
        ({"micro_batch": 0}, "micro_batch is 0 samples, but a pass needs at least 1"),
        ({"micro_batch": 1.5}, "micro_batch is 1.5, a float, but must count samples"),
        ({"units": "sample"}, "units 'sample' is unknown: choose samples, tokens or next-tokens"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS .* needs a closure: use another optimizer"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(options, message):
    with pytest.raises(InputError, match=message):
        step_of(**options)


def test_a_loss_of_torch_is_refused_before_it_is_called():
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match="loss is MSELoss, but it is called as"):
        TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="a batch of 0 samples"):
        step_of(units=lambda batch: 1)(line_through(0))


def test_a_model_on_two_devices_or_none_is_refused():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"are on \['cpu', 'meta'\]: put it on one device"):
        TrainStep(model, optimizer, mean_square)
    with pytest.raises(InputError, match="are on no device: put it on one device"):
        TrainStep(nn.ReLU(), optimizer, mean_square)


def test_dropped_optimizer_states_are_freed():
    model = nn.Linear(4096, 2048)  # 32 MiB, and two states of as much
    step = TrainStep(
        model, torch.optim.AdamW(model.parameters()), lambda model, batch: model(batch).mean(), units="samples"
    )
    step(torch.ones(2, 4096))
    step(torch.ones(2, 4096))
    with_states_bytes = step.backend.use().used_bytes
    step.drop_optimizer_states()
    assert with_states_bytes - step.backend.use().used_bytes > 60 << 20
