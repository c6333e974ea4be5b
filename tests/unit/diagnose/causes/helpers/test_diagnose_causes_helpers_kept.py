"""Growth of memory that variables keep alive: the threshold and the finding."""

from dataclasses import replace

import pytest

from live_evidence import MIB, kept, live
from plimsoll.diagnose.causes.graph_kept import findings as graph_kept
from plimsoll.diagnose.causes.helpers.kept import finding_of_kept, much, training_bytes
from plimsoll.diagnose.evidence import Evidence


def test_much_is_a_share_of_the_training_without_what_was_before_it():
    evidence = live(kept("a", tensor_bytes=60 * MIB), kept("b", tensor_bytes=40 * MIB))
    assert training_bytes(evidence) == 1000 * MIB
    assert [one.name for one in much(evidence, 0.05)] == ["a"]


def test_without_a_live_process_nothing_is_kept():
    assert list(much(Evidence(subject="x", kind="cpu"), 0.0)) == []


def test_a_line_that_was_not_found_is_that_of_the_error():
    one = kept(host_bytes=MIB, place="", code="")
    finding = finding_of_kept(live(one), one, "leak", title="t", remedy="r")
    assert finding.place == "train.py:3"
    assert finding.evidence[1].text == "other objects 1.0 MiB"


def test_a_state_whose_graph_reaches_back():
    state = kept("state", kind="Tensor", num_items=1, graph_bytes=300 * MIB, num_graphs=1, num_steps_back=4, remedy="d")
    (finding,) = graph_kept(live(state))
    assert (finding.title, finding.code) == ("`state` is not detached", "d")


def test_detaching_what_is_mostly_tensors_is_not_the_remedy():
    (finding,) = graph_kept(live(kept("outputs", tensor_bytes=300 * MIB, num_graphs=40, remedy="d")))
    assert finding.code == ""
    assert ".item()" in finding.remedy


@pytest.mark.parametrize("fields", [{"num_graphs": 1, "num_steps_back": 1}, {"num_graphs": 0, "num_steps_back": 0}])
def test_the_graph_of_the_last_step_is_not_kept(fields):
    assert graph_kept(live(kept("loss", num_items=1, graph_bytes=300 * MIB, **fields))) == ()


def risen(mib_per_step, *own):
    """Return twenty steps, each of which adds the same amount of used memory."""
    used = tuple((step, (500 + mib_per_step * step) * MIB) for step in range(1, 21))
    return replace(live(*own, num_steps=20), used_bytes=used)


def effect(evidence):
    finding = finding_of_kept(evidence, evidence.seen.kept[0], "leak", title="t", remedy="r")
    return finding.effect_bytes // MIB, finding.effect_known


def test_what_alone_grows_will_save_what_memory_rose_by():
    assert effect(risen(8, kept(tensor_bytes=100 * MIB))) == (160, "measured")
    back = kept(num_items=1, num_items_before=1, graph_bytes=100 * MIB, num_graphs=1, num_steps_back=19)
    assert effect(risen(8, back)) == (160, "measured")


def test_where_others_grow_or_memory_rises_by_far_more_or_unevenly_it_is_what_was_counted():
    one = kept(tensor_bytes=50 * MIB)
    assert effect(risen(8, one)) == (50, "counted")
    assert effect(risen(5, one, kept("other", tensor_bytes=40 * MIB))) == (50, "counted")
    assert effect(risen(5, one, kept("fixed", tensor_bytes=40 * MIB, num_items_before=40))) == (100, "measured")
    assert effect(live(one)) == (50, "counted")
    evaluating = live(one, num_steps=20, is_evaluating=True)
    assert effect(replace(evaluating, used_bytes=risen(5, one).used_bytes)) == (50, "counted")
    jump = tuple((step, (500 + 100 * (step > 10)) * MIB) for step in range(1, 21))
    assert effect(replace(live(one, num_steps=20), used_bytes=jump)) == (50, "counted")
