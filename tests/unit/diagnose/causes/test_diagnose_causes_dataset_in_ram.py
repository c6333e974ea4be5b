"""Data sets that are entirely in memory."""

import pytest

from live_evidence import MIB, kept, live
from plimsoll.diagnose.causes.dataset_in_ram import findings


@pytest.mark.parametrize(
    "evidence",
    [
        live(kept("data.rows", host_bytes=300 * MIB, num_items_before=40)),
        live(kept("data.tokens", tensor_bytes=300 * MIB, num_items_before=40, is_of_data=True)),
        live(kept("lines", host_bytes=300 * MIB), num_steps=0),
    ],
)
def test_data_that_does_not_grow_with_the_steps(evidence):
    (finding,) = findings(evidence)
    assert (finding.cause, finding.place, finding.effect_bytes) == ("dataset_in_ram", "train.py:9", 300 * MIB)


def test_a_line_that_reads_a_file():
    (finding,) = findings(live(num_steps=0, code="lines = file.readlines()"))
    assert (finding.place, finding.effect_bytes) == ("train.py:3", None)


@pytest.mark.parametrize(
    "evidence",
    [
        live(kept("cache", host_bytes=300 * MIB)),  # it grows
        live(kept("data.rows", host_bytes=100 * MIB, num_items_before=40)),
        live(kept("weights", tensor_bytes=300 * MIB, num_items_before=40)),
        live(code="lines = file.readlines()"),  # after a step
        live(num_steps=0, code="model(x)"),
    ],
)
def test_what_is_none(evidence):
    assert findings(evidence) == ()
