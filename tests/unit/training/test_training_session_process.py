"""The process of a training before it has a model: its end, its imports before the limit, and its memory."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import psutil
import pytest

from processes import LONGEST_SECONDS, run_program

LISTENS = """
import time
from plimsoll.processes.children import begin_worker
begin_worker()
print("listens", flush=True)
time.sleep(60)
"""


def test_a_worker_whose_supervisor_is_gone_already_ends_at_once():
    assert run_program(LISTENS, PLIMSOLL_SUPERVISOR="1").returncode == -signal.SIGTERM


# Starts a worker, prints its process id and exits.
SUPERVISOR = """
import os, subprocess, sys
worker = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    env=os.environ | {"PLIMSOLL_SUPERVISOR": str(os.getpid())},
    stdout=subprocess.PIPE, text=True,
)
assert worker.stdout.readline() == "listens\\n"
print(worker.pid, flush=True)
os._exit(0)
"""


def test_a_worker_ends_with_its_supervisor():
    number = int(run_program(SUPERVISOR, LISTENS).stdout)
    until = time.monotonic() + LONGEST_SECONDS
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


ON_THE_FLY = """
import sys
from plimsoll.records.job import Job
from plimsoll.planning.baseline import load_libraries

on_the_fly = {"on_the_fly": True, "long_texts": "truncate"} if sys.argv[1] == "yes" else {}
load_libraries(Job.from_fields({"model": "lstm", "data": {"train": "none"} | on_the_fly}))
print("pyarrow" in sys.modules)
"""


@pytest.mark.long
def test_what_reads_texts_is_loaded_before_memory_is_limited():
    """Inside a budget, an evaluation of texts tokenized on the fly could not load the libraries of pyarrow."""
    assert run_program(ON_THE_FLY, "yes").stdout == "True\n"
    assert run_program(ON_THE_FLY, "no").stdout == "False\n"


def test_a_training_process_loads_no_planner_and_no_solver():
    """The memory of imports is taken from the budget: scipy's solver alone takes 20 MiB."""
    program = "import sys, plimsoll.training.session; print(*sys.modules)"
    loaded = set(run_program(program).stdout.split())
    assert "plimsoll.planning.measured_choice" in loaded
    assert not loaded & {
        "scipy",
        "sympy",
        "transformers",
        "torch._dynamo",
        "plimsoll.planning.search.search",
        "plimsoll.planning.plan",
    }


DEATH_SIGNAL = """
import ctypes
from plimsoll.processes.children import begin_worker
begin_worker()
number = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


@pytest.mark.sampled(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of the death of a parent")
@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({}, False),
        ({"PLIMSOLL_SUPERVISOR": str(os.getpid())}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": ""}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}, True),
        ({"RANK": "", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2", "PLIMSOLL_SUPERVISOR": "1"}, True),  # the launcher is the parent process
    ],
)
def test_a_process_ends_with_its_supervisor_or_its_launcher_where_it_has_one(
    variables: dict[str, str], is_told: bool
) -> None:
    done = run_program(DEATH_SIGNAL, **variables)
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM) if is_told else 0}\n"), done.stderr


# Each job runs in its own process, forked from a process that has not loaded transformers.
IMPORTS = """
import json, os, sys
from plimsoll.records.job import Job
from plimsoll.planning.baseline import load_libraries
for fields in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    load_libraries(Job.from_fields(json.loads(fields)))
    print("transformers" in sys.modules, flush=True)
    os._exit(0)
print("transformers" in sys.modules)
"""


@pytest.mark.long
def test_transformers_are_loaded_before_memory_is_limited_where_the_job_may_have_one() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"model": "lstm"}, False),
        ({"model": {"architecture": "gru"}}, False),
        ({"model": "gpt2"}, True),
        ({"model": "lstm", "distill": {"teacher": "nowhere"}}, True),
    ]
    done = run_program(IMPORTS, *(json.dumps({"data": "nowhere.txt"} | fields) for fields, _ in cases))
    assert done.stdout.split() == [*(str(is_loaded) for _, is_loaded in cases), "False"], done.stderr
