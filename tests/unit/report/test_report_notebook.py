"""The output of a notebook cell."""

import pytest
from report_records import empty_run, eventful_run, machine

import comparison_records
import evidence_records
import plan_records
import prediction_records
from plimsoll.report.notebook import notebook_html

RECORDS = {
    "run": (eventful_run(), "Peak 768.0 MiB of a 1.0 GiB budget (75 %): the run stayed within budget."),
    "empty run": (empty_run(), "tiny: running"),
    "plan": (plan_records.fitting_plan(), "micro_batch"),
    "empty plan": (plan_records.bare_plan(), "Plan"),
    "prediction": (prediction_records.fitting(), "At the peak"),
    "diagnosis": (evidence_records.diagnosis(), "model.py:7"),
    "two runs": (comparison_records.comparison(), "Peak memory"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_cell_says_what_the_record_comes_to_and_is_light(name):
    record, words = RECORDS[name]
    shown = notebook_html(record)
    assert words in shown
    assert "<script" not in shown
    assert len(shown) < 60_000


def test_text_of_a_record_is_escaped():
    assert "<b>" not in notebook_html(eventful_run(name="<b>"))


def test_a_record_without_a_piece_of_its_own_has_none():
    assert notebook_html(machine()) is None
