"""What a training process loads before it has a model, and the process that says what that takes.

The measuring is in `plimsoll.planning.baseline`. Nothing at the top of this module imports torch, which is told first
what the job does not use of it.
"""

from __future__ import annotations

import gc
import sys

from plimsoll.planning.baseline import baseline_bytes, load_libraries, load_model_code
from plimsoll.planning.lean_imports import leave_out_unused, uncollected
from plimsoll.processes.children import begin_worker
from plimsoll.records.job import Job


def load_training(job: Job) -> None:
    """Load all that a training process of the job has before it has a model, and nothing else.

    Raises:
        JobError: if there is no such model.
    """
    leave_out_unused(job)
    with uncollected():
        from plimsoll.training import session  # noqa: F401

        load_libraries(job)
        load_model_code(job)
    gc.collect()  # now: what is left of it would be counted in one process and not in another


def print_baseline() -> None:
    """Print how many bytes a training process takes before it has a model; the job comes on standard input."""
    begin_worker()
    job = Job.from_json(sys.stdin.read())
    load_training(job)
    print(baseline_bytes(job))
