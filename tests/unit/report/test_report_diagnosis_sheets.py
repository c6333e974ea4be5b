"""The text of a diagnosis."""

import pytest

import evidence_records
from peak_evidence import MIB, shares, tried
from plimsoll.records.diagnosis import Remedy
from plimsoll.records.plan import micro_batch_choice
from plimsoll.report.as_html import diagnosis_page
from plimsoll.report.diagnosis_sheets import (
    finding_sheets,
    growth_sentence,
    headline,
    remedies_sheet,
    shares_sheet,
    sheets_of,
)


def test_the_headline_counts():
    (finding,) = evidence_records.diagnosis().findings
    assert headline(evidence_records.diagnosis()) == "One cause was found in 30 steps, peak 300.0 MiB."
    assert headline(evidence_records.diagnosis(findings=(finding, finding))).startswith("2 causes were found")
    assert headline(evidence_records.unknown_diagnosis()) == "One cause was found in 1 step."
    assert headline(evidence_records.empty_diagnosis()).startswith("Nothing was found")


def test_growth_is_said_where_it_is_steady():
    assert growth_sentence(evidence_records.diagnosis()) == (
        "Memory in use after a step grows by 2.0 MiB per step from step 7 to 30."
    )
    assert "does not grow steadily (1.0 KiB per step" in growth_sentence(evidence_records.empty_diagnosis())
    assert growth_sentence(evidence_records.unknown_diagnosis()) == ""


@pytest.mark.parametrize(
    ("changes", "saves"),
    [
        ({}, "30.0 MiB (counted); at most 60.0 MiB (measured)"),
        ({"effect_high_bytes": None, "peak_share": None}, "30.0 MiB (counted)"),
        ({"effect_bytes": None}, "unknown"),
    ],
)
def test_what_it_saves(changes, saves):
    (finding,) = evidence_records.diagnosis().findings
    rows = dict(finding_sheets(finding.model_copy(update=changes))[0].rows)
    assert (rows["Saves"], rows["Location"]) == (saves, "model.py:7")
    assert rows.get("Share") == (None if "peak_share" in changes else "10.0% of the peak")


def test_a_technique_as_a_remedy_is_written_as_it_is_pinned():
    (finding,) = evidence_records.diagnosis().findings
    choice = finding.model_copy(update={"remedy": micro_batch_choice(8)})
    assert dict(finding_sheets(choice)[0].rows)["Remedy"] == "micro_batch=8"


def test_the_page_has_the_findings_and_no_markup_of_the_user():
    page = diagnosis_page(evidence_records.unknown_diagnosis())
    assert "hidden state not detached" in page
    assert "<h1>Memory diagnosis: tiny</h1>" in page
    assert "Too few steps." in page


def test_remedies_are_numbered_and_say_what_they_cost():
    both = tried("lora", 300, fits=False, settings={"allow": ["lora"]})
    bound = Remedy(text="stop them", code="nvidia-smi", saving_high_bytes=2 * MIB, known="bound")
    rows = remedies_sheet((tried("heap"), both, bound, Remedy(text="less", known="assumed"))).rows
    assert rows == (
        ("1. heap=1", "500.0 MiB", "x 1.25", "yes", "less"),
        ("2. lora=1", "300.0 MiB", "x 1.25", "no", "less (changes the training or its precision)"),
        ("3. nvidia-smi", "at most 2.0 MiB", "unknown", "unknown", "stop them"),
        ("4. by hand", "unknown", "unknown", "unknown", "less"),
    )


def test_shares_add_up_to_the_peak():
    assert shares_sheet(shares(baseline=200, activations=300)).rows == (
        ("activations", "300.0 MiB", "60 %", "predicted", "net, net.py:7"),
        ("baseline", "200.0 MiB", "40 %", "predicted", "net, net.py:7"),
    )


def test_what_did_not_run_is_said_to_fit_or_not():
    fields = {"num_steps": 0, "shares": shares(activations=300), "limit_bytes": 200 * MIB}
    needs = evidence_records.diagnosis(**fields)
    assert headline(needs) == "It does not fit: the peak is 300.0 MiB, the limit is 200.0 MiB."
    may = needs.model_copy(update={"limit_bytes": 300 * MIB, "remedies": (tried("heap"),)})
    assert headline(may).startswith("It may not fit: ")
    assert headline(may.model_copy(update={"findings": (), "remedies": ()})).startswith("It fits: ")
    titles = [sheet.title for sheet in sheets_of(may)]
    assert titles[:2] == ["Remedies", "Parts of the peak"]
    page = diagnosis_page(may)
    assert "Parts of the peak" in page
    assert "1. heap=1" in page
