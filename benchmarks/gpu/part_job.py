"""One job by hand and by Plimsoll: 64 x 512 tokens of GPT-2 124M, bf16, AdamW, clipped gradients, under four limits.

*plans* makes the plans in parallel, as `plimsoll plan` does for this GPU. *grid* records every setting of
`cases.by_hand` in a plain loop: one setting in a first process, and the others in a second process, which resumes the
first recording. *planned* trains each plan with `plimsoll train`, which tries the plan and its candidates, and
interrupts it after a few steps. These steps are compared with the fastest setting by hand that fits the limit; for that
setting, reserved memory and memory outside the allocator count.
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from benchmarks.gpu.cases import JOB_BATCH_SIZE, JOB_LENGTH, JOB_MODEL, JOB_VOCABULARY, Case, by_hand
from benchmarks.gpu.parts import Row, Task, run

from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord

LIMITS_GIB = (4, 12, 8, 2)  # the first ones offer the most settings by hand
# The steps of the job, enough that trying plans before them pays off; the interruption is after a few of them.
STEPS, ENOUGH_STEPS, WARM_STEPS = 1000, 6, 2
MOST_OF_BEST = 1.05
_TEXT_BYTES, _INTERRUPTED = 3 << 20, 130
_GIB = 1 << 30
_LEAST_SECONDS, _MOST_SECONDS = 45.0, 110.0  # of a training, including start and end


def limits_of(task: Task) -> tuple[int, ...]:
    return LIMITS_GIB[:1] if task.is_tiny else LIMITS_GIB


def job_file(task: Task) -> Path:
    """Write the job, and enough text for its steps: sources of Python's standard library."""
    path, text = task.folder / "job.yaml", task.folder / "text.txt"
    if path.is_file():
        return path
    written = ""
    for source in sorted(Path(json.__file__).parents[1].glob("*.py")):
        written += source.read_text("utf-8", errors="replace")
        if len(written) > _TEXT_BYTES:
            break
    text.write_text(written, encoding="utf-8")
    job: dict[str, Any] = {
        "model": {"architecture": "gpt2", "n_positions": JOB_LENGTH}, "data": {"train": str(text)},
        "tokenizer": {"train": "bpe", "vocab_size": JOB_VOCABULARY}, "sequence_length": JOB_LENGTH,
        "batch_size": JOB_BATCH_SIZE, "steps": STEPS, "precision": "bf16", "checkpoint": {"every": STEPS},
        "optimizer": {"name": "adamw", "lr": 3e-4, "clip_norm": 1.0},
    }  # fmt: skip
    if task.is_tiny:
        job |= {"batch_size": 8, "sequence_length": 32, "precision": "fp32", "device": "cpu"}
        job["model"] |= {"n_layer": 2, "n_embd": 64, "n_head": 2}
        job["tokenizer"] |= {"vocab_size": 500}
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


# -- plans -------------------------------------------------------------------------------------------------------------


def run_plans(task: Task) -> None:
    job = job_file(task)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda limit: make_plan(task, job, limit), limits_of(task)))


def make_plan(task: Task, job: Path, limit_gib: int) -> None:
    limit, path = f"{limit_gib}GiB", plan_file(task, limit_gib)
    row = next((row for row in task.recorded if row["id"] == f"plan:{limit}"), None)
    if row is None:
        done = run(task, "-m", "plimsoll", "plan", str(job), "--budget", limit, "-o", str(path), "--force", "-q")
        if done.code is None:
            task.not_reached(f"a plan for {limit} in {done.seconds:.0f} s")
            return
        if done.code:
            task.check(f"plan for {limit}", f"exit code {done.code}: {done.last_line}", "fits", ok=False)
            return
        row = {"id": f"plan:{limit}", "kind": "plan", "seconds": round(done.seconds, 1),
               "plan": json.loads(path.read_text("utf-8"))}  # fmt: skip
        task.say(row)
    plan = Plan.from_json(json.dumps(row["plan"]))
    words = " + ".join(map(str, plan.choices))
    task.check(f"plan for {limit} in {row['seconds']:.0f} s, {plan.num_traces} traces", words, "fits", plan.fits)


