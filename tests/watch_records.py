"""Handmade records of watches: a run with a budget, a process that grows until it is killed, and a machine."""

from plimsoll.records.watch import Line, ProcessUse, RunProgress, WatchEnd, WatchRecord, WatchSample

MIB = 1 << 20


def use(pid=7, private=100, parent=1, **changes):
    """Return one process with ``private`` MiB."""
    sizes = {"private_bytes": private * MIB, "file_bytes": 40 * MIB, "shared_bytes": 0, "swap_bytes": 0}
    return ProcessUse(pid=pid, parent=parent, name="python", data_bytes=private * MIB, **(sizes | changes))


def line(kind="machine", name="memory of the machine", used=400, limit=1000, seconds_left=None):
    """Return one limit in MiB."""
    return Line(kind=kind, name=name, used_bytes=used * MIB, limit_bytes=limit * MIB, seconds_left=seconds_left)


def growing(num_samples=40, rate=10, end=None):
    """Return a process that grows by ``rate`` MiB every two seconds in a group of 1,000 MiB, next to a constant one."""
    samples = []
    for number in range(num_samples):
        grown = 100 + rate * number
        left = 2.0 * (1000 - grown) / rate if grown >= 700 and rate > 0 else None
        group = line("cgroup", "cgroup v2 memory.max of /job", grown, 1000, left)
        samples.append(
            WatchSample(
                seconds=2.0 * number,
                processes=(use(7, grown), use(8, 50, parent=7)),
                lines=(line(), group),
                num_kills=0,
            )
        )
    return WatchRecord(subject="process 7", wall_time="2026-11-24T02:00:00+00:00", samples=tuple(samples), end=end)


def killed():
    """Return the same watch, until the kernel killed the process."""
    end = WatchEnd(
        seconds=180.5, how="out_of_memory", exit_code=-9,
        text="process 7 was killed by SIGKILL; the kernel has killed for memory meanwhile "
        "(its control group counts it)",
    )  # fmt: skip
    return growing(90, 10, end)


def run_watch():
    """Return a CPU run with its budget and its predicted peak."""
    progress = RunProgress(
        status="running", step=12, num_steps=200, loss=5.25, micro_batch=8, units_per_second=12345.0,
        samples_per_second=96.4, used_bytes=300 * MIB, peak_bytes=380 * MIB, num_ooms=1, num_deaths=1,
        predicted_parts={"activations": 200 * MIB, "parameters": 100 * MIB, "buffers": 0},
    )  # fmt: skip
    lines = (line("budget", "budget of the run", 380, 400, 20.0), line())
    trainer = use(9, 380, parent=8, swap_bytes=3 * MIB, gpu_bytes=64 * MIB)
    first = WatchSample(seconds=0.0, processes=(use(8, 60), trainer), lines=lines, run=progress, num_kills=1)
    samples = tuple(first.model_copy(update={"seconds": seconds}) for seconds in (0.0, 2.0, 4.0))
    return WatchRecord(subject="run a", wall_time="2026-11-24T02:00:00+00:00", samples=samples)
