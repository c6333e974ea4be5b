"""A second copy of the weights as a finding."""

from dataclasses import replace

import pytest

from live_evidence import MIB, kept, live
from plimsoll.diagnose.causes.checkpoint_kept import findings
from plimsoll.diagnose.findings import diagnosed
from plimsoll.records.diagnosis import Share


def copied(of, name="saved", mib=300):
    return kept(name, kind="dict, a variable of train()", num_items=27, tensor_bytes=mib * MIB, copy_of=of)


def test_a_loaded_checkpoint_is_let_go():
    (finding,) = findings(live(copied("checkpoint")))
    assert finding.title == (
        "`saved` keeps a loaded checkpoint alive: 300.0 MiB that neither the model nor the optimizer uses"
    )
    assert (finding.place, finding.code, finding.effect_bytes) == ("train.py:9", "del saved", 300 * MIB)
    assert "mmap=True" in finding.remedy
    assert finding.evidence[0].text == (
        "`saved` (dict, a variable of train()) has 27 tensors that the training does not use"
    )
    (finding,) = findings(live(copied("checkpoint", "trainer.state.last")))
    assert finding.code == "trainer.state.last = None"


@pytest.mark.parametrize(("of", "title"), [("weights", "a copy of the weights"), ("model", "a second model")])
def test_other_copies_go_where_there_is_room(of, title):
    on_host = live(copied(of))
    (finding,) = findings(on_host)
    assert title in finding.title
    assert "on the CPU" not in finding.remedy
    (finding,) = findings(replace(on_host, kind="cuda"))
    assert "on the CPU" in finding.remedy


def test_a_small_copy_is_no_cause():
    assert findings(live(copied("checkpoint", mib=10))) == ()


@pytest.mark.parametrize(("mib", "first"), [(300, "checkpoint_kept"), (90, "optimizer_states")])
def test_what_is_used_by_nothing_comes_first_where_it_is_enough(mib, first):
    """It comes before the optimizer states, which are larger and which the training needs."""
    evidence = live(copied("checkpoint", mib=mib))
    states = Share(category="optimizer states", num_bytes=500 * MIB, known="counted")
    found = diagnosed(replace(evidence, shares=(*evidence.shares, states), requested_bytes=100 * MIB))
    assert found.findings[0].cause == first
    assert {"checkpoint_kept", "optimizer_states"} <= {one.cause for one in found.findings}
