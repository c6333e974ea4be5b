"""The single entry point to reports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from report_records import cpu, empty_run, eventful_run, machine, plan

import cache_records
import comparison_records
import corpus_records
import evidence_records
import watch_records
from plimsoll.errors import InputError, RecordError
from plimsoll.records.job import Job
from plimsoll.records.run import RunRecord
from plimsoll.report.render import load, render
from prediction_records import fitting

RECORDS = {
    "run": eventful_run(),
    "empty run": empty_run(),
    "two runs": comparison_records.comparison(),
    "machine": machine(),
    "device": cpu(),
    "plan": plan(),
    "prediction": fitting(),
    "corpus": corpus_records.corpus_facts(),
    "tokens": corpus_records.token_facts(),
    "inspection": corpus_records.inspection(),
    "feed rates": corpus_records.feed_rates(),
    "diagnosis": evidence_records.diagnosis(),
    "watch": watch_records.killed(),
    "cache": cache_records.cache_contents(),
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_has_all_three_formats(name):
    record = RECORDS[name]
    assert render(record).endswith("\n")
    assert type(record).from_json(render(record, "json")) == record
    assert render(record, "html").startswith("<!doctype html>")


@pytest.mark.parametrize("name", RECORDS)
def test_a_saved_record_of_any_kind_is_read_back(name, tmp_path):
    RECORDS[name].save(tmp_path / "record.json")
    assert load(tmp_path / "record.json") == RECORDS[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot read"),
        (b"\xff", "cannot read"),
        (b"[]", "holds a record of kind None, which has no report: give one of these: run, run-comparison, machine"),
        (b'{"record": "job"}', "holds a record of kind 'job', which has no report"),
        (b'{"record": "plan", "schema": 99}', "has schema version 99 of record 'plan'"),
    ],
)
def test_a_file_that_holds_no_such_record_is_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RecordError, match=message):
        load(tmp_path / "a.json")


def test_a_run_directory_and_its_record_give_the_same_report():
    record = eventful_run()
    assert render(RunRecord.from_json(record.to_json()), "html") == render(record, "html")


def test_a_record_without_a_report_is_refused_by_name():
    job = Job.from_fields({"model": "lstm", "data": {"train": "a.txt"}})
    with pytest.raises(
        RecordError,
        match=r"there is no report for a Job: give one of these records: run, run-comparison, machine, device, plan",
    ):
        render(job)


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"cannot render a report as 'pdf': give one of text, json, html"):
        render(plan(), "pdf")  # type: ignore[arg-type]


def test_reports_need_no_torch():
    code = "import sys, plimsoll.report.render; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
