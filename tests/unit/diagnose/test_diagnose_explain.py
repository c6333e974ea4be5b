"""The diagnosis of a run."""

import pytest

import plimsoll
from evidence_records import MIB, empty_run, lines, step_line
from plimsoll.diagnose.explain import explain
from plimsoll.errors import RecordError
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.run import OomEvent


def run(mib_per_step, **changes):
    steps = tuple(step_line(step, used_bytes=(100 + mib_per_step * step) * MIB) for step in range(1, 31))
    return empty_run(steps=steps, **changes)


def test_findings_and_growth():
    diagnosis = explain(run(2, graphs=lines()))
    assert isinstance(diagnosis, Diagnosis)
    assert (diagnosis.subject, diagnosis.num_steps) == ("tiny", 30)
    assert diagnosis.growth.likely_bytes == 2 * MIB
    assert [finding.cause for finding in diagnosis.findings] == ["graph_kept"]
    assert diagnosis.notes == ()


def test_growth_without_a_cause_is_a_note():
    diagnosis = explain(run(2))
    assert diagnosis.findings == ()
    assert diagnosis.notes == (
        "No retained graph explains the growth of 2.0 MiB per step: look for objects that your own code keeps from "
        "step to step (lists, caches, arrays). If the growth ends after some hundred steps, it is the heap, which "
        "batches of changing lengths fill slowly.",
    )


def test_a_flat_run_has_nothing_to_say():
    diagnosis = explain(run(0))
    assert (diagnosis.findings, diagnosis.notes, diagnosis.growth.is_steady) == ((), (), False)


def test_memory_that_ran_out_and_was_survived_is_told():
    events = tuple(
        OomEvent(step=step, phase=phase, family="cpu-allocator", survived=True)
        for step, phase in ((3, "backward"), (5, "evaluation"), (9, "backward"))
    )
    assert explain(run(0, oom_events=events)).notes == (
        "Memory ran out 3 times (backward, evaluation) and the run continued: `plimsoll report` of its directory shows "
        "how.",
    )
    (note,) = explain(run(0, oom_events=events[:1])).notes
    assert note.startswith("Memory ran out once (backward)")


def test_too_few_steps_are_said_to_be_too_few():
    (note,) = explain(empty_run(steps=(step_line(1, used_bytes=MIB),))).notes
    assert note.startswith("Whether memory grows cannot be judged from 1 measurement: 11 are needed")


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match="is not a run directory"):
        plimsoll.explain(str(tmp_path))
