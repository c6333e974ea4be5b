"""`plimsoll report`: one run in three forms, and nothing overwritten that was not to be."""

from __future__ import annotations

from plimsoll.records.run import EndLine, RunRecord
from plimsoll.run.directory import RunDirectory


def test_the_json_is_one_run_record_and_nothing_else(call, finished):
    code, out, err = call("report", finished.path, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert RunRecord.from_json(out) == RunRecord.from_directory(finished.path)


def test_the_text_tells_what_happened(call, finished):
    code, out, err = call("report", finished.path)
    assert (code, err) == (0, "")
    assert "2.0 GiB" in out  # the budget
    assert "finished" in out
    assert "backward" in out  # where memory ran out


def test_a_run_that_is_still_going_is_shown(call, run_copy):
    metrics = RunDirectory(run_copy).metrics
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]) + lines[-1][:10])  # the end is being written at this moment
    assert not isinstance(RunDirectory(run_copy).lines()[-1], EndLine)
    assert '"status": "running"' in call("report", run_copy, "--json").out


def test_the_page_is_written_once_and_overwritten_only_by_force(call, refused, finished, tmp_path):
    page = tmp_path / "page.html"
    assert call("report", finished.path, "-o", page) == (0, f"{page}\n", "")
    assert page.read_text().startswith("<!")
    page.write_text("mine")
    assert f"{page} exists already and is not overwritten" in refused("report", finished.path, "-o", page)
    assert page.read_text() == "mine"
    assert call("report", finished.path, "--output", page, "--force").code == 0
    assert page.read_text() != "mine"


def test_a_page_and_json_are_both_made(call, finished, tmp_path):
    code, out, err = call("report", finished.path, "-o", tmp_path / "page.html", "--json")
    assert (code, err) == (0, "")
    assert RunRecord.from_json(out) == RunRecord.from_directory(finished.path)
    assert (tmp_path / "page.html").is_file()


def test_a_page_in_a_folder_that_is_not_there_is_refused(refused, finished, tmp_path):
    page = tmp_path / "none" / "page.html"
    assert f"cannot write {page}: No such file or directory" in refused("report", finished.path, "-o", page)


def test_what_is_not_a_run_directory_is_refused(refused, tmp_path):
    assert f"{tmp_path} is not a run directory" in refused("report", tmp_path)
    assert f"{tmp_path}/none is not a run directory" in refused("report", tmp_path / "none", "--json")
