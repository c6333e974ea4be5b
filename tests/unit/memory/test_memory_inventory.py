"""The owners of the storages of this process, and the lines that created them."""

from mmap import PAGESIZE

import torch
from safetensors.torch import save_file
from torch import nn

from plimsoll.memory.inventory import Births, graph_nodes, inventory
from plimsoll.weights.loading.opening import entries_of


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
    assert found["activations", (1049,)] == kept.nbytes  # the gradient of exp needs its result


def test_a_storage_counts_once_and_for_who_is_named():
    whole = torch.zeros(1051)
    views = [whole[:10], whole[10:]]
    found = inventory("cpu", {"inputs": views})
    own = [one for one in found.pieces if one.num_bytes == 1051 * 4]
    assert [(one.category, one.shape) for one in own] == [("inputs", (10,))]
    assert found.bytes_of("inputs") == 1051 * 4


def test_of_what_is_mapped_only_what_was_written_counts(tmp_path):
    save_file({"w": torch.ones(64 * PAGESIZE)}, tmp_path / "weights")
    entry = entries_of(tmp_path / "weights")[0]
    layer = nn.Module()
    layer.weight, layer.shared = (nn.Parameter(entry.mapped(is_read_only), False) for is_read_only in (False, True))
    assert sizes()["parameters", (64 * PAGESIZE,)] == 0
    layer.weight[: 16 * PAGESIZE].add_(1)
    own = [one.num_bytes for one in inventory("cpu").pieces if one.shape == (64 * PAGESIZE,)]
    assert sum(own) in (64 * PAGESIZE, 65 * PAGESIZE)  # the first may begin in the middle of a page
    assert sorted(own)[0] == 0


def test_another_kind_of_device_has_nothing():
    assert inventory("cuda").pieces == []


def test_a_long_graph_is_walked_in_part():
    total = torch.zeros(1, requires_grad=True)
    for _ in range(30):
        total = total + 1
    nodes, is_whole = graph_nodes([total], 10)
    assert (len(nodes), is_whole) == (10, False)
    assert graph_nodes([total], 100)[1]


def test_what_is_made_is_noted_and_what_is_changed_in_place_is_not():
    lines = iter(["first", "second", "third"])
    with Births(lambda: next(lines)) as births:
        made = torch.zeros(64, 1024)
        made.add_(1)
        made[1:].view(-1)
        small = torch.zeros(10)
        other = made * 2
    assert births.lines[made.untyped_storage().data_ptr()] == "first"
    assert births.lines[other.untyped_storage().data_ptr()] == "second"
    assert small.untyped_storage().data_ptr() not in births.lines


def test_gradients_stay_what_they_are():
    weight = torch.ones(64, 1024, requires_grad=True)
    with Births(lambda: "line"):
        (weight * 2 + weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 5))
