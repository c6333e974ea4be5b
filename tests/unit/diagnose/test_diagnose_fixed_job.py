"""The remedy that is applied, and the job file that contains it."""

from pathlib import Path

import pytest

from peak_evidence import tried
from plimsoll.diagnose.fixed_job import FixedJob, chosen_remedy
from plimsoll.errors import InputError
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.job import Job


def test_the_first_remedy_that_leaves_the_training_is_taken():
    diagnosis = Diagnosis(
        subject="a", remedies=(changing := tried("lora", settings={"allow": ["lora"]}), tried("heap"))
    )
    assert chosen_remedy(diagnosis, None) == tried("heap")
    assert chosen_remedy(diagnosis, 1) == changing
    with pytest.raises(InputError, match="--remedy is 3, but 2 were found"):
        chosen_remedy(diagnosis, 3)
    with pytest.raises(InputError, match="as lora=1 does: choose it with --remedy 1"):
        chosen_remedy(Diagnosis(subject="a", remedies=(changing,)), None)
    with pytest.raises(InputError, match="no remedy was found for a, so no job was written"):
        chosen_remedy(Diagnosis(subject="a"), None)
    with pytest.raises(InputError, match="none of the 1 remedies found fits"):
        chosen_remedy(Diagnosis(subject="a", remedies=(tried("heap", fits=False),)), None)


def test_the_job_is_written_beside_and_said(tmp_path: Path):
    (tmp_path / "job.yaml").write_text("model: lstm  # small\ndata: a.txt\n")
    fixed = FixedJob.beside(tmp_path / "job.yaml", None, force=False)
    remedy = tried("heap", settings={"pin": ["heap=never"]})
    said = fixed.write(Diagnosis(subject="a", remedies=(remedy,)), None)
    assert said.startswith(f"{tmp_path / 'job-fixed.yaml'}: the job for heap=1; train it with `plimsoll train ")
    assert "model: lstm  # small\n" in fixed.path.read_text()
    assert Job.from_yaml(fixed.path).pin == ("heap=never",)
