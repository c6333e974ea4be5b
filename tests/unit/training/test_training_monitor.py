"""Memory sampled during a run, and the display of its progress."""

import contextlib
import os
import pty
import re
import sys
import time
import tty

import pytest
import torch

from plimsoll.device.base import backend_for
from plimsoll.records.device import MemoryUse
from plimsoll.records.run import StepLine
from plimsoll.training.monitor import MemorySampler, View, thinned
from processes import run_program

MIB = 1 << 20


def test_few_samples_are_all_kept():
    samples = [(0.1, 5), (0.2, 3)]
    assert thinned(samples, 2) == ((0.1, 5), (0.2, 3))
    assert thinned([], 2) == ()


def test_of_many_samples_the_highest_of_each_part_stays():
    samples = [(0.0, 1), (0.1, 9), (0.2, 2), (0.3, 4), (0.4, 3), (0.5, 8), (0.6, 8)]
    # Seven samples in three parts: [0, 2), [2, 4), [4, 7). Of two equal maxima the first one counts.
    assert thinned(samples, 3) == ((0.1, 9), (0.3, 4), (0.5, 8))


@pytest.mark.parametrize("num_samples", [1, 7, 8, 9, 100, 1001])
def test_the_peak_is_never_thinned_away(num_samples):
    samples = [(float(i), (i * 37) % num_samples) for i in range(num_samples)]
    kept = thinned(samples, 8)
    assert max(use for _, use in kept) == num_samples - 1
    assert len(kept) == min(num_samples, 8)
    assert sorted(kept) == list(kept)


def test_the_samples_show_a_real_allocation():
    sampler = MemorySampler(backend_for("cpu"), offset_seconds=100.0)
    with sampler.running():
        sampler.sample()
        held = torch.ones(64 * MIB // 4)
        while len(sampler._samples) < 4:  # the thread adds samples
            time.sleep(0.01)
    samples = sampler.drain()
    assert len(samples) >= 4
    assert 60 * MIB < samples[-1][1] - samples[0][1] < 80 * MIB
    assert samples[0][0] >= 100
    assert sampler.seconds() >= samples[-1][0]
    assert sampler.drain() == ()
    del held


def test_seconds_go_on_from_those_before_a_restart(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    first, again = MemorySampler(backend_for("cpu")), MemorySampler(backend_for("cpu"), offset_seconds=100.0)
    now[0] += 2.5
    assert (first.seconds(), again.seconds()) == (2.5, 102.5)


def test_of_a_step_eight_samples_are_kept():
    sampler = MemorySampler(backend_for("cpu"))
    for _ in range(20):
        sampler.sample()
    assert len(sampler.drain()) == 8


# The thread samples while the main thread holds every small block that the limit allows.
FULL = """
import time
from plimsoll.device.base import backend_for
from plimsoll.training.monitor import MemorySampler
backend = backend_for("cpu")
with backend.limited(backend.probe().capacity_bytes):  # starts the thread pools
    pass
held, size = [], 1 << 20
with backend.limited(backend.use().used_bytes + (48 << 20)):
    sampler = MemorySampler(backend)
    with sampler.running():
        while size:
            try:
                held.append(bytearray(size))
            except MemoryError:
                size //= 2
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        held.clear()
        sampler.drain()
        time.sleep(0.3)
        print(len(sampler.drain()) > 0)
"""


def test_the_sampler_outlives_a_full_memory():
    done = run_program(FULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def line(step, time_seconds):
    return StepLine(
        time_seconds=time_seconds,
        step=step,
        epoch=0,
        first_sample=0,
        num_samples=8,
        num_units=100,
        loss=2.5,
        learning_rate=0.1,
        step_seconds=2.0,
        micro_batch=8,
    )


MEMORY = {"device": MemoryUse(used_bytes=512 * MIB, peak_bytes=512 * MIB, reserved_bytes=0, limit_bytes=1024 * MIB)}


def test_a_log_gets_the_first_and_the_last_step_and_not_each_of_many(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")  # the width does not matter for a log
    view = View("tiny", num_steps=50, unit_name="tokens")
    with view.shown():
        for step in range(1, 51):
            view.update(line(step, time_seconds=0.01 * step), MEMORY)
        view.say("step 50: [validation] loss 2.5")
    *steps, said = capsys.readouterr().err.splitlines()
    assert len(steps) == 2
    assert "1/50" in steps[0]
    assert "50/50" in steps[1]
    assert all(step.endswith("micro-batch 8") for step in steps)
    assert said == "step 50: [validation] loss 2.5"


def test_a_log_gets_a_line_every_five_seconds(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    view = View("tiny", num_steps=50, unit_name="tokens")
    with view.shown():
        for step, seconds in enumerate([0.0, 4.75, 5.0, 9.75, 10.0, 16.0], start=1):
            now[0] = 1000.0 + seconds
            view.update(line(step, time_seconds=seconds), MEMORY)
    assert [said.split()[1] for said in capsys.readouterr().err.splitlines()] == ["1/50", "3/50", "5/50", "6/50"]


def test_the_time_left_follows_the_pace_since_the_first_step():
    view = View("tiny", num_steps=10, unit_name="tokens")
    view.update(line(1, time_seconds=60.0), {"device": MEMORY["device"]})  # a slow first step
    assert view._eta_seconds(line(1, 60.0)) is None
    assert view._eta_seconds(line(4, 66.0)) == 12.0  # 2 s a step, 6 steps to go


def test_quiet_says_nothing(capsys):
    view = View("tiny", num_steps=1, unit_name="tokens", quiet=True)
    with view.shown():
        view.update(line(1, 1.0), MEMORY)
        view.say("text")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_live_panel_drawn_four_times_a_second(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    reader, writer = pty.openpty()
    tty.setraw(writer)
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        view = View("tiny", num_steps=10, unit_name="tokens")
        with view.shown():
            for step, seconds in enumerate([0.0, 0.125, 0.25, 0.5, 0.625], start=3):
                now[0] = 1000.0 + seconds
                view.update(line(step, 6.0), MEMORY)
            view.say("stays above")
    pieces = []
    with contextlib.suppress(OSError):  # the end: nobody writes any more
        while piece := os.read(reader, 1 << 16):
            pieces.append(piece)
    os.close(reader)
    shown = b"".join(pieces).decode()
    assert "tiny" in shown
    assert list(dict.fromkeys(re.findall(r"\d+ of 10", shown))) == ["3 of 10", "5 of 10", "6 of 10"]
    assert "stays above" in shown


UNREAD = """
import os, signal
from plimsoll.training.monitor import View
from plimsoll.processes.signals import stop_on_signal

view = View("tiny", num_steps=10, unit_name="tokens")
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
with stop_on_signal(lambda: view.say("stopping")) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    view.say("again")
    print(stop.signal_number == signal.SIGTERM)
"""


def test_a_reader_that_went_away_does_not_end_the_step_that_is_finished_first():
    done = run_program(UNREAD)
    assert (done.returncode, done.stdout) == (0, "True\n")
