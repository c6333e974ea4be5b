"""The variables that keep tensors alive."""

import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from plimsoll.diagnose.holders import found_in, kept_by, lengths_of

KIB = 1024


def look(frame, names, before=None, borders=()):
    found = [one for one in found_in([frame]) if one.name.partition(".")[0].partition("[")[0] in names]
    return {one.name: one for one in kept_by(found, before or {}, borders)}


def test_a_list_of_tensors_counts_each_storage_once():
    whole = torch.zeros(64, KIB)
    parts = [whole[row] for row in range(64)]
    kept = look(sys._getframe(), {"parts"})["parts"]
    assert kept.tensor_bytes == 256 * KIB
    assert (kept.num_items, kept.kind, kept.num_graphs) == (64, "list", 0)
    assert kept.code == "parts = [whole[row] for row in range(64)]"
    del parts


def test_what_is_on_another_device_than_the_one_that_ran_out_does_not_count():
    on_host = [torch.zeros(64, KIB), "text " * 100 * KIB]
    found = [one for one in found_in([sys._getframe()]) if one.name == "on_host"]
    assert len(kept_by(found, {}, (), "cpu")) == 1
    assert kept_by(found, {}, (), "cuda") == []
    del on_host


@pytest.mark.parametrize(
    ("made", "grows"),
    [
        (lambda: {"input_ids": torch.zeros(9, KIB), "mask": torch.zeros(9, KIB), "labels": torch.zeros(9, KIB)}, False),
        (lambda: tuple(torch.zeros(9, KIB) for _ in range(4)), False),
        (lambda: {number: torch.zeros(9, KIB) for number in range(4)}, True),
        (lambda: {str(number): torch.zeros(9, KIB) for number in range(40)}, True),
    ],
)
def test_a_batch_is_no_collection_that_grows(made, grows):
    batch = made()
    (kept,) = look(sys._getframe(), {"batch"}).values()
    assert kept.has_grown == grows
    del batch


def test_a_list_that_was_empty_is_known_from_then_on():
    cache = {}
    before = lengths_of(found_in([sys._getframe()]))
    cache |= {str(number): torch.zeros(9, KIB) for number in range(4)}
    assert look(sys._getframe(), {"cache"}, before)["cache"].has_grown


def test_a_tensor_with_a_graph_that_reaches_back():
    weight = torch.zeros(256, KIB, requires_grad=True)
    first = torch._C._autograd._get_sequence_nr()
    total = (weight * torch.ones(256, KIB)).exp().sum()
    kept = look(sys._getframe(), {"total"}, borders=[first - 1, first + 1, first + 2])["total"]
    assert kept.graph_bytes >= 2 * 1024 * KIB
    assert (kept.num_graphs, kept.num_steps_back) == (1, 2)
    del total


def test_objects_and_arrays_and_whether_they_grow():
    texts = [f"text {number:200d}" for number in range(2000)]
    array = numpy.zeros(100 * KIB, dtype=numpy.uint8)
    before = lengths_of(found_in([sys._getframe()]))
    texts += texts[:100]
    found = look(sys._getframe(), {"texts", "array"}, before)
    assert (found["texts"].num_items_before, found["texts"].num_items) == (2000, 2100)
    assert 0.9 < found["texts"].host_bytes / (2000 * (sys.getsizeof(texts[0]) + 8)) < 1.2
    assert found["texts"].is_estimated
    assert found["array"].host_bytes == 100 * KIB
    del array


def test_attributes_of_modules_and_data_sets():
    class Data(Dataset):
        def __init__(self):
            self.tokens = torch.zeros(100, KIB)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(KIB, KIB)
            self.history = []

        def forward(self, x):
            self.history.append(x)

    data, net = Data(), Net()
    for _ in range(30):
        net(torch.zeros(KIB, 8))
    found = look(sys._getframe(), {"data", "net"})
    assert found.keys() == {"data.tokens", "net.history"}
    assert found["data.tokens"].is_of_data
    assert found["net.history"].code == "self.history.append(x)"
    del data


def fill(holder):
    rows = list(range(9))
    holder.rows = [torch.zeros(9, KIB) for _ in rows]


def test_an_attribute_that_a_function_has_stored_that_returned():
    holder = SimpleNamespace()
    fill(holder)
    kept = look(sys._getframe(), {"holder"})["holder.rows"]
    assert kept.code == "holder.rows = [torch.zeros(9, KIB) for _ in rows]"


def test_what_hides_or_loops_does_no_harm():
    class Odd:
        @property
        def __dict__(self):
            raise AttributeError

    loop = []
    loop.append(loop)
    odd = [Odd(), {"a": loop}, {1, 2}, "text", None, range(3)]
    assert look(sys._getframe(), {"odd", "loop"}) == {}
    del odd
