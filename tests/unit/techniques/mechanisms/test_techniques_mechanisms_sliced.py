"""Actions that prevent a module from being computed in slices and repeated: each is found, and refused by name."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from embedders import Encoder, batches, tied
from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.techniques import installed
from plimsoll.techniques.gradient_cache import gradient_cache_choice
from plimsoll.techniques.mechanisms.sliced import Slicing


class Changed(Encoder):
    """An encoder that applies `change` to its embeddings."""

    def __init__(self, change):
        super().__init__()
        self.change, self.number = change, 0
        self.register_buffer("center", torch.zeros(8))

    def forward(self, ids):
        return self.change(self, super().forward(ids))


def gradients_in_slices(model, loss=tied, samples=4):
    workload = Workload(model.train(), torch.optim.SGD(model.parameters()), loss, "samples")
    with installed(workload, [gradient_cache_choice(samples)]):
        workload.loss(model, batches(1)[0]).backward()


def with_average(model, embeddings):
    with torch.no_grad():
        model.center.lerp_(embeddings.mean(0), 0.1)
    return embeddings


def with_hidden_average(model, embeddings):
    model.center.data.copy_(embeddings.detach().mean(0))
    return embeddings


def with_new_average(model, embeddings):
    model.center = embeddings.detach().mean(0)
    return embeddings


@pytest.mark.parametrize("change", [with_average, with_hidden_average, with_new_average])
def test_a_buffer_that_changes_is_refused(change):
    with pytest.raises(InputError, match="the forward of `Changed` changes its buffer center"):
        gradients_in_slices(Changed(change))


def counting(model, embeddings):
    model.number += torch.is_grad_enabled()
    return embeddings * (1 if model.number < 8 else 1.5)


def test_what_comes_to_something_else_the_second_time_is_refused():
    """The module counts its calls; the check with a few rows beforehand does not notice it."""
    with pytest.raises(InputError, match="the second result differs"):
        gradients_in_slices(Changed(counting))


def test_random_numbers_of_python_are_refused():
    generator = random.Random(0)
    with pytest.raises(InputError, match="does not compute each row by itself"):
        gradients_in_slices(Changed(lambda model, embeddings: embeddings * generator.random()))


def test_a_forward_that_goes_backward_is_refused():
    def change(model, embeddings):
        if not torch.is_grad_enabled():
            return embeddings
        torch.autograd.grad(embeddings.square().sum(), [model.embedding.weight], retain_graph=True)
        return embeddings

    with pytest.raises(InputError, match="runs backward itself"):
        gradients_in_slices(Changed(change))


def test_hooks_on_gradients_are_refused():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = Encoder()
        getattr(model.embedding.weight, register)(lambda gradient: None)
        with pytest.raises(InputError, match=r"of shape \[30, 8\], has a hook on its gradient"):
            gradients_in_slices(model)


def test_rows_of_other_shapes_from_slice_to_slice_are_refused():
    def shorter_in_time(model, embeddings):
        model.number += 1
        return embeddings[:, : 8 if model.number < 9 else 7]

    with pytest.raises(InputError, match=r"rows of shape \[8\] for some slices and of \[7\] for others"):
        gradients_in_slices(Changed(shorter_in_time), lambda model, batch: model(batch["query"]).sum())


def test_inputs_that_need_gradients_get_theirs():
    """The inputs are rows, and a table that all rows share."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

        def forward(self, rows, table, *, factor):
            return self.layer(rows + table.sum(0)) * factor

    torch.manual_seed(0)
    model, found = Shifted(), []
    for choices in ([], [gradient_cache_choice(2)]):
        torch.manual_seed(1)
        rows, table = torch.randn(7, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
        loss = lambda model, batch: model(*batch, factor=2.0).softmax(0).square().sum()  # noqa: E731
        workload = Workload(model, torch.optim.SGD(model.parameters()), loss, "samples")
        model.zero_grad()
        with installed(workload, choices):
            workload.loss(model, (rows * 1.0, table * 1.0)).backward()
        found.append([rows.grad, table.grad, *(one.grad for one in model.parameters())])
    for plain, in_slices in zip(*found, strict=True):
        torch.testing.assert_close(in_slices, plain)


def test_a_second_backward_computes_again():
    model, found = Encoder(), []
    for choices in ([], [gradient_cache_choice(4)]):
        workload = Workload(model, torch.optim.SGD(model.parameters()), tied, "samples")
        model.zero_grad()
        with installed(workload, choices):
            loss = workload.loss(model, batches(1)[0])
            loss.backward(retain_graph=True)
            loss.backward()
        found.append(model.embedding.weight.grad.clone())
    torch.testing.assert_close(*found)


def test_nothing_is_inside_after_an_error():
    slicing = Slicing(2)

    def fail():
        with slicing.inside():
            assert slicing.is_inside
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not slicing.is_inside
