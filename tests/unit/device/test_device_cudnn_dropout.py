"""The dropout between recurrent layers on CUDA: its state is found where a kernel is given it, and put back."""

import pytest
import torch
from torch import nn

from plimsoll.device import cudnn_dropout
from plimsoll.device.base import backend_for


def test_the_state_that_a_kernel_is_given_is_seen():
    library = torch.library.Library("plimsoll_test", "DEF")
    library.define("recurrent(Tensor input, float dropout, Tensor? dropout_state) -> Tensor")
    library.impl("recurrent", lambda given, dropout, dropout_state: given.clone(), "CompositeExplicitAutograd")
    state = torch.arange(3)
    with cudnn_dropout._Watch() as watch:
        torch.ops.plimsoll_test.recurrent(torch.ones(2), 0.5, None)
        assert watch.seen is None
        torch.ops.plimsoll_test.recurrent(torch.ones(2), 0.5, state)
        torch.ones(2).add(1)
    assert watch.seen is state


def test_on_the_cpu_nothing_is_looked_for(monkeypatch):
    monkeypatch.setattr(cudnn_dropout, "state_of", None)
    cudnn_dropout.find_for(nn.LSTM(2, 2, num_layers=2, dropout=0.5))
    assert cudnn_dropout.known_state(0) is None


@pytest.mark.gpu
def test_masks_repeat_after_the_state_is_put_back():
    backend = backend_for("cuda")
    layers = nn.LSTM(4, 64, num_layers=3, dropout=0.5, device="cuda")
    before = torch.cuda.get_rng_state()
    cudnn_dropout.find_for(layers)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    given, state = torch.ones(5, 2, 4, device="cuda"), backend.random_state()
    first, second = layers(given)[0], layers(given)[0]
    assert not torch.equal(first, second)
    backend.restore_random_state(state)
    assert torch.equal(layers(given)[0], first)
    assert torch.equal(layers(given)[0], second)
