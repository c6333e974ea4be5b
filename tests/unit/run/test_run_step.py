"""What a step returns, refuses and remembers; that it is a transaction is in tests/numerics/test_transaction.py."""

import pytest
import torch
from torch import nn

from plimsoll.errors import DataError, InputError
from plimsoll.run.failpoints import armed
from plimsoll.run.step import TrainStep


def mean_square(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def line_through(num_samples=4):
    """y = 2x for x = 1, 2, ...: with the weight 0 and no bias the loss is the mean of (2x)^2."""
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
    step.ladder._failed_elements = [None]  # as if that had been a moment's shortage
    assert [step(line_through()).micro_batch for _ in range(3)] == [2, 4, 4]
    assert step(line_through(8)).micro_batch == 8


def test_the_last_batch_of_an_epoch_may_be_smaller():
    step = step_of()
    assert [step(line_through(num_samples)).micro_batch for num_samples in (4, 3, 4)] == [4, 3, 4]


def test_before_the_first_batch_the_micro_batch_is_what_was_given():
    assert step_of().micro_batch is None
    assert step_of(micro_batch=3).micro_batch == 3


def test_it_goes_on_where_another_stopped():
    step = step_of(optimizer=torch.optim.Adam)
    with armed("forward", 1):
        step(line_through())
    other = step_of(optimizer=torch.optim.Adam)
    other.load_state_dict(step.state_dict())
    assert (other.num_steps, other.micro_batch) == (1, 2)
    result = other(line_through())
    assert (result.step, result.micro_batch) == (2, 2)


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
        ({"micro_batch": 1.5}, "micro_batch is 1.5, a float, but samples are counted"),
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
