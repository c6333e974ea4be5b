"""What the sampler sees of real memory, and what the view prints where."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from plimsoll.device.cpu import CpuBackend
from plimsoll.records.device import MemoryUse
from plimsoll.records.run import StepLine
from plimsoll.run.monitor import MemorySampler, View, thinned

MIB = 1 << 20
USE = {"device": MemoryUse(used_bytes=512 * MIB, peak_bytes=600 * MIB, reserved_bytes=0, limit_bytes=1024 * MIB)}


def samples_of(*used: int) -> list[tuple[float, int]]:
    return [(float(second), used_bytes) for second, used_bytes in enumerate(used)]


@pytest.mark.parametrize(
    ("used", "num_kept", "kept"),
    [
        ((), 2, ()),
        ((5, 1), 2, ((0.0, 5), (1.0, 1))),
        ((5, 1, 7, 2), 2, ((0.0, 5), (2.0, 7))),
        ((1, 2, 3, 4, 9), 2, ((1.0, 2), (4.0, 9))),  # parts of 2 and 3
        ((3, 9, 1, 1, 1, 4, 8), 3, ((1.0, 9), (2.0, 1), (6.0, 8))),  # parts of 2, 2 and 3; the first of two equal ones
        ((1, 2, 9, 3), 1, ((2.0, 9),)),
    ],
)
def test_of_each_part_the_highest_sample_is_kept(used, num_kept, kept):
    assert thinned(samples_of(*used), num_kept) == kept


def test_a_peak_is_never_thinned_away():
    for place in range(100):
        used = [1] * 100
        used[place] = 2
        assert (float(place), 2) in thinned(samples_of(*used), 8)


def test_the_sampler_sees_memory_come_and_go():
    sampler = MemorySampler(CpuBackend())
    sampler.sample()
    with sampler.running():
        block = bytearray(b"x") * (64 * MIB)
        taken_seconds = sampler.seconds()
        deadline = time.monotonic() + 60
        while sampler._samples[-1][0] <= taken_seconds and time.monotonic() < deadline:
            time.sleep(0.01)
        del block
    (_, before_bytes), *_, (_, with_block_bytes) = sampler.drain()
    assert 60 * MIB < with_block_bytes - before_bytes < 80 * MIB
    assert sampler.drain() == ()


def test_samples_are_drained_eight_at_most_in_order_of_time():
    sampler = MemorySampler(CpuBackend())
    for _ in range(50):
        sampler.sample()
    drained = sampler.drain()
    assert len(drained) == 8
    assert list(drained) == sorted(drained)


def test_a_restarted_run_counts_on_from_the_seconds_before():
    sampler = MemorySampler(CpuBackend(), offset_seconds=1000.0)
    sampler.sample()
    assert 1000.0 <= sampler.drain()[0][0] <= sampler.seconds() < 2000.0


def step(number: int) -> StepLine:
    return StepLine(
        time_seconds=2.0 * number,
        step=number,
        epoch=0,
        first_sample=0,
        num_samples=8,
        num_units=1000,
        loss=2.5,
        learning_rate=1e-3,
        step_seconds=2.0,
        micro_batch=8,
    )


def test_elsewhere_than_on_a_terminal_steps_are_lines_and_not_too_many(capsys, monkeypatch):
    """Steps 2 to 59 come within five seconds of the first; the last is always shown."""
    monkeypatch.setenv("COLUMNS", "100")
    view = View("tiny", 60, "tokens")
    with view.shown():
        for number in range(1, 61):
            view.update(step(number), USE)
        view.say("[bold] out of memory")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 1/60  loss 2.500  512.0 MiB of 1.0 GiB  500 tokens/s  micro-batch 8",
        "step 60/60  loss 2.500  512.0 MiB of 1.0 GiB  0 ms left  500 tokens/s  micro-batch 8",
        "[bold] out of memory",
    ]


def test_the_time_left_follows_the_pace_since_the_first_step(capsys, monkeypatch):
    """Two seconds a step, and 30 of 60 steps to go."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("plimsoll.run.monitor._LINE_SECONDS", 0.0)
    view = View("tiny", 60, "samples")
    for number in (10, 30):
        view.update(step(number), USE)
    first, second = capsys.readouterr().err.splitlines()
    assert "left" not in first
    assert "1 min 00 s left  500 samples/s" in second


def test_quiet_prints_nothing(capsys):
    view = View("tiny", 1, "tokens", quiet=True)
    with view.shown():
        view.update(step(1), USE)
        view.say("out of memory")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_panel_with_what_was_said_above_it(monkeypatch):
    """A real pseudo-terminal; the host's memory has a bar of its own."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        view = View("tiny", 2, "tokens")
        with view.shown():
            view.say("out of memory")
            view.update(step(1), USE | {"host": USE["device"]})
            view.update(step(2), USE)
        terminal.flush()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "out of memory" in shown
    assert " tiny " in shown
    assert "host" in shown
    assert "2 of 2" in shown
