"""Evaluations that keep graphs or outputs."""

import pytest

from live_evidence import MIB, kept, live
from plimsoll.diagnose.causes.evaluation_keeps_graphs import findings


def test_losses_with_their_graphs():
    (finding,) = findings(live(kept("losses", graph_bytes=300 * MIB, num_graphs=40), is_evaluating=True))
    assert finding.title == "evaluation without no_grad: `losses` collects tensors with their graphs"
    assert (finding.place, finding.effect_bytes) == ("train.py:9", 300 * MIB)


def test_outputs_without_graphs():
    (finding,) = findings(live(kept("outputs", tensor_bytes=300 * MIB), is_evaluating=True))
    assert finding.title == "evaluation collects outputs in `outputs`"


def test_activations_that_nobody_keeps():
    evidence = live(activations_mib=300, is_evaluating=True, records_graph=True, evaluation_place="train.py:20")
    (finding,) = findings(evidence)
    assert (finding.place, finding.effect_bytes, finding.peak_share) == ("train.py:20", 300 * MIB, 0.25)


@pytest.mark.parametrize(
    "evidence",
    [
        live(kept("losses", graph_bytes=300 * MIB, num_graphs=40)),  # during a training
        live(activations_mib=300, records_graph=True),
        live(activations_mib=50, is_evaluating=True, records_graph=True),
        live(kept("cache", tensor_bytes=300 * MIB, num_items_before=40), is_evaluating=True),
    ],
)
def test_what_is_none(evidence):
    assert findings(evidence) == ()
