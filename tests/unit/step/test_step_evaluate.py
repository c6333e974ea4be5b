"""An evaluation counts each sample once, in micro-batches as large as fit, and does not change the training."""

import pytest
import torch
from torch import nn

from plimsoll.errors import DataError, OutOfMemoryError
from plimsoll.models.hooks import StepHooks
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from workloads import mean_square


def line_through(num_samples):
    """Return samples of y = 2x for x = 1, 2, ...: with weight 0 their losses are 4, 16, 36, 64, 100."""
    x = torch.arange(1.0, num_samples + 1).unsqueeze(1)
    return {"x": x, "y": 2 * x}


def step_of(**options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), mean_square, units="samples", **options)


def test_evaluation_by_hand():
    """The mean of the five losses is 44 for all batch sizes."""
    step = step_of()
    data = line_through(5)
    batches = [{name: values[start : start + 2] for name, values in data.items()} for start in (0, 2, 4)]
    evaluation = step.evaluate(batches)
    assert evaluation.loss == pytest.approx(44)
    assert (evaluation.num_samples, evaluation.num_units, evaluation.oom_events) == (5, 5, ())
    assert step.num_steps == 0
    assert step.workload.model.weight.item() == 0


def test_evaluation_turns_dropout_off_and_leaves_each_part_of_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5), nn.Dropout(0.5).eval())
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_square, units="samples")
    losses = {step.evaluate([line_through(4)]).loss for _ in range(3)}
    assert len(losses) == 1
    assert [module.training for module in model] == [True, True, False]
    assert model.training


def test_there_must_be_something_to_evaluate():
    with pytest.raises(DataError, match="none of 0 samples has a target; give at least one with a target"):
        step_of().evaluate([])


def test_a_batch_that_runs_out_of_memory_is_evaluated_again_in_micro_batches():
    """A batch of 8 samples fails, then the second micro-batch of 4; four micro-batches of 2 succeed."""
    step = step_of()
    with armed("evaluation", 1, 3):
        evaluation = step.evaluate([line_through(8)])
    assert evaluation.loss == pytest.approx(4 * sum(x * x for x in range(1, 9)) / 8)
    assert [(event.micro_batch, event.next_micro_batch) for event in evaluation.oom_events] == [(8, 4), (4, 2)]
    assert {event.phase for event in evaluation.oom_events} == {"evaluation"}
    assert [event.action for event in evaluation.oom_events] == ["micro-batch 8 -> 4", "micro-batch 4 -> 2"]


def test_the_size_that_fits_is_remembered_until_a_larger_batch_comes():
    sizes = []
    step = step_of(recut_loss=True)  # no samples are computed to find out
    step.workload.model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    with armed("evaluation", 1):
        step.evaluate([line_through(8), line_through(8), line_through(6), line_through(16)])
    assert sizes == [4, 4, 4, 4, 4, 2, 16]


def test_where_single_samples_do_not_fit_it_ends_and_all_is_as_it_was():
    step = step_of()
    step.position.phase = "clip"
    with (
        armed("evaluation", *range(1, 30)),
        pytest.raises(OutOfMemoryError, match="micro-batch 1 is the smallest possible"),
    ):
        step.evaluate([line_through(4)])
    assert step.position.phase == "clip"
    assert step.workload.model.training


def test_random_numbers_that_a_forward_takes_are_given_back():
    step = step_of()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    step.workload.model.register_forward_hook(lambda module, arguments, output: output + 0 * torch.rand(1))
    step.evaluate([line_through(2)])
    assert torch.equal(torch.rand(2), expected)


def test_what_cannot_be_cut_is_evaluated_once_more():
    step = step_of(fallbacks=[[micro_batch_choice(1)]])
    with armed("evaluation", 2):
        evaluation = step.evaluate([line_through(2)])
    assert [event.action for event in evaluation.oom_events] == ["same micro-batch once more"]


def test_a_batch_without_a_target_counts_for_nothing():
    step = step_of()
    step.workload.units = lambda batch: int((batch["y"] < 6).sum())  # the first two
    without = {name: values[2:] for name, values in line_through(4).items()}
    evaluation = step.evaluate([without, line_through(2), without])
    assert (evaluation.loss, evaluation.num_samples, evaluation.num_units) == (pytest.approx(10), 6, 2)


def test_after_a_death_it_begins_with_smaller_micro_batches():
    sizes = []
    step = step_of(fallbacks=[[micro_batch_choice(size)] for size in (8, 4, 2, 1)], recut_loss=True)
    step.workload.model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    step.begin_again_at(2, too_large_fallback=1)
    step.evaluate([line_through(8)])
    assert sizes == [2] * 4


def test_a_technique_bounds_the_micro_batches_also_when_it_comes_later_or_would_grow():
    sizes = []
    step = step_of(recut_loss=True)
    step.workload.model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    step.evaluate([line_through(8)])
    step.workload.hooks = StepHooks(evaluation_samples=3)
    for _ in range(3):
        evaluation = step.evaluate([line_through(8)])
    step.workload.hooks = StepHooks()
    step.evaluate([line_through(8)])
    assert sizes == [8, *[3, 3, 2] * 3, 8]
    assert evaluation.loss == pytest.approx(4 * sum(x * x for x in range(1, 9)) / 8)


def test_memory_that_runs_out_below_the_bound_is_cut_further():
    step = step_of()
    step.workload.hooks = StepHooks(evaluation_samples=3)
    with armed("evaluation", 1):
        evaluation = step.evaluate([line_through(8)])
    assert [(event.micro_batch, event.next_micro_batch) for event in evaluation.oom_events] == [(3, 2)]


class Masked(nn.Module):
    """A module that makes a mask in its first forward and keeps it, as many modules do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(1)
        return x * self.weight * self.mask


def test_what_a_module_keeps_from_an_evaluation_can_be_trained_with():
    """Under inference mode the mask could not be saved for backward."""
    model = Masked()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), mean_square, units="samples")
    step.evaluate([line_through(2)])
    step(line_through(2))
    assert model.weight.item() != 0
