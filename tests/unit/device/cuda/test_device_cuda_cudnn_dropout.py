"""The dropout state of recurrent layers on CUDA is found when a kernel receives it, and restored."""

import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.device.cuda import cudnn_dropout


def test_the_state_that_a_kernel_is_given_is_seen_as_it_was_before():
    library = torch.library.Library("plimsoll_test", "DEF")
    library.define("recurrent(Tensor input, float dropout, Tensor? dropout_state) -> Tensor")

    def recurrent(given, dropout, dropout_state):
        if dropout_state is not None:
            dropout_state += 1
        return given.clone()

    library.impl("recurrent", recurrent, "CompositeExplicitAutograd")
    state = torch.zeros(3)
    with cudnn_dropout._Watch() as watch:
        torch.ops.plimsoll_test.recurrent(torch.ones(2), 0.5, None)
        assert watch.seen is None
        torch.ops.plimsoll_test.recurrent(torch.ones(2), 0.5, state)
        torch.ones(2).add(1)
    assert watch.seen.buffer is state
    assert (watch.seen.content.tolist(), state.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_on_the_cpu_nothing_is_copied():
    cudnn_dropout.find_for(nn.LSTM(2, 2, num_layers=2, dropout=0.5))
    assert cudnn_dropout.copied_state(0) is None


@pytest.fixture
def layers():
    made = nn.LSTM(4, 64, num_layers=3, dropout=0.5, device="cuda")
    cudnn_dropout.find_for(made)
    return made


@pytest.mark.gpu
def test_masks_repeat_after_the_state_is_put_back(layers):
    backend, given = backend_for("cuda"), torch.ones(5, 2, 4, device="cuda")
    layers(given)
    state = backend.random_state()
    first, second = layers(given)[0], layers(given)[0]
    assert not torch.equal(first, second)
    for _ in range(2):
        backend.restore_random_state(state)
        assert torch.equal(layers(given)[0], first)
        assert torch.equal(layers(given)[0], second)


@pytest.mark.gpu
def test_to_copy_the_state_changes_nothing(layers):
    backend, given = backend_for("cuda"), torch.ones(5, 2, 4, device="cuda")

    def passes(copies):
        torch.manual_seed(3)
        found = [torch.rand(3, device="cuda")]
        for _ in range(3):
            if copies:
                backend.random_state()
            found += [torch.rand(2, device="cuda"), layers(given)[0].detach()]
        return found

    assert all(map(torch.equal, passes(copies=False), passes(copies=True)))


@pytest.mark.gpu
def test_a_state_of_before_the_first_pass_is_put_back_too(layers):
    backend, given = backend_for("cuda"), torch.ones(5, 2, 4, device="cuda")
    torch.manual_seed(3)
    state = backend.random_state()
    first = layers(given)[0]
    backend.restore_random_state(state)
    assert torch.equal(layers(given)[0], first)
