"""Real signals to a real process."""

import os
import signal

import pytest

from plimsoll.processes.signals import stop_on_signal
from processes import run_program


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_work_goes_on(number):
    with stop_on_signal() as request:
        assert request.signal_number is None
        os.kill(os.getpid(), number)
        assert request.signal_number == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_afterwards_the_signals_do_what_they_did_before(number):
    before = signal.getsignal(number)
    with stop_on_signal():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("error", [None, MemoryError(), BrokenPipeError()])
def test_the_first_signal_is_told_of_where_there_is_memory_to_tell(error):
    told = []

    def say():
        told.append("stopping")
        if error is not None:
            raise error

    with stop_on_signal(say) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (told, request.signal_number) == (["stopping"], signal.SIGTERM)


def test_a_parent_that_is_gone_asks_to_stop_without_a_signal():
    with stop_on_signal(parent=os.getppid()) as request:
        assert request.signal_number is None
        request.parent = os.getpid()  # no process is its own parent, so the parent seems to have changed
        assert request.signal_number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal_number == signal.SIGINT
    with stop_on_signal() as request:
        assert request.signal_number is None


TWICE = """
import os, signal, sys
from plimsoll.processes.signals import stop_on_signal
number = int(sys.argv[1])
with stop_on_signal():
    os.kill(os.getpid(), number)
    print("goes on", flush=True)
    os.kill(os.getpid(), number)
    print("not reached")
"""


def test_a_second_sigterm_ends_the_process_at_once():
    done = run_program(TWICE, int(signal.SIGTERM))
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "goes on\n")


def test_a_second_sigint_is_a_keyboard_interrupt():
    done = run_program(TWICE, int(signal.SIGINT))
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "goes on\n")
    assert "KeyboardInterrupt" in done.stderr


def test_a_signal_of_the_other_kind_is_a_request_too():
    with stop_on_signal() as request:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal_number == signal.SIGTERM
