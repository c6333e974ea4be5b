"""Updates in backward, without a surrounding step: when they happen, how they are undone, and when they are skipped."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError
from plimsoll.models.hooks import EarlyUpdates, StepHooks
from plimsoll.models.workload import Workload, model_loss
from plimsoll.step.update.gradient_release import GradientRelease, gradient_release
from plimsoll.techniques.mechanisms.lengths import CutByLength

HOOKS = StepHooks(update_early=EarlyUpdates(torch.clone, "--forbid it"))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def backward(model, release, num_times=1):
    with release.in_backward():
        for _ in range(num_times):
            model(torch.ones(2, 4)).square().mean().backward()


@pytest.mark.parametrize(("chunk_bytes", "sizes"), [(1, [1] * 6), (64, [2, 2, 2]), (1000, [6])])
def test_parameters_wait_until_they_make_up_a_piece(chunk_bytes, sizes):
    """Weights have 64 bytes and biases 16. The last layer is updated first."""
    model, calls = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = optimizer.step
    optimizer.step = lambda: (calls.append(len(optimizer.param_groups[0]["params"])), update())
    backward(model, GradientRelease(optimizer, torch.clone, "cpu", chunk_bytes))
    assert calls == sizes
    assert len(optimizer.param_groups[0]["params"]) == 6
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "num_together"), [("cpu", 2), ("cuda", 16)])
def test_a_piece_has_the_size_that_suits_the_device(kind, num_together):
    """Each parameter has 1 MiB."""
    model, calls = nn.ParameterList([nn.Parameter(torch.ones(1 << 18)) for _ in range(17)]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = optimizer.step
    optimizer.step = lambda: (calls.append(len(optimizer.param_groups[0]["params"])), update())
    with GradientRelease(optimizer, torch.clone, kind).in_backward():
        sum(parameter.sum() for parameter in model).backward()
    assert calls == [num_together] * (17 // num_together) + [1]


@pytest.mark.parametrize("chunk_bytes", [1, 1000], ids=["when it was updated", "while it waits"])
def test_a_gradient_that_comes_in_parts_is_refused(chunk_bytes):
    model = net()
    release = GradientRelease(torch.optim.SGD(model.parameters(), lr=0.1), torch.clone, "cpu", chunk_bytes)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(InputError, match="came in more than one part"):
        backward(model, release, num_times=2)
    release.undo()
    assert all(map(torch.equal, model.parameters(), before))


def test_frozen_parameters_stay_and_the_others_are_updated():
    model = net()
    model[1].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model, GradientRelease(torch.optim.SGD(model.parameters(), lr=0.1), torch.clone, "cpu", 1))
    changed = [not torch.equal(now, was) for now, was in zip(model.parameters(), before, strict=True)]
    assert changed == [True, True, False, False, True, True]


def test_two_groups_keep_their_own_settings_and_are_undone_with_them():
    def grouped(model):
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters(), "lr": 0.01}]
        return torch.optim.AdamW(groups)

    model, other = net(), net()
    optimizer, expected = grouped(model), grouped(other)
    for _ in range(2):
        backward(model, GradientRelease(optimizer, torch.clone, "cpu", 1))
        expected.zero_grad()
        other(torch.ones(2, 4)).square().mean().backward()
        expected.step()
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    release = GradientRelease(optimizer, torch.clone, "cpu", 1)
    backward(model, release)
    optimizer.param_groups[0].update(lr=5.0, weight_decay=5.0)
    release.undo()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert all(value is states[parameter][key] for key, value in optimizer.state[parameter].items())
        assert all(torch.equal(value, expected.state[twin][key]) for key, value in optimizer.state[parameter].items())
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.01), (0.01, 0.01)]


def test_states_that_a_step_made_are_gone_when_it_is_undone():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    release = GradientRelease(optimizer, torch.clone, "cpu", 1)
    backward(model, release)
    assert len(optimizer.state) == 6
    release.undo()
    assert not optimizer.state


def test_a_copy_that_fails_leaves_its_piece_as_it_was():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    num_copies = []

    def copy(tensor):
        num_copies.append(1)
        if len(num_copies) == 3:
            raise OSError("disk full")
        return tensor.detach().clone()

    release = GradientRelease(optimizer, copy, "cpu", 1)
    with pytest.raises(OSError, match="disk full"):
        backward(model, release)
    assert len(optimizer.state) == 2
    release.undo()
    assert all(map(torch.equal, model.parameters(), before))
    assert not optimizer.state
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


class OfTwo(Ranks):
    """One of two ranks, which add up their gradients first."""

    def __init__(self):
        super().__init__()
        self.world_size = 2


def test_it_is_done_only_where_every_gradient_is_complete_in_one_pass():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def release_of(micro_batch=8, **fields):
        fields = {"hooks": HOOKS} | fields
        return gradient_release(Workload(model, optimizer, model_loss, "samples", **fields), micro_batch, 8)

    assert release_of() is not None
    assert release_of(micro_batch=9) is not None
    assert release_of(precision="bf16") is not None
    assert release_of(micro_batch=7) is None
    assert release_of(hooks=StepHooks()) is None
    assert release_of(clip_norm=1.0) is None
    assert release_of(precision="fp16") is None
    assert release_of(hooks=replace(HOOKS, cut=CutByLength())) is None
    assert release_of(ranks=OfTwo()) is None
    optimizer.register_step_post_hook(lambda *_: None)
    assert release_of() is None
