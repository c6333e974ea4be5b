"""Enforced limits: the memory of a training process, read from outside, stays under its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from end_to_end.commands import (
    SMALL_JOB,
    PeakWatch,
    assert_each_sample_once,
    finish,
    start,
    steps_of,
    wait_for_worker,
    write_job,
)
from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord

pytestmark = pytest.mark.cold  # the limit covers the whole training process

BUDGET_BYTES = 360 << 20


@pytest.fixture
def large_job(tmp_path: Path) -> Path:
    """Write a job whose whole batch needs some 250 MiB more than the 240 MiB of the process itself."""
    model = {"architecture": "lstm", "embedding_size": 64, "hidden_size": 64}
    fields: dict[str, Any] = {"batch_size": 128, "sequence_length": 64, "tokenizer": {"vocab_size": 2000}}
    fields["data"] = SMALL_JOB["data"] | {"validation": 0}  # one batch of 128 is nearly all samples
    return write_job(tmp_path / "job.yaml", model=model, **fields)


def trained_inside(job: Path, run: Path, cache: Path, *arguments: object) -> RunRecord:
    """Train inside the budget, and check from outside that it holds."""
    process = start("train", job, "--out", run, "--cache", cache, "--budget", BUDGET_BYTES, "--json", *arguments)
    with PeakWatch(wait_for_worker(process).pid).watching() as watch:
        done = finish(process)
    assert done.returncode == 0, done.stderr
    record = RunRecord.from_directory(run)
    print(f"{watch.peak_bytes >> 20} of {BUDGET_BYTES >> 20} MiB in {watch.num_readings} readings; {record.oom_events}")
    assert watch.num_readings > 100
    assert watch.peak_bytes <= BUDGET_BYTES
    assert record.peak_bytes is not None
    assert abs(record.peak_bytes - watch.peak_bytes) < 32 << 20
    assert_each_sample_once(steps_of(run), 5)
    return record


@pytest.mark.long
def test_private_memory_stays_under_a_tight_budget_without_a_plan(large_job, cache, tmp_path):
    record = trained_inside(large_job, tmp_path / "run", cache, "--no-plan")
    assert record.oom_events
    assert record.steps[-1].micro_batch < 128


@pytest.mark.slow
def test_with_a_plan_memory_does_not_run_out_at_all(large_job, cache, tmp_path):
    record = trained_inside(large_job, tmp_path / "run", cache)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert not record.oom_events
    assert {step.fallback for step in record.steps} == {0}
    whole = [step for step in record.steps if step.num_samples == 128]
    assert {step.micro_batch for step in whole} == {plan.fallbacks[0].micro_batch}
    assert plan.limit_bytes == BUDGET_BYTES - (16 << 20)
    assert plan.fallbacks[0].peak is not None
    assert record.peak_bytes <= plan.fallbacks[0].peak.high_bytes <= plan.limit_bytes
    assert plan.plain is not None
    assert plan.plain.peak is not None
    assert plan.plain.peak.likely_bytes > BUDGET_BYTES
