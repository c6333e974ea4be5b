"""Padding that is half of 990 MiB of activations."""

import pytest

from peak_evidence import MIB, evidence, tried
from plimsoll.diagnose.causes.padding import findings


def test_its_share_of_what_grows_with_the_batch_is_assumed():
    (finding,) = findings(evidence(padding_share=0.5))
    assert finding.title == "50% of the tokens of a batch are padding"
    assert (finding.effect_bytes, finding.effect_known) == (495 * MIB, "assumed")
    assert "data.order: by_length" in finding.remedy


def test_what_was_tried_is_predicted():
    (finding,) = findings(evidence(padding_share=0.5, remedies=(tried("by_length", 400),)))
    assert (str(finding.remedy), finding.effect_bytes, finding.effect_known) == ("by_length=1", 400 * MIB, "predicted")


@pytest.mark.parametrize("changes", [{"padding_share": 0.19}, {"padding_share": None}, {"has_run_out": False}])
def test_what_is_none(changes):
    assert findings(evidence(**{"padding_share": 0.5} | changes)) == ()


def test_without_shares_the_effect_is_unknown():
    (finding,) = findings(evidence(padding_share=0.5, shares=()))
    assert (finding.effect_bytes, finding.effect_known) == (None, None)
