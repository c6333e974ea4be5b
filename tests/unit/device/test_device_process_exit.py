import os
import signal
import subprocess
import sys
import time

import pytest

from plimsoll.device import process_exit
from plimsoll.device.process_exit import Watched, start_ticks

WAITING = "import sys; sys.stdin.read(); sys.exit(7)"


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", WAITING], stdin=-1) as started:
        yield started


@pytest.fixture(params=["pidfd", "no pidfd"])
def watched(request, process, monkeypatch):
    if request.param == "no pidfd":  # as on Linux before 5.3

        def refused(_pid):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(process_exit.os, "pidfd_open", refused)
    found = Watched(process.pid)
    yield found
    found.close()


def test_a_process_that_goes_on_is_waited_for_as_long_as_said(process, watched):
    assert not watched.wait(0.05)
    assert not watched.has_ended
    assert watched.exit_code() is None


def test_the_exit_code_is_known_before_its_parent_asks(process, watched):
    process.stdin.close()
    assert watched.wait(60.0)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert watched.has_ended
    assert watched.exit_code() == 7


def test_a_signal_is_told_and_what_the_parent_has_asked_for_is_known_or_unknown_but_never_wrong(process, watched):
    process.kill()
    assert watched.wait(60.0)
    process.wait()
    assert watched.has_ended
    assert watched.exit_code() in {-signal.SIGKILL, None}  # known from Linux 6.15 on


def test_a_process_that_is_not_there_has_ended(process):
    process.kill()
    process.wait()
    assert start_ticks(process.pid) is None
    gone = Watched(process.pid)
    assert gone.has_ended
    assert gone.exit_code() is None


def test_a_number_that_another_process_has_now_is_not_taken_for_it(process, watched):
    watched._start_ticks -= 1
    assert watched.has_ended


def test_processes_are_told_apart_by_when_they_were_started(process):
    time.sleep(0.02)
    own = start_ticks(os.getpid())
    assert own is not None
    assert own < start_ticks(process.pid)
