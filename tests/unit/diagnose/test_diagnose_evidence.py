"""The evidence of a run: the steps of one process, and tensors that are kept alive and grow."""

import pytest
import torch
from torch import nn

from evidence_records import empty_run, step_line
from plimsoll.diagnose.evidence import Kept, ended_in_oom, evidence_of_run, evidence_of_step, place_of, shares_of
from plimsoll.records.run import DeathLine, GraphLine, OomEvent, RunRecord, StartLine
from plimsoll.step.train_step import TrainStep
from prediction_records import MIB, fitting, holding


def start(step):
    return StartLine(time_seconds=0.0, step=step, micro_batch=4, baseline_bytes=0, wall_time="")


def run(**changes) -> RunRecord:
    steps = tuple(step_line(step, used_bytes=1000 + step, peak_bytes=2000 + step) for step in range(1, 11))
    graphs = tuple(GraphLine(step=step, retained=()) for step in (2, 5, 9))
    return empty_run(**{"steps": steps, "graphs": graphs, "starts": (start(0), start(4)), **changes})


def test_the_process_with_the_most_steps_is_taken():
    evidence = evidence_of_run(run())
    assert (evidence.first_step, evidence.last_step, evidence.num_steps) == (4, 10, 6)
    assert evidence.last_step_of_run == 10
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


def oom(**changes):
    fields = {"step": 3, "phase": "backward", "family": "cuda", "requested_bytes": 64, "survived": False}
    return OomEvent(**fields | changes)


def death(evidence, restarted_from_step=None):
    return DeathLine(time_seconds=1.0, signal="SIGKILL", evidence=evidence, restarted_from_step=restarted_from_step)


KERNEL = "the memory cgroup counts 1 OOM kill(s) more than before: the kernel's OOM killer"


@pytest.mark.parametrize(
    ("changes", "has_run_out"),
    [
        ({"status": "failed", "oom_events": (oom(),)}, True),
        ({"status": "failed", "oom_events": (oom(survived=True),)}, False),
        ({"status": "failed", "message": "memory ran out in the copy phase"}, True),
        ({"status": "failed", "message": "the loss is nan"}, False),
        ({"status": "finished", "oom_events": (oom(survived=True),)}, False),
        ({"status": "running", "deaths": (death(KERNEL),)}, True),
        ({"status": "running", "deaths": (death(KERNEL, restarted_from_step=2),)}, False),
        ({"status": "running", "deaths": (death("no lack of memory does that"),)}, False),
        ({"status": "running"}, False),
    ],
)
def test_what_ended_because_memory_ran_out(changes, has_run_out):
    assert ended_in_oom(run(**changes)) == has_run_out
    assert evidence_of_run(run(**changes)).has_run_out == has_run_out


def test_the_last_error_of_a_run_that_survived_is_no_evidence():
    assert evidence_of_run(run(status="failed", oom_events=(oom(),))).requested_bytes == 64
    assert evidence_of_run(run(oom_events=(oom(survived=True),))).requested_bytes is None


def test_what_a_plan_predicted_is_what_the_peak_is_made_of():
    """The prediction is 1000 MiB, half of it activations. The peak of a successful run is the measured one."""
    plan = run().plan.model_copy(update={"prediction": fitting()})
    seen = evidence_of_run(run(plan=plan))
    assert (seen.shares[0].category, seen.shares[0].num_bytes) == ("activations", 500 * MIB)
    assert sum(share.num_bytes for share in seen.shares) == 1000 * MIB
    assert (seen.peak_bytes, seen.has_run_out) == (2010, False)
    ended = evidence_of_run(run(plan=plan, status="failed", oom_events=(oom(),)))
    assert not ended.has_run_out  # memory was sufficient: parts of the peak do not explain the end


def test_where_most_of_a_category_was_made():
    largest = (holding(5, "activations", "a", module="h.*.mlp"), holding(4, "activations", "b", module="late"))
    shares = {one.category: one for one in shares_of(fitting(largest=largest))}
    assert shares["activations"].place == "h.*.mlp, modeling_gpt2.py:97"
    assert shares["parameters"].place == ""
    assert place_of(holding(1, "activations", "a", module="", line="")) == ""


@pytest.mark.parametrize(
    ("num_items", "before", "has_grown"),
    [(3, None, True), (2, None, False), (40, 0, True), (12, 8, False), (13, 8, True), (8, 8, False)],
)
def test_growth_is_three_items_and_half_as_many_again(num_items, before, has_grown):
    assert Kept(name="x", kind="list", num_items=num_items, num_items_before=before).has_grown is has_grown


def test_all_bytes():
    assert Kept(name="x", kind="list", tensor_bytes=1, graph_bytes=2, host_bytes=4).num_bytes == 7
