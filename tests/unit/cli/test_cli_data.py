"""What `plimsoll data` takes: a job file or texts, and where it keeps what it makes."""

from pathlib import Path

import pytest

from plimsoll.cli import data
from plimsoll.errors import JobError


def test_a_job_file_is_read_and_texts_make_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("model: lstm\ndata: {train: a.txt}\n")
    of_file = data.job_of(["job.yaml"], ["data.unit=line"])
    assert (of_file.model, of_file.data.unit, of_file.data.sources) == ("lstm", "line", (str(tmp_path / "a.txt"),))
    of_texts = data.job_of(["a.txt", "b", "hf:name"], ["data.unit=line", "sequence_length=64"])
    assert of_texts.data.sources == (str(tmp_path / "a.txt"), str(tmp_path / "b"), "hf:name")
    assert (of_texts.data.unit, of_texts.sequence_length) == ("line", 64)


def test_a_fault_in_a_change_is_told_where_it_is():
    with pytest.raises(JobError, match=r"job cannot be used:\n  data.unit: .*this is from --set 'data.unit=word'"):
        data.job_of(["a.txt"], ["data.unit=word"])


def test_the_cache_is_the_one_given_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path))
    assert data._cache(None) == tmp_path / "data"
    assert data._cache(Path("here")) == Path("here")
