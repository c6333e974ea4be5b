"""A run that ran out of memory, its explanation, and the job that `--apply` writes, which fits into the same budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from end_to_end.commands import assert_each_sample_once, plimsoll, steps_of, trained, write_job
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.job import Job
from plimsoll.records.run import RunRecord

BUDGET = "335MiB"
WIDE = {"architecture": "lstm", "embedding_size": 512, "hidden_size": 512, "num_layers": 2}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ended run of a wide LSTM: 17.6 MiB of parameters, as many gradients, and states that do not fit."""
    folder = tmp_path_factory.mktemp("ended")
    job = write_job(folder / "job.yaml", model=WIDE, data={"train": str(Path(__file__))}, batch_size=2, steps=2)
    done = plimsoll("train", job, "--budget", BUDGET, "--no-plan", "--out", folder / "run")
    assert done.returncode == 3, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_a_run_that_ran_out_of_memory_finishes_with_the_remedy_that_is_written(ended, tmp_path):
    fixed = tmp_path / "fixed.yaml"
    done = plimsoll("explain", ended, "--json", "--apply", "-o", fixed)
    assert done.returncode == 1, done.stderr
    diagnosis = Diagnosis.from_json(done.stdout)
    (states,) = [finding for finding in diagnosis.findings if finding.cause == "optimizer_states"]
    assert str(states.remedy) == "optimizer_offload=disk"
    first = diagnosis.remedies[0]
    assert first.fits
    assert not first.changes_training
    assert Job.from_yaml(fixed) == Job.from_yaml(ended / "job.yaml")  # with its budget, for which a plan exists
    trained(fixed, "--out", tmp_path / "run")
    record = RunRecord.from_directory(tmp_path / "run")
    assert record.status == "finished"
    assert record.peak_bytes <= record.limit_bytes
    assert {choice.technique for choice in first.choices} <= {choice.technique for choice in record.plan.choices}
    assert_each_sample_once(steps_of(tmp_path / "run"), 2)


@pytest.mark.slow
def test_a_remedy_by_itself_is_pinned(ended, tmp_path):
    shown = plimsoll("explain", ended, "--json")
    remedies = Diagnosis.from_json(shown.stdout).remedies
    number = next(n for n, one in enumerate(remedies, 1) if list(map(str, one.choices)) == ["optimizer_offload=disk"])
    fixed = tmp_path / "fixed.yaml"
    plimsoll("explain", ended, "--apply", "--remedy", number, "-o", fixed)
    assert Job.from_yaml(fixed).pin == ("optimizer_offload=disk",)
    trained(fixed, "--out", tmp_path / "run")
    assert "optimizer_offload=disk" in map(str, RunRecord.from_directory(tmp_path / "run").plan.choices)
