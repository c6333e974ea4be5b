"""Other programs that keep cores busy are found and named; processes of Plimsoll are not."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from plimsoll.device.busy_cores import OtherPrograms


@contextmanager
def spinning() -> Iterator[list[subprocess.Popen]]:
    """Yield as many busy processes as there are cores, so that at least one of them runs at any time."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_program_that_keeps_cores_busy_is_named():
    with spinning() as programs:
        others = OtherPrograms(ours=programs[0].pid)  # one of them counts as ours, the others do not
        time.sleep(0.3)
        said = others.sentence()
    if len(programs) > 1:
        assert "This machine is busy: " in said
        # The three busiest programs are named; on a busy machine these may be others.
        assert any(f"(process {one.pid})" in said for one in programs[1:]) or said.count("(process ") == 3
    assert f"(process {programs[0].pid})" not in said


def test_what_this_process_starts_is_not_another_program():
    with spinning() as programs:
        others = OtherPrograms()
        time.sleep(0.3)
        said = others.sentence()
    assert not any(f"(process {one.pid})" in said for one in programs)
