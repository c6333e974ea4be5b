"""Jobs before they run, for a GPU that is absent, and runs that ran out of memory.

The job is the same as in tests/unit/planning/test_planning_remedies.py.
"""

import shutil

import pytest
import yaml

from evidence_records import MIB, empty_run, step_line
from plimsoll.diagnose.explain import explain
from plimsoll.diagnose.of_job import diagnosis_of_job, diagnosis_of_run
from plimsoll.errors import DeviceError
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import OomEvent

FIELDS = {
    "model": {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256},
    "data": "text.txt", "tokenizer": {"vocab_size": 8000}, "sequence_length": 64, "batch_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    (path / "job.yaml").write_text(yaml.safe_dump(FIELDS), encoding="utf-8")
    (path / "text.txt").write_text("too much to train its tokenizer for a look " * 30_000, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def too_large(folder):
    return explain(folder / "job.yaml", device="rtx3060", budget="330MiB")


def ended(**changes):
    """Return a run of the whole batch that ended in its second step."""
    event = OomEvent(step=2, phase="backward", family="cuda", micro_batch=16, fallback=0, survived=False)
    fields = {
        "status": "failed", "message": "memory ran out in the backward phase", "oom_events": (event,),
        "plan": micro_batch_plan(Budget(), (16,)),
    }  # fmt: skip
    return empty_run(**fields | changes)


def test_a_job_that_does_not_fit(too_large):
    """Logits of 16 x 64 positions and 8000 words take 31 MiB, several times."""
    assert too_large.has_answer
    assert (too_large.subject, too_large.num_steps, too_large.limit_bytes) == ("job.yaml", 0, 330 * MIB)
    assert too_large.peak_bytes > 330 * MIB
    assert sum(share.num_bytes for share in too_large.shares) == too_large.peak_bytes
    assert {share.known for share in too_large.shares} == {"predicted"}
    causes = [finding.cause for finding in too_large.findings]
    assert "logits" in causes
    assert causes[-1] == "true_capacity"
    assert too_large.remedies[0].fits


def test_a_finding_has_the_technique_that_was_tried_for_it(too_large):
    (logits,) = [finding for finding in too_large.findings if finding.cause == "logits"]
    (tried,) = [one for one in too_large.remedies if logits.remedy in one.choices and len(one.choices) == 1]
    assert logits.effect_bytes <= tried.saving_bytes
    assert logits.effect_known == "predicted"


def test_a_job_that_fits_has_shares_and_no_findings():
    job = Job.from_fields(FIELDS)
    diagnosis = diagnosis_of_job(job, "job", device="rtx3060", limit_bytes=1000 * MIB)
    assert (diagnosis.findings, diagnosis.remedies, diagnosis.has_answer) == ((), (), False)
    assert diagnosis.shares
    assert diagnosis.notes[0].startswith("It fits as it is")


def test_a_run_with_memory_for_what_was_predicted_is_not_explained_by_it(folder):
    """The note reports growth, and the parts of the peak are not causes."""
    diagnosis = diagnosis_of_run(ended(), folder, device="rtx3060", limit_bytes=2000 * MIB)
    assert [finding.cause for finding in diagnosis.findings] == []
    assert "should need" in diagnosis.notes[0]
    assert "something that grew" in diagnosis.notes[0]


def test_a_run_that_ended_well_is_asked_what_it_would_need_in_less(folder):
    run = empty_run(steps=(step_line(1, micro_batch=8, used_bytes=MIB),), plan=micro_batch_plan(Budget(), (16, 8)))
    diagnosis = diagnosis_of_run(run, folder, device="rtx3060", limit_bytes=1000 * MIB)
    assert diagnosis.notes[0].startswith("It fits as it is")
    assert diagnosis.shares


def test_what_was_asked_for_and_cannot_be_is_refused(folder):
    with pytest.raises(DeviceError):
        diagnosis_of_run(ended(), folder, device="rtx9999")


def test_a_run_whose_job_cannot_be_predicted_any_more_says_so(tmp_path):
    (tmp_path / "job.yaml").write_text("model: lstm\ndata: a.txt\ntokenizer: gone\n", encoding="utf-8")
    diagnosis = diagnosis_of_run(ended(), tmp_path)
    assert diagnosis.notes[0].startswith("Remedies could not be predicted: ")


def test_a_run_that_was_refused_before_it_began_is_explained_by_its_job(folder, tmp_path):
    shutil.copy(folder / "job.yaml", tmp_path)
    micro_batch_plan(Budget(), (16,)).save(tmp_path / "plan.json")
    diagnosis = explain(tmp_path, device="rtx3060", budget="1000MiB")
    assert diagnosis.subject == "job.yaml"