def plan_file(task: Task, limit_gib: int) -> Path:
    """Return the path of the plan; a plan that only the recording has is written there."""
    path = task.folder / f"plan-{limit_gib}.json"
    row = next((row for row in task.recorded if row["id"] == f"plan:{limit_gib}GiB"), None)
    if row is not None:
        path.write_text(json.dumps(row["plan"]), encoding="utf-8")
    return path


# -- by hand -----------------------------------------------------------------------------------------------------------


def run_grid(task: Task) -> None:
    """Record the settings by hand: the first one in a separate process, whose recording the second process resumes."""
    first = (by_hand()[0].shrunk() if task.is_tiny else by_hand()[0]).id
    before = {row["id"]: row for row in task.recorded}
    recorded_by(task, "--only", first)
    kept = {row["id"]: row for row in fresh(task)}
    recorded_by(task, "--only", f"{JOB_MODEL}-")
    rows = fresh(task)
    ids = [row["id"] for row in rows]
    found = {row["id"]: row for row in rows}
    is_kept = first in kept and all(found.get(name) == row for name, row in kept.items()) and before.keys() <= set(ids)
    is_once = len(ids) == len(set(ids))
    task.check("its own recording, resumed", f"{len(kept)} rows kept, {len(ids)} in all", "as they were, none twice",
               is_kept and is_once)  # fmt: skip
    judge_grid(task, [row for row in rows if is_by_hand(row)])


def recorded_by(task: Task, *words: str) -> None:
    minutes = max(task.seconds_left - 5, 0) / 60
    device = ["--device", task.device, *(["--tiny"] if task.is_tiny else [])]
    done = run(task, "-m", "benchmarks.gpu.record", "--out", str(task.recording), "--resume", "--minutes",
               f"{minutes:.3f}", *words, *device)  # fmt: skip
    if done.code:
        task.check("the recorder", f"exit code {done.code}: {done.last_line}", 0, ok=False)


def fresh(task: Task) -> list[Row]:
    task.__dict__.pop("recorded", None)
    return task.recorded


def is_by_hand(row: Row) -> bool:
    return row["kind"] == "shared" and row["case"]["model"] == JOB_MODEL


def judge_grid(task: Task, rows: list[Row]) -> None:
    num_all = len({(case.shrunk() if task.is_tiny else case).id for case in by_hand()})
    if len(rows) < num_all:
        task.not_reached(f"{num_all - len(rows)} of {num_all} settings by hand")
    failed = [row for row in rows if row["status"] == "error"]
    task.check(f"{len(rows)} settings by hand", f"{len(failed)} failed", 0, not failed)


# -- by Plimsoll -------------------------------------------------------------------------------------------------------


def run_planned(task: Task) -> None:
    speed_row(task)
    done = {row["id"]: row for row in task.recorded}
    for limit_gib in limits_of(task):
        limit, plan = f"{limit_gib}GiB", plan_file(task, limit_gib)
        if f"planned:{limit}" in done:
            judge(task, done[f"planned:{limit}"])
        elif not plan.is_file():
            task.not_reached(f"training inside {limit}: there is no plan")
        elif task.seconds_left < _LEAST_SECONDS:
            task.not_reached(f"training inside {limit}")
        else:
            train(task, limit_gib, plan)


def speed_row(task: Task) -> None:
    """Record the device's speed as measured by Plimsoll."""
    from plimsoll.device.speed import measured_speed

    if any(row["kind"] == "speed" for row in task.recorded):
        return
    started = time.perf_counter()
    speed = measured_speed(device=task.device)
    seconds = round(time.perf_counter() - started, 1)
    task.say({"id": "speed", "kind": "speed", "seconds": seconds, "speed": json.loads(speed.to_json())})


