"""Any function stands for a rehearsal here; that a plan is the same with and without is in test_run_plan."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from plimsoll.records.plan import micro_batch_choice
from plimsoll.run import at_once
from plimsoll.run.at_once import rehearsed_at_once
from plimsoll.run.rungs import samples_of

SEVERAL = [(micro_batch_choice(size),) for size in range(1, 6)]
PARENT = """
import os, time
os.sched_getaffinity = lambda pid: {0, 1}
from plimsoll.run.at_once import rehearsed_at_once
print("ready", flush=True)
rehearsed_at_once(lambda choices: time.sleep(60), ["a", "b", "c"])
"""


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_each_is_rehearsed_in_a_process_of_its_own():
    found = rehearsed_at_once(lambda choices: (samples_of(choices), os.getpid()), SEVERAL)
    assert {choices: size for choices, (size, _) in found.items()} == {mix: samples_of(mix) for mix in SEVERAL}
    assert len({process for _, process in found.values()} | {os.getpid()}) == 6


def test_what_is_larger_than_a_pipe_arrives():
    found = rehearsed_at_once(lambda choices: bytes(3 << 20), SEVERAL)
    assert [len(value) for value in found.values()] == [3 << 20] * 5


def fails(choices):
    raise ValueError("no such thing")


def is_killed(choices):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [fails, is_killed])
def test_what_goes_wrong_is_left_out_and_says_nothing(end, capfd):
    found = rehearsed_at_once(lambda choices: end(choices) if samples_of(choices) == 3 else 1, SEVERAL)
    assert set(found) == set(SEVERAL) - {SEVERAL[2]}
    assert capfd.readouterr() == ("", "")


def test_with_one_processor_one_mix_or_a_gpu_there_is_nothing_to_gain(monkeypatch):
    def refuse(*arguments):
        raise AssertionError

    monkeypatch.setattr(at_once, "_begin", refuse)
    assert rehearsed_at_once(refuse, SEVERAL[:1]) == {}
    with monkeypatch.context() as patched:
        patched.setattr(at_once.torch.cuda, "is_available", lambda: True)
        assert rehearsed_at_once(refuse, SEVERAL) == {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert rehearsed_at_once(refuse, SEVERAL) == {}


def test_an_interrupt_leaves_no_process_behind():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        process, children = psutil.Process(parent.pid), []
        while len(children) < 2:
            time.sleep(0.01)
            children = process.children()
        parent.send_signal(signal.SIGINT)
        _, said = parent.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert psutil.wait_procs(children, timeout=10)[1] == []
