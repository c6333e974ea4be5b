"""Which steps of a run are one process."""

import torch
from torch import nn

from evidence_records import empty_run, step_line
from plimsoll.diagnose.evidence import evidence_of_run, evidence_of_step
from plimsoll.records.run import GraphLine, RunRecord, StartLine
from plimsoll.run.step import TrainStep


def start(step):
    return StartLine(time_seconds=0.0, step=step, micro_batch=4, baseline_bytes=0, wall_time="")


def run(**changes) -> RunRecord:
    steps = tuple(step_line(step, used_bytes=1000 + step, peak_bytes=2000 + step) for step in range(1, 11))
    graphs = tuple(GraphLine(step=step, held=()) for step in (2, 5, 9))
    return empty_run(**{"steps": steps, "graphs": graphs, "starts": (start(0), start(4)), **changes})


def test_the_process_with_the_most_steps_is_taken():
    evidence = evidence_of_run(run())
    assert (evidence.first_step, evidence.last_step, evidence.num_steps) == (4, 10, 6)
    assert evidence.used_bytes == tuple((step, 1000 + step) for step in range(5, 11))
    assert [line.step for line in evidence.graphs] == [5, 9]
    assert evidence.peak_bytes == 2010


def test_a_run_without_steps_is_empty():
    evidence = evidence_of_run(run(steps=(), starts=()))
    assert (evidence.num_steps, evidence.used_bytes, evidence.growth, evidence.peak_bytes) == (0, (), None, None)


def test_steps_of_earlier_versions_have_no_memory_after_them():
    assert evidence_of_run(run(steps=(step_line(1),))).used_bytes == ()


def test_only_a_failure_is_a_message():
    assert evidence_of_run(run(status="failed", message="why")).message == "why"
    assert evidence_of_run(run(status="interrupted", message="why")).message == ""


def test_a_step_of_a_loop_of_ones_own():
    model = nn.Linear(1, 1)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch).mean(), units="samples"
    )
    assert evidence_of_step(step).num_steps == 0
    for _ in range(4):
        step(torch.ones(2, 1))
    evidence = evidence_of_step(step)
    assert (evidence.subject, evidence.kind, evidence.num_steps) == ("Linear", "cpu", 4)
    assert [looked for looked, _ in evidence.used_bytes] == [1, 2, 3, 4]
    assert evidence.peak_bytes == max(used for _, used in evidence.used_bytes)
