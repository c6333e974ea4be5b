"""A job's settings of a teacher: valid values, and settings that exclude a teacher."""

import pytest

from plimsoll.errors import JobError
from plimsoll.records.job import Job

FIELDS = {"model": "lstm", "data": "a.txt"}


def test_a_folder_is_short_for_its_group_and_is_taken_from_the_jobs_folder(tmp_path):
    (tmp_path / "job.yaml").write_text("model: gru\ndata: a.txt\ndistill: run/model\n")
    distill = Job.from_yaml(tmp_path / "job.yaml").distill
    assert distill is not None
    assert distill.teacher == str(tmp_path / "run" / "model")
    assert (distill.temperature, distill.hard, distill.hidden, distill.form, distill.cache) == (2, 0.5, 0, None, None)
    assert Job.from_fields(FIELDS).distill is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, r"distill.temperature: Input should be greater than 0 \(got 0\)"),
        ({"hard": 1.5}, r"distill.hard: Input should be less than or equal to 1 \(got 1.5\)"),
        ({"hard": -0.1}, r"distill.hard: .*greater than or equal to 0"),
        ({"form": "nf4"}, r"distill.form: .*'mapped', 'int8' or 'memory' \(got 'nf4'\)"),
        ({"cache": 0}, r"distill.cache: .*\(got 0\)"),
        ({"cache": 8, "hidden": 1}, "cache 8 stores the teacher's predictions, but not the hidden states"),
    ],
)
def test_values_that_are_none_are_refused(changes, message):
    with pytest.raises(JobError, match=message):
        Job.from_fields(FIELDS | {"distill": {"teacher": "t"} | changes})


def test_a_stream_has_no_teacher_and_what_is_made_anew_is_not_kept():
    with pytest.raises(JobError, match="order: streams carries the state from window to window"):
        Job.from_fields(FIELDS | {"data": {"train": "a", "order": "streams"}, "distill": "t"})
    data = {"train": "a", "on_the_fly": True, "long_texts": "truncate"}
    assert Job.from_fields(FIELDS | {"data": data, "distill": "t"}).distill is not None
    with pytest.raises(JobError, match="data.on_the_fly changes samples each time"):
        Job.from_fields(FIELDS | {"data": data, "distill": {"teacher": "t", "cache": 8}})
    with pytest.raises(JobError, match="data.augment changes samples each time"):
        Job.from_fields(FIELDS | {"data": data | {"augment": {"delete": 0.1}}, "distill": {"teacher": "t", "cache": 8}})
