"""The defaults of the hooks give a plain training."""

import torch
from torch import nn

from plimsoll.data.batch import count_units
from plimsoll.models.hooks import BY_SAMPLES, UNSHARDED, StepHooks

LABELS = torch.tensor([[1, 1], [-100, -100], [1, -100]])  # 2, 0 and 1 tokens


def cut(micro_batch):
    found = BY_SAMPLES.micro_batches(LABELS, 3, micro_batch, lambda part: count_units({"labels": part}, "tokens"))
    return [(part.tolist(), num_units, [*numbers]) for part, num_units, numbers in found]


def test_a_batch_is_cut_in_its_order_and_what_has_no_units_is_left_out():
    assert cut(1) == [([[1, 1]], 2, [0]), ([[1, -100]], 1, [2])]
    assert cut(2) == [([[1, 1], [-100, -100]], 2, [0, 1]), ([[1, -100]], 1, [2])]
    assert BY_SAMPLES.elements_per_sample(LABELS, 3) == 2


def test_a_batch_that_is_not_larger_is_not_even_a_view():
    ((whole, num_units, numbers),) = BY_SAMPLES.micro_batches(LABELS, 3, 4, torch.numel)
    assert whole is LABELS
    assert (num_units, numbers) == (6, range(3))


def test_gradients_that_are_not_sharded_are_clipped_as_torch_does():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert UNSHARDED.clip([weight], 1.0).item() == 5
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))


def test_hooks_are_plain_unless_a_technique_says_otherwise():
    hooks = StepHooks()
    assert hooks.cut is BY_SAMPLES
    assert hooks.sharding is UNSHARDED
    assert (hooks.evaluation_samples, hooks.captured, hooks.update_early, hooks.after_step) == (None, None, None, ())
