"""Launcher for the ranks of one machine, based on torchrun's agent. It reports one exit code for all ranks.

`plimsoll train --nproc 4` runs the launcher in a separate process. It is not used if torchrun starts the ranks. The
exit code of a killed rank takes precedence, because the other ranks end as a consequence.

Does not restart ranks: the supervisor does, after it has found the cause (`plimsoll.training.supervise`).

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from plimsoll.errors import RankLostError
from plimsoll.files.temporary import own_folder
from plimsoll.processes.children import LAUNCHER, begin_supervised

# After SIGTERM, a rank finishes its step and saves a checkpoint.
_SHUTDOWN_SECONDS = 600
_THREADS = "OMP_NUM_THREADS"


def launch(num_ranks: int, arguments: Iterable[str]) -> int:
    """Run ``plimsoll`` with ``arguments`` in ``num_ranks`` processes, one per rank, and wait until all have ended.

    Returns:
        0, or the exit code of the rank that failed first; 128 + n if signal n ended it.
    """
    begin_supervised()
    with own_folder() as folder:
        return _launched(num_ranks, arguments, folder)


def _launched(num_ranks: int, arguments: Iterable[str], log_folder: Path) -> int:
    logging.disable(logging.WARNING)  # the ranks report their errors themselves
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault(_THREADS, str(max(len(os.sched_getaffinity(0)) // num_ranks, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder)),
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "plimsoll", *arguments)
    except ChildFailedError as error:
        return exit_code_of(failure.exitcode for failure in error.failures.values())
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0


def exit_code_of(return_codes: Iterable[int]) -> int:
    """Return the exit code of the rank that caused the failure. Return codes of killed processes are negative."""
    return min(
        (128 - code if code < 0 else code for code in return_codes),
        # After a rank has failed, torchrun's agent sends SIGTERM to the other ranks, which are never the cause.
        key=lambda code: (code == 128 + signal.SIGTERM, code == RankLostError.exit_code, code <= 128),
    )