def train(task: Task, limit_gib: int, plan: Path) -> None:
    limit, out = f"{limit_gib}GiB", task.folder / f"run-{limit_gib}"
    words = ["train", str(job_file(task)), "--budget", limit, "--plan", str(plan), "--out", str(out)]
    words += ["--cache", str(task.folder / "data"), "--force", "-q"]

    def has_done_enough() -> bool:
        path = out / "metrics.jsonl"
        return path.is_file() and path.read_text("utf-8").count('"event":"step"') >= ENOUGH_STEPS

    done = run(task, "-m", "plimsoll", *words, most_seconds=_MOST_SECONDS, enough=has_done_enough)
    if done.code is None:
        task.not_reached(f"the end of training inside {limit} in {done.seconds:.0f} s")
        return
    if done.code != _INTERRUPTED:
        task.check(f"training inside {limit}", f"exit code {done.code}: {done.last_line}", _INTERRUPTED, ok=False)
        return
    row = planned_row(limit_gib, RunRecord.from_directory(out)) | {"seconds": round(done.seconds, 1)}
    task.say(row)
    judge(task, row)


def planned_row(limit_gib: int, record: RunRecord) -> Row:
    """Return the row of a training: like kind `technique` of the first recordings, with the predicted values."""
    plan, steps = record.plan, record.steps
    fallback = plan.fallbacks[steps[-1].fallback or 0]
    return {
        "id": f"planned:{limit_gib}GiB", "kind": "planned", "limit_bytes": limit_gib * _GIB,
        "choices": " + ".join(map(str, fallback.choices)), "techniques": [one.model_dump() for one in fallback.choices],
        "batch": JOB_BATCH_SIZE, "length": JOB_LENGTH, "precision": record.job["precision"],
        "step_seconds": [round(step.step_seconds, 5) for step in steps], "losses": [step.loss for step in steps],
        "micro": steps[-1].micro_batch, "fallbacks": [step.fallback for step in steps], "ooms": len(record.oom_events),
        "peak": max(step.peak_bytes or 0 for step in steps),
        "predicted_reserved": fallback.peak and fallback.peak.model_dump(),
        "predicted_allocated": allocated_of(plan) if fallback is plan.fallbacks[0] else None,
        "predicted_seconds": fallback.step_time and fallback.step_time.model_dump(),
        "trial": (trial := getattr(plan, "trial", None)) and trial.model_dump(),
    }  # fmt: skip


def allocated_of(plan: Plan) -> Row | None:
    estimate = plan.prediction and plan.prediction.allocated
    return estimate and estimate.model_dump()


def judge(task: Task, row: Row) -> None:
    limit_gib, best = row["limit_bytes"] // _GIB, best_by_hand(task, row["limit_bytes"])
    seconds, best_seconds = seconds_of(row), best and seconds_of(best)
    best_setting = best and setting_of(Case.from_dict(best["case"]))
    task.check(f"{limit_gib} GiB: ran out of memory, in a command of {row['seconds']:.0f} s", f"{row['ooms']} times", 0,
               row["ooms"] == 0)  # fmt: skip
    task.say({
        "id": f"compared:{limit_gib}GiB", "kind": "compared", "part": task.part, "limit_gib": limit_gib,
        "choices": row["choices"], "seconds": seconds, "best": best_setting, "best_seconds": best_seconds,
    })  # fmt: skip
    if best_seconds is None:
        task.check(f"{limit_gib} GiB: {row['choices']}", f"{seconds:.3f} s a step", "none by hand fits", ok=True)
        return
    measured = f"{seconds:.3f} / {best_seconds:.3f} s = {seconds / best_seconds:.2f}"
    task.check_on_card(f"{limit_gib} GiB: {row['choices']} over {best_setting}", measured, MOST_OF_BEST,
                       seconds / best_seconds <= MOST_OF_BEST)  # fmt: skip


def best_by_hand(task: Task, limit_bytes: int) -> Row | None:
    """Return the fastest recorded setting whose reserved and outside memory fit the limit."""
    fits = [row for row in task.recorded if is_by_hand(row) and row["status"] == "ok"
            and (row["peak_reserved_bytes"] or 0) + (row["outside_after_bytes"] or 0) <= limit_bytes]  # fmt: skip
    return min(fits, key=seconds_of, default=None)


def seconds_of(row: Row) -> float:
    return statistics.median(row["step_seconds"][WARM_STEPS:] or row["step_seconds"][-1:])


def setting_of(case: Case) -> str:
    """Return a setting by hand in the words of a plan."""
    words = f"micro_batch={case.batch_size // case.accumulation}"
    return f"{words} + checkpointing=all" if case.checkpointing else words
