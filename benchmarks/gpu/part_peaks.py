"""Peaks of other models: the matrix of `benchmarks.gpu.record`, in its order, until the time is over."""

from __future__ import annotations

from benchmarks.gpu.files import read_recording
from benchmarks.gpu.part_job import recorded_by
from benchmarks.gpu.parts import Task
from benchmarks.gpu.record import all_runs


def run_part(task: Task) -> None:
    ids = {run.id for run in all_runs(task.is_tiny)}
    recorded_by(task)
    rows = [row for row in read_recording(task.recording)["runs"] if row["id"] in ids]
    failed = [row["id"] for row in rows if row.get("status") == "error"]
    if len(rows) < len(ids):
        task.not_reached(f"{len(ids) - len(rows)} of {len(ids)} runs: python -m benchmarks.gpu --resume --only peaks")
    task.check(f"{len(rows)} runs", f"{len(failed)} that this torch cannot do", "recorded", ok=bool(rows))
