"""Sizes of graphs, counted by hand."""

import pytest
import torch
from torch import nn

from plimsoll.memory.graph import MOST_NODES, graph_size, has_graph, storage_bytes, storage_key


@pytest.fixture
def leaf():
    return torch.ones(256, requires_grad=True)  # 1 KiB


def test_a_graph_is_its_operations_and_what_they_save(leaf):
    """tanh and exp save their results, 1 KiB each; with the leaf's own node these are three."""
    result = torch.exp(torch.tanh(leaf))
    assert graph_size([result]) == (3, 2048)
    assert graph_size([result], without=[result]) == (3, 1024)
    assert graph_size([result, result]) == (3, 2048)


def test_after_backward_the_operations_stay_and_save_nothing(leaf):
    result = torch.exp(torch.tanh(leaf))
    result.sum().backward()
    assert graph_size([result]) == (3, 0)


def test_parameters_are_left_out():
    layer, batch = nn.Linear(8, 8), torch.ones(4, 8)
    size = graph_size([layer(batch)], without=layer.parameters())
    assert size.saved_bytes == 4 * 8 * 4  # the input


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.own = torch.ones(512)
        ctx.save_for_backward(x * 2)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_of_the_users_keeps_its_attributes_also_after_backward(leaf):
    result = Keeping.apply(leaf)
    assert graph_size([result]) == (2, 2048 + 1024)
    result.sum().backward()
    assert graph_size([result]) == (2, 2048)


def test_what_hooks_have_saved_elsewhere_does_not_count_and_is_not_fetched(leaf):
    def fetch(packed):
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "on the disk", fetch):
        result = torch.tanh(leaf)
    assert graph_size([result]) == (2, 0)


def test_lists_that_an_operation_saves_count(leaf):
    result = leaf[torch.tensor([0, 1, 2, 3])]
    assert graph_size([result]) == (2, 4 * 8)  # the indices


def test_where_torch_does_not_show_what_is_saved_it_is_unknown(leaf, monkeypatch):
    monkeypatch.setattr("plimsoll.memory.graph._raw_saved", lambda node: [object()])
    assert graph_size([torch.tanh(leaf)]) == (2, None)


def test_a_graph_that_is_too_large_is_not_walked_to_its_end(leaf):
    state = leaf
    for _ in range(MOST_NODES + 1):
        state = state * 2.0
    assert graph_size([state]) is None


def test_who_has_a_graph(leaf):
    assert [has_graph(tensor) for tensor in (leaf, leaf * 2, (leaf * 2).detach(), torch.ones(1))] == [
        False, True, False, False,
    ]  # fmt: skip


def test_a_storage_counts_once_and_a_sparse_tensor_has_none():
    whole = torch.ones(256)
    sparse = torch.eye(3).to_sparse()
    assert storage_key(whole) == storage_key(whole[1:])
    assert storage_key(sparse) is None
    assert storage_bytes([whole, whole[1:], sparse, torch.ones(1)]) == 1028
    assert storage_bytes([whole[1:]], without=[whole]) == 0
