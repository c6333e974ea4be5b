"""One finished run, from which the tests take the records they need."""

from pathlib import Path

import pytest

from plimsoll.records.device import Budget, Device, Limit, Machine, MemoryUse
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan, micro_batch_plan
from plimsoll.records.run import (
    CheckpointLine,
    DeathLine,
    EndLine,
    EvaluationLine,
    Line,
    OomEvent,
    RunHead,
    RunRecord,
    StartLine,
    StepLine,
)


@pytest.fixture
def device() -> Device:
    return Device(
        name="a laptop",
        kind="cpu",
        capacity_bytes=8_000,
        free_bytes=6_000,
        hardware_bytes=16_000,
        limits=(Limit(source="RLIMIT_DATA", bytes=8_000),),
        use=MemoryUse(used_bytes=1_000, peak_bytes=1_500, reserved_bytes=2_000),
        num_cores=2,
        notes=("no ‘swap’",),
    )


@pytest.fixture
def machine(device: Device) -> Machine:
    return Machine(devices=(device,), versions={"torch": "2.13.0"})


@pytest.fixture
def plan() -> Plan:
    return micro_batch_plan(Budget(device_bytes=4_000), (64, 16, 4))


@pytest.fixture
def job() -> Job:
    return Job.from_fields({"model": {"architecture": "gpt2", "n_layer": 2}, "data": ["a.txt", "b.txt"]})


@pytest.fixture
def head(job: Job, device: Device) -> RunHead:
    return RunHead(job=job.model_dump(mode="json"), device=device, versions={"torch": "2.13.0"}, fingerprint={})


@pytest.fixture
def lines() -> tuple[Line, ...]:
    """Return the lines of a run of three steps: 10, 20 and 20 units in 4, 2 and 3 seconds.

    Step 2 had an OOM, and the run survived the death of a process.
    """

    def step(number: int, num_units: int, seconds: float, memory: tuple[tuple[float, int], ...]) -> StepLine:
        return StepLine(
            time_seconds=10.0 * number,
            step=number,
            epoch=0,
            first_sample=64 * (number - 1),
            num_samples=64,
            num_units=num_units,
            loss=1.5,
            learning_rate=1e-3,
            step_seconds=seconds,
            micro_batch=16,
            peak_bytes=1_000 * number,
            memory=memory,
        )

    return (
        StartLine(time_seconds=0, step=0, micro_batch=64, baseline_bytes=500, wall_time="2026-01-01T00:00:00Z"),
        step(1, 10, 4.0, ((9.0, 700), (9.5, 900))),
        OomEvent(step=2, phase="backward", family="cpu-allocator", requested_bytes=99, raw_text="déjà vu"),
        DeathLine(time_seconds=15, signal="SIGKILL", evidence="oom_kill rose from 0 to 1"),
        step(2, 20, 2.0, ()),
        CheckpointLine(time_seconds=21, step=2, num_bytes=123),
        step(3, 20, 3.0, ((29.0, 3_500),)),
        EvaluationLine(time_seconds=31, step=3, loss=float("inf"), num_samples=5, num_units=50),
        EndLine(time_seconds=32, step=3, status="finished", message="done"),
    )


@pytest.fixture
def run_directory(tmp_path: Path, plan: Plan, head: RunHead, lines: tuple[Line, ...]) -> Path:
    directory = tmp_path / "run-1"
    directory.mkdir()
    plan.save(directory / "plan.json")
    head.save(directory / "run.json")
    (directory / "metrics.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines), encoding="utf-8")
    return directory


@pytest.fixture
def run_record(run_directory: Path) -> RunRecord:
    return RunRecord.from_directory(run_directory)
