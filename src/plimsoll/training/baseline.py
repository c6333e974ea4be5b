"""The imports of a training process before it has a model, and the process that measures their memory.

`plimsoll.planning.baseline` does the measurement. This module does not import torch at the top, because unused parts of
torch must be excluded first.
"""

from __future__ import annotations

import gc
import sys

from plimsoll.planning.baseline import baseline_bytes, load_libraries, load_model_code
from plimsoll.planning.lean_imports import leave_out_unused, uncollected
from plimsoll.processes.children import begin_worker
from plimsoll.records.job import Job


def load_training(job: Job) -> None:
    """Import everything that a training process of the job imports before it has a model.

    Raises:
        JobError: if the model does not exist.
    """
    leave_out_unused(job)
    with uncollected():
        from plimsoll.training import session  # noqa: F401

        load_libraries(job)
        load_model_code(job)
    gc.collect()  # otherwise garbage would be counted in some processes only


def print_baseline() -> None:
    """Read a job from standard input, and print the bytes that its training process uses before it has a model."""
    begin_worker()
    job = Job.from_json(sys.stdin.read())
    load_training(job)
    print(baseline_bytes(job))
