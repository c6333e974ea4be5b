"""A diagnosis in JSON, also with unknown values."""

import pytest
from pydantic import ValidationError

import evidence_records
from plimsoll.records.diagnosis import Diagnosis, Fact, Finding
from plimsoll.records.plan import micro_batch_choice


@pytest.mark.parametrize(
    "diagnosis",
    [evidence_records.diagnosis(), evidence_records.unknown_diagnosis(), evidence_records.empty_diagnosis()],
)
def test_it_comes_back(diagnosis):
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis


def test_a_remedy_is_a_technique_or_a_sentence():
    for remedy in (micro_batch_choice(8), "write less"):
        finding = Finding(cause="graph_kept", title="", remedy=remedy)
        assert Finding.model_validate_json(finding.model_dump_json()).remedy == remedy


def test_evidence_says_how_it_is_known():
    with pytest.raises(ValidationError, match="known"):
        Fact(text="it must be so", known="guessed")
