"""A variable that grows with the steps."""

import pytest

from live_evidence import MIB, kept, live
from plimsoll.diagnose.causes.leak import findings


def test_a_list_that_grows():
    (finding,) = findings(live(kept(tensor_bytes=300 * MIB)))
    assert (finding.cause, finding.place, finding.effect_bytes) == ("leak", "train.py:9", 300 * MIB)
    assert finding.title == "`cache` grows with every step"
    assert finding.evidence[0].text == "`cache` (list) has 40 items, 0 when it was first seen"
    assert finding.peak_share == 0.25


def test_what_is_from_a_sample_is_assumed():
    (finding,) = findings(live(kept(host_bytes=300 * MIB, is_estimated=True)))
    assert finding.effect_known == "assumed"


@pytest.mark.parametrize(
    "evidence",
    [
        live(kept(tensor_bytes=10 * MIB)),  # too little
        live(kept(tensor_bytes=300 * MIB, num_items_before=40)),  # the same length as before
        live(kept(tensor_bytes=300 * MIB, num_graphs=40)),  # the memory of its graph
        live(kept(tensor_bytes=300 * MIB), num_steps=0),  # while loading
        live(kept(tensor_bytes=300 * MIB), is_evaluating=True),
        live(),
    ],
)
def test_what_is_no_leak(evidence):
    assert findings(evidence) == ()
