"""Peaks and times of the job, by hand and as planned, compared with predictions on the CPU.

Planned trainings are predicted from their plan. Settings by hand are predicted as any recorded training
(`benchmarks/gpu/compare.py`), and their times as in `benchmarks/plan_time_gpu.py`. These hold the recording to the same
bounds on a machine without a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import warnings
from pathlib import Path

import torch
import transformers
from benchmarks.gpu import compare
from benchmarks.gpu.cases import Case
from benchmarks.gpu.files import read_recording
from benchmarks.gpu.part_job import is_by_hand, limits_of, seconds_of, setting_of
from benchmarks.gpu.parts import ROOT, Row, Task

sys.path.insert(0, str(ROOT / "benchmarks"))
_OTHERS_CORES = 4  # for other work at the same time
MEDIAN_OFF, NINE_IN_TEN_OFF = 0.15, 0.35  # of times


def run_part(task: Task) -> None:
    planned = {row["limit_bytes"] >> 30: row for row in task.recorded if row["kind"] == "planned"}
    for limit_gib in limits_of(task):
        if limit_gib in planned:
            judge_planned(task, planned[limit_gib])
        else:
            task.not_reached(f"what was planned for {limit_gib} GiB: it was not trained")
    by_hand = [row for row in task.recorded if is_by_hand(row) and row["status"] == "ok"]
    if task.is_tiny:
        task.not_reached("settings by hand: a processor has no peaks to compare")
        return
    judge_by_hand(task, by_hand)


def judge_planned(task: Task, row: Row) -> None:
    name = f"{row['limit_bytes'] >> 30} GiB: {row['choices']}"
    if (peak := row["predicted_allocated"]) is not None:
        share = peak["likely_bytes"] / row["peak"] - 1 if row["peak"] else 0.0
        task.check_on_card(f"{name}, peak", f"predicted {share:+.2%} of {row['peak'] / 2**20:,.0f} MiB",
                           f"{compare.WORST:.0%}", abs(share) <= compare.WORST)  # fmt: skip
    if (duration := row["predicted_seconds"]) is not None:
        seconds = seconds_of(row)
        low, high = duration["low_seconds"], duration["high_seconds"]
        task.check_on_card(f"{name}, time", f"{seconds:.3f} s, predicted {duration['likely_seconds']:.3f} s",
                           f"{low:.3f} to {high:.3f} s", low <= seconds <= high)  # fmt: skip


def judge_by_hand(task: Task, rows: list[Row]) -> None:
    """Predict the settings in parallel on the available cores, the quick ones first."""
    rows = sorted(rows, key=lambda row: row["case"]["accumulation"])
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # for the processes: no GPU is needed
    found: dict[str, tuple[float, float, float]] = {}
    num_processes = max(len(os.sched_getaffinity(0)) - _OTHERS_CORES, 1)
    with multiprocessing.get_context("spawn").Pool(num_processes, settle) as pool:
        waiting = {row["id"]: pool.apply_async(errors_of, (task.recording, row["id"])) for row in rows}
        for name, result in waiting.items():
            try:
                found[name] = result.get(max(task.seconds_left - 2, 0.1))
            except multiprocessing.TimeoutError:
                task.not_reached(f"the prediction of {name}")
    for row in rows:
        if row["id"] not in found:
            continue
        off = found[row["id"]]
        said = setting_of(Case.from_dict(row["case"]))
        task.say({"id": f"predicted:{row['id']}", "kind": "predicted", "off": [round(share, 4) for share in off]})
        task.check(f"by hand, {said}", f"peaks {off[0]:+.2%}, {off[1]:+.2%}, time {off[2]:+.1%}",
                   f"peaks {compare.WORST:.0%}",
                   max(abs(off[0]), abs(off[1])) <= compare.WORST)  # fmt: skip
    if times := sorted(abs(off) for _, _, off in found.values()):
        ninth = times[-(-9 * len(times) // 10) - 1]
        task.check("by hand, times", f"median {statistics.median(times):.1%}, nine in ten {ninth:.1%}",
                   f"{MEDIAN_OFF:.0%}, {NINE_IN_TEN_OFF:.0%}",
                   statistics.median(times) <= MEDIAN_OFF and ninth <= NINE_IN_TEN_OFF)  # fmt: skip


def settle() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()


def errors_of(path: Path, run_id: str) -> tuple[float, float, float]:
    """Return the relative errors of the predicted allocated bytes, reserved bytes and seconds."""
    import plan_time_gpu  # next to this package

    recording = read_recording(path)
    row = next(row for row in recording["runs"] if row["id"] == run_id)
    (found,) = compare.compare(recording, [row])
    (seconds,) = plan_time_gpu.predict(plan_time_gpu.by_hand_row(row, recording).task)
    return found.error("allocated"), found.error("reserved"), seconds / seconds_of(row) - 1
