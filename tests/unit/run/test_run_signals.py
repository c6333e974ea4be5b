"""Real signals: the first asks, the second stops, and afterwards everything is as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from end_to_end.commands import environment
from plimsoll.run.signals import stop_on_signal

_PROGRAM = """
import signal
from plimsoll.run.signals import stop_on_signal
with stop_on_signal() as request:
    print("ready", flush=True)
    while request.signal_number is None:
        signal.pause()
    print(request.signal_number, flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_first_signal_is_noted_and_the_second_ends_the_process(number, code):
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.value}\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_nothing_is_noted_before_a_signal():
    with stop_on_signal() as request:
        assert request.signal_number is None


def test_signals_of_two_kinds_are_both_noted():
    """The first SIGTERM after a Ctrl-C still lets the step be finished."""
    with stop_on_signal() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal_number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal_number == signal.SIGTERM


def test_after_the_block_a_signal_is_what_it_was():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signal():
        os.kill(os.getpid(), signal.SIGINT)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
