"""The memory of a process before it has a model, measured in a process that is started or forked for it."""

import os
import signal

import pytest

from plimsoll.errors import DeviceError, InputError
from plimsoll.planning.baseline import StartedBaseline, baseline_for, begin_baseline, job_baseline, measured
from plimsoll.records.job import Job
from processes import run_program

GIB = 1 << 30
MIB = 1 << 20


def test_a_process_answers_several_plans():
    with StartedBaseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"})) as started:
        assert started.wait() == started.wait()


def test_a_training_process_is_started_to_read_its_baseline():
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt"})
    estimate = job_baseline(job)
    assert estimate.measured_bytes == estimate.likely_bytes
    assert estimate.low_bytes < estimate.likely_bytes < estimate.high_bytes
    assert 50 * MIB < estimate.likely_bytes < 1 * GIB


def test_a_model_that_cannot_be_is_the_job_s_fault_and_not_the_process_s():
    job = Job.from_fields({"model": {"architecture": "gpt2", "n_layers": 2}, "data": "nowhere.txt"})
    with pytest.raises(InputError, match=r"^model: `gpt2` has no field `n_layers`; did you mean `n_layer`\?$"):
        job_baseline(job)


@pytest.mark.slow
def test_the_baseline_has_what_a_function_of_the_users_imports(tmp_path, monkeypatch):
    """The baseline includes imports inside the function, which looking up the function does not execute."""
    (tmp_path / "large_library.py").write_text("DATA = bytearray(100 << 20)\n")
    function = "import torch\n\n\ndef model(vocab_size):\n{}    return torch.nn.Linear(1, 1)\n"
    (tmp_path / "own_model.py").write_text(function.format("    import large_library\n"))
    (tmp_path / "small_model.py").write_text(function.format(""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    fields = {"data": {"train": "text.txt"}, "sequence_length": 8, "batch_size": 2}
    large, small = (
        job_baseline(Job.from_fields(fields | {"model": f"{name}:model"})) for name in ("own_model", "small_model")
    )
    assert large.likely_bytes - small.likely_bytes == pytest.approx(100 * MIB, abs=8 * MIB)


def test_what_reads_a_baseline_ends_where_nobody_waits_for_it():
    with StartedBaseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"})) as started:
        assert started._child.poll() is None
    assert started._child.returncode == -signal.SIGKILL


def test_a_process_that_ended_without_a_word_is_said_to_have():
    with StartedBaseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"})) as started:
        os.kill(started._child.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"without a model \(exit -9: no message\): check that"):
            started.wait()


READ = """
import plimsoll.cli.main
from plimsoll.records.job import Job
from plimsoll.planning.baseline import ForkedBaseline, StartedBaseline, begin_baseline
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.training.baseline import load_training
job = Job.from_fields({"model": "lstm", "data": "nowhere.txt"})
leave_out_unused(job, is_own=True)  # as a command does
with begin_baseline(job, load_training) as started:
    assert type(started) is ForkedBaseline
    print(started.wait().likely_bytes, started.wait().likely_bytes)
for _ in range(3):
    with StartedBaseline(job) as started:
        print(started.wait().likely_bytes)
"""


@pytest.mark.cold
@pytest.mark.long
def test_a_fork_takes_what_a_process_takes_that_is_started_anew():
    done = run_program(READ)
    assert done.returncode == 0, done.stderr
    forked, again, *started = map(int, done.stdout.split())
    assert forked == again
    assert measured(min(started)).low_bytes <= forked <= measured(max(started)).high_bytes  # they differ by a MiB


THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
from plimsoll.records.job import Job
from plimsoll.planning.baseline import StartedBaseline, begin_baseline
from plimsoll.training.baseline import load_training
with begin_baseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"}), load_training) as started:
    print(type(started) is StartedBaseline, started.wait().likely_bytes > 0)
"""


def test_a_process_that_cannot_be_forked_starts_another():
    assert run_program(THREADED).stdout == "True True\n"


def test_without_what_to_load_another_process_is_started():
    with begin_baseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"}), None) as started:
        assert type(started) is StartedBaseline


@pytest.mark.parametrize("device", ["rtx3060", "H100"])
def test_of_a_gpu_there_is_nothing_to_read(device):
    job = Job.from_fields({"model": {"architecture": "none of them"}, "data": "nowhere.txt"})
    with baseline_for(job, device, None) as started:
        assert started is None


KILLED = """
import os, signal
from plimsoll.records.job import Job
from plimsoll.planning import baseline
from plimsoll.training.baseline import load_training
baseline.baseline_bytes = lambda job: os.kill(os.getpid(), signal.SIGKILL)
job = Job.from_fields({"model": "lstm", "data": "nowhere.txt"})
with baseline.begin_baseline(job, load_training) as started:
    try:
        started.wait()
    except baseline.DeviceError as error:
        print(error)
"""


def test_a_fork_that_ended_without_a_word_is_said_to_have():
    assert "without a model (exit -9: no message): check that" in run_program(KILLED).stdout
