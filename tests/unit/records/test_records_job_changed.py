"""The text of a changed job, written in the folder of its original and elsewhere."""

import pytest

from plimsoll.errors import JobError
from plimsoll.records.job import Job
from plimsoll.records.job_edit import changed_job
from plimsoll.records.job_yaml import read_fields

TEXT = "model: lstm   # small\ndata: {train: a.txt}   # of mine\nbudget: 1GiB\n"
SETTINGS = {"budget.device": "2GiB", "pin": ["optimizer_offload=disk"]}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def assert_changed(path, source):
    job = Job.from_yaml(path)
    assert (job.budget.device_bytes, job.pin) == (2 << 30, ("optimizer_offload=disk",))
    assert job.data == Job.from_yaml(source).data


def test_beside_its_source_comments_stay(source):
    target = source.with_name("job-fixed.yaml")
    text = changed_job(source, target, SETTINGS)
    assert text == f"{TEXT.replace('1GiB', '{device: 2GiB}')}pin: [optimizer_offload=disk]\n"
    target.write_text(text, encoding="utf-8")
    assert_changed(target, source)


def test_in_another_folder_paths_mean_the_same(source, tmp_path):
    target = tmp_path / "elsewhere" / "job.yaml"
    target.parent.mkdir()
    target.write_text(changed_job(source, target, SETTINGS), encoding="utf-8")
    assert_changed(target, source)


def test_a_job_on_one_line_is_written_out(source):
    source.write_text("{model: lstm, data: {train: a.txt}}\n", encoding="utf-8")
    target = source.with_name("b.yaml")
    target.write_text(changed_job(source, target, SETTINGS), encoding="utf-8")
    assert_changed(target, source)


def test_what_is_no_job_is_refused(source):
    source.write_text("model: lstm\n", encoding="utf-8")
    with pytest.raises(JobError, match="data: missing"):
        changed_job(source, source, SETTINGS)


def test_a_file_read_once_gives_the_job_before_a_change_and_after_it(source):
    fields = read_fields(source)
    after = Job.from_written(fields, source, ("data.unit=line",), 3 << 30)
    assert (after.data.unit, after.budget.device_bytes) == ("line", 3 << 30)
    assert Job.from_written(fields, source) == Job.from_yaml(source)
