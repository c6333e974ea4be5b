"""Planned trainings for `plan_budgets.py` and `plan_fast.py`, each in a separate process inside its budget.

    python benchmarks/_planned_worker.py < runs.jsonl

Every line of standard input is a run: ``job``, ``prepared`` (a path), ``fallbacks`` (lists of choices), ``steps`` and
``budget_bytes``. With ``plan`` in place of ``fallbacks``, the plan's candidates are tried first. Each run is a child
process, forked after the imports, with the limit, step and batches of `plimsoll train`. Checkpoints and the final model
are not written.

Standard output gets one JSON object per line: the child's ``pid``, the ``plan`` after a trial, one object per step, and
the ``exit`` code with the ``error``, if any.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Plan


def main() -> None:
    """Perform the runs one after the other; all use the first run's kind of model, to import its libraries once."""
    # readline, because an iterator over the file reads ahead, and the children inherit that buffer
    first = sys.stdin.readline()
    if not first:
        return
    import plimsoll.training.loop  # noqa: F401  -- as a training process imports
    from plimsoll.models import assemble  # noqa: F401
    from plimsoll.planning.baseline import load_libraries
    from plimsoll.planning.lean_imports import leave_out_unused

    job = Job.from_json(json.loads(first)["job"])
    leave_out_unused(job, is_own=True)
    load_libraries(job)
    line = first
    while line:
        run = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(exit_code_of(run))
        _, status = os.waitpid(pid, 0)
        say(exit=os.waitstatus_to_exitcode(status))
        line = sys.stdin.readline()


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def exit_code_of(run: dict[str, Any]) -> int:
    say(pid=os.getpid())
    try:
        train(run)
    except Exception as error:  # noqa: BLE001 -- said to who reads the rows; the process ends
        say(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def train(run: dict[str, Any]) -> None:
    from plimsoll.device.base import backend_for
    from plimsoll.models.assemble import assemble
    from plimsoll.models.build import build_model
    from plimsoll.planning.measured_choice import try_plan
    from plimsoll.records.prepared import Prepared
    from plimsoll.step.job_step import step_of
    from plimsoll.techniques.mechanisms.allocators import set_up_as_with

    job, prepared = Job.from_json(run["job"]), Prepared.load(Path(run["prepared"]))
    plan = Plan.from_json(run["plan"]) if "plan" in run else None
    fallbacks = plan.fallbacks if plan else [[Choice(**choice) for choice in choices] for choices in run["fallbacks"]]
    build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id, device="meta")  # imports its modules
    backend = backend_for("cpu")
    backend.baseline_bytes()
    with backend.limited(run["budget_bytes"]):
        set_up_as_with(plan.choices if plan else fallbacks[0], "cpu")
        parts = assemble(job, prepared, "cpu")
        step = step_of(job, parts.model, parts.optimizer, fallbacks, schedule=parts.schedule)
        if plan is not None:
            say(plan=try_plan(step, plan, parts.loader.peek().fields).to_json())
            backend.use()
            backend.reset_peak()
        for _ in range(run["steps"]):
            batch = parts.loader.peek().fields
            started = time.process_time()
            result = step(batch)
            seconds = time.process_time() - started
            parts.loader.advance()
            use = backend.use()
            backend.reset_peak()
            say(loss=result.loss, cpu_seconds=seconds, ooms=len(result.oom_events), peak_bytes=use.peak_bytes)


if __name__ == "__main__":
    main()
