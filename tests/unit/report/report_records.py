"""Runs and machines small enough to check by hand; 1 MiB is 2**20 bytes."""

from __future__ import annotations

from plimsoll.records.device import Budget, Device, Limit, Machine, MemoryUse
from plimsoll.records.plan import Plan, micro_batch_plan
from plimsoll.records.run import (
    CheckpointLine,
    DeathLine,
    EvaluationLine,
    OomEvent,
    RunRecord,
    StartLine,
    StepLine,
    Timeline,
)

MIB = 1 << 20


def step_line(step: int, **changes: object) -> StepLine:
    """Return a step of 2 s with 64 samples and 1000 tokens (500 tokens/s); the losses are 8, 4, 2, 1, ..."""
    fields: dict[str, object] = {
        "time_seconds": 2.0 * step,
        "step": step,
        "epoch": 0,
        "first_sample": 64 * (step - 1),
        "num_samples": 64,
        "num_units": 1000,
        "loss": 8 / 2 ** (step - 1),
        "learning_rate": 0.001,
        "step_seconds": 2.0,
        "micro_batch": 64,
        "peak_bytes": (600 + 10 * step) * MIB,
    }
    return StepLine.model_validate(fields | changes)


def cpu() -> Device:
    """Return a CPU with 8 GiB of memory, of which a cgroup permits 4 GiB, and 3 GiB are free."""
    return Device(
        name="Example CPU",
        kind="cpu",
        capacity_bytes=4096 * MIB,
        free_bytes=3072 * MIB,
        hardware_bytes=8192 * MIB,
        limits=(Limit(source="cgroup v2 memory.max", bytes=4096 * MIB),),
        use=MemoryUse(used_bytes=200 * MIB, peak_bytes=256 * MIB, reserved_bytes=512 * MIB, others_bytes=1024 * MIB),
        num_cores=2,
        architecture="x86_64",
        notes=("no swap",),
    )


def gpu() -> Device:
    """Return a GPU of 24 GiB without a limit, 20 GiB free."""
    return Device(
        name="Example GPU",
        kind="cuda",
        index=1,
        capacity_bytes=24576 * MIB,
        free_bytes=20480 * MIB,
        hardware_bytes=24576 * MIB,
        use=MemoryUse(used_bytes=0, peak_bytes=0, reserved_bytes=0),
    )


def machine() -> Machine:
    """Return a machine with the CPU and the GPU of this module."""
    return Machine(devices=(cpu(), gpu()), versions={"torch": "2.13.0", "plimsoll": "0.1.0"})


def plan() -> Plan:
    """Return a plan of micro-batches 64, 32 and 16 under 1 GiB on the device and 4 GiB on the host."""
    return micro_batch_plan(Budget(device_bytes=1024 * MIB, host_bytes=4096 * MIB), (64, 32, 16))


def empty_run(**changes: object) -> RunRecord:
    """Return a run without any step or event."""
    fields: dict[str, object] = {
        "name": "tiny",
        "job": {"model": {"architecture": "gpt2"}, "task": "language-modeling", "batch_size": 64, "steps": 4},
        "plan": plan(),
        "device": cpu(),
        "status": "running",
    }
    return RunRecord.model_validate(fields | changes)


def eventful_run(**changes: object) -> RunRecord:
    """Return a run of four steps that runs out of memory in step 2 and is killed after step 3.

    Step 2 reduces the micro-batch from 64 to 32, and step 3 is repeated from a checkpoint. The losses are 8, 4, 2, 1
    and the peak is 768 of 1024 MiB (75 %). Two micro-batches have 64 samples, two have 32.
    """
    fields: dict[str, object] = {
        "status": "finished",
        "versions": {"torch": "2.13.0", "plimsoll": "0.1.0"},
        "steps": (
            step_line(1),
            step_line(2, micro_batch=32, fallback=1),
            step_line(3, micro_batch=32, fallback=1, loss=3.0),
            step_line(3, micro_batch=32, fallback=1, time_seconds=9.0),
            step_line(4, micro_batch=64, time_seconds=11.0),
        ),
        "evaluations": (EvaluationLine(time_seconds=11.5, step=4, loss=1.5, num_samples=10, num_units=100),),
        "checkpoints": (CheckpointLine(time_seconds=4.5, step=2, num_bytes=32 * MIB),),
        "oom_events": (
            OomEvent(
                time_seconds=3.0,
                step=2,
                phase="backward",
                family="cpu-allocator",
                requested_bytes=128 * MIB,
                live_bytes=960 * MIB,
                micro_batch=64,
                next_micro_batch=32,
                action="undone, took fallback 1",
                raw_text="DefaultCPUAllocator: can't allocate memory",
            ),
        ),
        "starts": (
            StartLine(
                time_seconds=0.0, step=0, micro_batch=64, baseline_bytes=200 * MIB, wall_time="2026-01-01T00:00:00Z"
            ),
            StartLine(
                time_seconds=7.0,
                step=2,
                micro_batch=32,
                baseline_bytes=200 * MIB,
                restarts=1,
                wall_time="2026-01-01T00:00:07Z",
            ),
        ),
        "deaths": (
            DeathLine(
                time_seconds=6.5,
                signal="SIGKILL",
                evidence="cgroup memory.events oom_kill rose by 1",
                restarted_from_step=2,
            ),
        ),
        "timeline": Timeline(
            source="measured",
            time_seconds=(0.0, 1.0, 3.0, 5.0, 9.0, 11.0),
            used_bytes=tuple(size * MIB for size in (200, 600, 768, 500, 520, 510)),
        ),
    }
    return empty_run(**(fields | changes))
