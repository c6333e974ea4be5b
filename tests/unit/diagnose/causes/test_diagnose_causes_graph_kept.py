"""Graphs that are kept alive: per step 1 MiB of tensors and 100 operations of 1 KiB each."""

import pytest

from evidence_records import CHECKED_STEPS, MIB, evidence, lines, retained
from plimsoll.diagnose.causes.graph_kept import findings
from plimsoll.records.diagnosis import GRAPH_IS_GONE
from plimsoll.records.run import GraphLine

FLAT = tuple((step, 100 * MIB) for step in range(1, 31))


def test_a_list_of_outputs():
    (finding,) = findings(evidence(used_bytes=FLAT))
    assert finding.title == "`model.history` collects tensors with their graphs: graph grows by 1.1 MiB per step"
    assert (finding.place, finding.code) == ("model.py:7", "self.history.append(output.detach())")
    assert finding.effect_bytes == 30 * (MIB + 100 * 1024)
    assert (finding.effect_known, finding.effect_high_bytes) == ("counted", None)
    assert finding.peak_share == pytest.approx(30 * (MIB + 100 * 1024) / (300 * MIB))
    assert finding.evidence[0].text == (
        "after step 27, 13 of the 13 marked graphs of earlier steps are in memory, the first of step 1"
    )
    assert "in place of `self.history.append(output)`" in finding.remedy


def test_on_cuda_operations_do_not_count_on_the_device():
    (finding,) = findings(evidence(kind="cuda", used_bytes=FLAT))
    assert finding.effect_bytes == 30 * MIB


def test_a_state_that_is_carried_on():
    (finding,) = findings(evidence(used_bytes=FLAT, graphs=lines(holder="model.hidden", num_tensors=1, num_bytes=64)))
    assert finding.title == "hidden state not detached (`model.hidden`): graph grows by 100.0 KiB per step"
    assert finding.effect_known == "assumed"


def test_measured_growth_is_taken_for_operations_where_it_is_less():
    used = tuple((step, 100 * MIB + step * 96 * 1024) for step in range(1, 31))
    graphs = lines(holder="model.hidden", num_tensors=1, num_bytes=64)
    (finding,) = findings(evidence(used_bytes=used, graphs=graphs))
    assert (finding.effect_bytes, finding.effect_known) == (30 * 96 * 1024, "measured")


def test_growth_that_is_more_than_was_counted_is_the_most_there_is():
    used = tuple((step, 100 * MIB + step * 20 * MIB) for step in range(1, 31))
    (finding,) = findings(evidence(used_bytes=used))
    assert (finding.effect_bytes, finding.effect_high_bytes) == (30 * (MIB + 100 * 1024), 600 * MIB)


def test_losses_that_nobody_is_seen_to_keep():
    unknown = {"holder": "", "num_nodes": None, "graph_bytes": None, "num_bytes": 0, "code": "", "remedy": ""}
    (finding,) = findings(evidence(graphs=lines(**unknown)))
    assert finding.title == "the losses of earlier steps are kept with their graphs: graph grows by 1.0 MiB per step"
    assert finding.effect_known == "measured"
    (finding,) = findings(evidence(graphs=lines(**unknown), used_bytes=FLAT))
    assert finding.title.endswith("graph grows with every step")
    assert (finding.effect_bytes, finding.peak_share) == (None, None)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ({"num_tensors": 1}, "write `model.history = model.history.detach()` where it is assigned"),
        ({}, "add `.detach()` to the values that are put into `model.history`"),
    ],
)
def test_without_the_source_the_remedy_is_of_the_attribute(name, remedy):
    (finding,) = findings(evidence(graphs=lines(place="", code="", remedy="", **name)))
    assert (finding.remedy.endswith(remedy), finding.code) == (True, "")


def test_two_holders_are_two_findings():
    graphs = tuple(
        GraphLine(step=step, retained=(retained(step), retained(step, holder="loss.losses"))) for step in CHECKED_STEPS
    )
    assert len(findings(evidence(graphs=graphs))) == 2


@pytest.mark.parametrize(
    "graphs",
    [
        (),
        lines()[:1],  # for two earlier steps only
        lines(alive_steps=(22, 18), marked_steps=(15, 18, 22)),
        lines(alive_steps=(18, 20, 22), marked_steps=(1, 8, 18, 20, 22)),  # for the last twelve steps
        lines(alive_steps=(8, 12, 22), marked_steps=(1, 8, 10, 12, 22)),  # for some of them
        lines(alive_steps=(8, 12, 22), marked_steps=(1, 8, 12, 22), num_tensors=20),  # a window of twenty
        (*lines(), GraphLine(step=30, retained=(retained(30, holder="other", alive_steps=(1, 2)),))),  # freed again
    ],
    ids=["none", "early", "two", "short", "holes", "window", "gone"],
)
def test_what_does_not_stay_or_grow_is_no_finding(graphs):
    assert findings(evidence(graphs=graphs)) == ()


def test_a_long_list_that_was_emptied_once_is_one():
    graphs = lines(alive_steps=(6, 12, 22), marked_steps=(1, 2, 6, 12, 22))
    assert len(findings(evidence(graphs=graphs))) == 1


def test_a_run_that_failed_with_it_is_a_finding_without_an_effect():
    message = f"step 2: {GRAPH_IS_GONE}, which is already freed: `model.hidden` ..."
    (finding,) = findings(evidence(graphs=(), message=message))
    assert finding.evidence[0].text == message
    assert finding.effect_bytes is None
