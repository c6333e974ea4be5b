"""The evidence of an exception."""

import sys

import pytest
import torch

from plimsoll.diagnose.of_error import Before, backend_of, evidence_of_error

TEXT = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12"


def evidence(function):
    with pytest.raises(RuntimeError) as raised:
        function()
    backend, family = backend_of(raised.value)
    assert family == "cpu-allocator"
    return evidence_of_error(raised.value, backend, Before(), sys._getframe())


def test_what_was_asked_for_has_its_shape_and_line():
    head = torch.zeros(3001, 48)
    hidden = torch.zeros(4, 32, 48)

    def fail():
        assert head.shape[1] == hidden.shape[2]
        raise RuntimeError(TEXT.format(4 * 32 * 3001 * 4))

    found = evidence(fail)
    (asked,) = [one for one in found.holdings if one.shape == "float32[4, 32, 3001]"]
    assert "test_diagnose_of_error.py" in asked.made.line
    assert found.requested_bytes == 4 * 32 * 3001 * 4
    assert found.event.code == "raise RuntimeError(TEXT.format(4 * 32 * 3001 * 4))"
    assert found.phase == "forward"


def test_shares_are_largest_first_and_add_up_to_the_peak():
    def fail():
        raise RuntimeError(TEXT.format(1 << 20))

    found = evidence(fail)
    sizes = [share.num_bytes for share in found.shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) >= found.peak_bytes - (1 << 20)


def test_states_that_the_first_update_makes_are_counted():
    layer = torch.nn.Linear(1000, 100, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    layer(torch.zeros(1, 1000)).sum().backward()

    class Failing(torch.optim.Adam):
        def _init_group(self, *arguments):
            raise RuntimeError(TEXT.format(400_000))

    optimizer.__class__ = Failing
    found = evidence(optimizer.step)
    assert found.phase == "optimizer"
    (share,) = [one for one in found.shares if one.category == "optimizer states"]
    assert share.num_bytes >= 400_000


def test_inputs_are_the_batch_and_not_the_data_that_it_is_taken_from():
    """A batch is created during its step. Older tensors count as inputs only if a module or a graph uses them."""
    data = torch.zeros(1000, 300)
    whole = torch.ones(1, 700)
    layer = torch.nn.Linear(700, 3)
    before = Before()
    before.look_at([sys._getframe()])
    batch = {"rows": data[:100].clone(), "labels": torch.zeros(100, 20), "mask": torch.ones(100, 30)}
    loss = layer(whole).sum()

    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    backend, _ = backend_of(raised.value)
    found = evidence_of_error(raised.value, backend, before, sys._getframe())
    sizes = {one.category: one.num_bytes for one in found.shares}
    assert sizes["inputs"] == whole.nbytes + sum(one.nbytes for one in batch.values())
    assert sizes["kept by variables"] == data.nbytes
    del loss


def test_what_a_module_was_called_with_is_an_input_before_a_graph_has_it():
    class Failing(torch.nn.Linear):
        def forward(self, rows):
            return torch.empty(1 << 60, dtype=torch.uint8)

    layer, rows = Failing(3, 3), torch.zeros(1000, 300)
    before = Before()
    before.look_at([sys._getframe()])
    with pytest.raises(RuntimeError) as raised:
        layer(rows)
    backend, _ = backend_of(raised.value)
    found = evidence_of_error(raised.value, backend, before, sys._getframe())
    assert {one.category: one.num_bytes for one in found.shares}["inputs"] == rows.nbytes


def test_an_error_that_is_none_has_no_backend():
    assert backend_of(ValueError("out of memory")) is None
