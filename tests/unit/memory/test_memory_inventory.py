"""Who owns the storages of this process."""

import torch
from torch import nn

from plimsoll.memory.inventory import graph_nodes, inventory


def sizes():
    found = inventory("cpu")
    return {(one.category, one.shape): one.num_bytes for one in found.pieces}


def test_each_category_is_told_by_who_has_it():
    layer = nn.Linear(1031, 17, bias=False)
    layer.register_buffer("mask", torch.zeros(1033))
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    layer(torch.zeros(3, 1031)).sum().backward()
    optimizer.step()
    free = torch.zeros(1039)
    kept = (torch.zeros(1049, requires_grad=True) * 2).exp()
    found = sizes()
    assert found["parameters", (17, 1031)] == 17 * 1031 * 4
    assert found["gradients", (17, 1031)] == 17 * 1031 * 4
    assert found["optimizer states", (17, 1031)] == 17 * 1031 * 4
    assert found["buffers", (1033,)] == 1033 * 4
    assert found["temporaries", (1039,)] == free.nbytes
    assert found["activations", (1049,)] == kept.nbytes  # the result of exp is what its gradient needs


def test_a_storage_counts_once_and_for_who_is_named():
    whole = torch.zeros(1051)
    views = [whole[:10], whole[10:]]
    found = inventory("cpu", {"inputs": views})
    own = [one for one in found.pieces if one.num_bytes == 1051 * 4]
    assert [(one.category, one.shape) for one in own] == [("inputs", (10,))]
    assert found.bytes_of("inputs") == 1051 * 4


def test_another_kind_of_device_has_nothing():
    assert inventory("cuda").pieces == []


def test_a_long_graph_is_walked_in_part():
    total = torch.zeros(1, requires_grad=True)
    for _ in range(30):
        total = total + 1
    nodes, is_whole = graph_nodes([total], 10)
    assert (len(nodes), is_whole) == (10, False)
    assert graph_nodes([total], 100)[1]
