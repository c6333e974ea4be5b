"""The content of a job file, before it is validated. The tests of jobs cover faults of whole files."""

import pytest

from plimsoll.errors import JobError
from plimsoll.records.job_yaml import parse_value, read_fields


def test_fields_are_as_they_are_written(tmp_path):
    (tmp_path / "job.yaml").write_text("steps: 5\noptimizer: {lr: 1e-4}\ndata: text.txt\n")
    assert read_fields(tmp_path / "job.yaml") == {"steps": 5, "optimizer": {"lr": 1e-4}, "data": "text.txt"}


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("1e-4", 1e-4), ("[a, 2]", ["a", 2]), ("'5'", "5"), ("", None)])
def test_a_value_is_read_as_in_a_file(text, value):
    assert parse_value(text) == value


def test_what_is_not_yaml_is_said():
    with pytest.raises(ValueError, match=r"'\[1' is not YAML: quote it"):
        parse_value("[1")


def test_a_folder_of_a_run_is_told_from_another(tmp_path):
    with pytest.raises(JobError, match="is a folder, not a job file"):
        read_fields(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(JobError, match="is a run directory"):
        read_fields(tmp_path)


def test_a_program_is_told_from_a_job(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(JobError, match=r"is a program, not a job: .* `plimsoll lint .*train\.py`"):
        read_fields(tmp_path / "train.py")
    with pytest.raises(JobError, match="there is no job file"):
        read_fields(tmp_path / "absent.py")
