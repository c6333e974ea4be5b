import pytest

from plan_records import fitting_plan
from plimsoll.errors import RecordError
from plimsoll.records.device import Budget, Device, MemoryUse
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import DeathLine, EndLine, OomEvent, RunHead, StartLine, StepLine
from plimsoll.training.progress import Follower
from plimsoll.training.run_directory import RunDirectory
from watch_records import MIB, use


def _start(step=0):
    return StartLine(time_seconds=0, step=step, micro_batch=8, baseline_bytes=1, wall_time="2026-11-24")


def _step(number, **changes):
    fields = {"num_units": 100, "step_seconds": 0.5, "used_bytes": 30, "peak_bytes": 40}
    return StepLine(
        time_seconds=number, step=number, epoch=0, first_sample=0, num_samples=8, loss=1.0 / number, learning_rate=0.1,
        micro_batch=8, **(fields | changes),
    )  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "a", force=False)


def test_a_run_prepares_before_its_first_line(directory):
    follower = Follower(directory)
    progress = follower.progress()
    assert (progress.status, progress.step, progress.num_steps, progress.loss) == ("preparing", 0, None, None)
    assert (progress.units_per_second, progress.num_ooms, progress.num_deaths) == (None, 0, 0)
    directory.metrics.unlink()
    assert follower.progress().status == "preparing"


def test_new_lines_are_added_to_what_was_read(directory):
    follower = Follower(directory)
    directory.append(_start())
    directory.append(_step(1))
    first = follower.progress()
    assert (first.status, first.step, first.loss, first.peak_bytes) == ("running", 1, 1.0, 40)
    assert (first.units_per_second, first.samples_per_second) == (200.0, 16.0)
    directory.append(OomEvent(step=1, phase="forward", family="cpu-allocator"))
    directory.append(_step(2, step_seconds=1.5))
    second = follower.progress()
    assert (second.step, second.num_ooms, second.units_per_second) == (2, 1, 100.0)
    assert follower.progress() == second


def test_a_torn_line_waits_for_its_end(directory):
    follower = Follower(directory)
    directory.append(_start())
    line = _step(1).model_dump_json().encode() + b"\n"
    with directory.metrics.open("ab") as file:
        file.write(line[:20])
    assert follower.progress().step == 0
    with directory.metrics.open("ab") as file:
        file.write(line[20:])
    assert follower.progress().step == 1


def test_a_run_that_goes_on_from_a_checkpoint_is_read_anew(directory):
    follower = Follower(directory)
    for line in (_start(), _step(1), _step(2), DeathLine(time_seconds=3, signal="SIGKILL", evidence="")):
        directory.append(line)
    assert (follower.progress().step, follower.progress().num_deaths) == (2, 1)
    directory.keep_until(1)
    directory.append(_start(1))
    again = follower.progress()
    assert (again.step, again.num_deaths, again.loss) == (1, 1, None)


def test_metrics_that_were_emptied_in_place_are_read_anew(directory):
    follower = Follower(directory)
    for line in (_start(), _step(1), _step(2)):
        directory.append(line)
    assert follower.progress().step == 2
    with directory.metrics.open("r+b") as file:
        file.truncate(0)
    directory.append(_step(7))
    assert follower.progress().step == 7


def test_the_pace_is_that_of_the_last_twenty_steps(directory):
    follower = Follower(directory)
    for number in range(1, 26):
        directory.append(_step(number, step_seconds=float(number)))
    assert follower.progress().units_per_second == 20 * 100 / sum(range(6, 26))


def test_steps_that_took_no_time_have_no_pace(directory):
    directory.append(_step(1, step_seconds=0.0))
    assert Follower(directory).progress().units_per_second is None


def test_an_end_is_told(directory):
    directory.append(EndLine(time_seconds=1, step=3, status="failed", message="the loss is NaN"))
    progress = Follower(directory).progress()
    assert (progress.status, progress.message) == ("failed", "the loss is NaN")


def test_a_damaged_line_is_refused_with_its_file(directory):
    with directory.metrics.open("ab") as file:
        file.write(b"\0\xff\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl is not a metrics line"):
        Follower(directory).progress()


@pytest.mark.parametrize(("kind", "used_bytes"), [("cpu", 120 * MIB), ("cuda", 30)])
def test_the_budget_is_that_of_the_training_process(directory, kind, used_bytes):
    used = MemoryUse(used_bytes=1, peak_bytes=1, reserved_bytes=1)
    device = Device(name="x", kind=kind, capacity_bytes=8, free_bytes=6, hardware_bytes=9, use=used)
    job = {"steps": 9, "task": "classification"}
    head = RunHead(job=job, device=device, versions={}, fingerprint={})
    follower = Follower(directory)
    with directory.locked():
        trainer = use(directory.training_pid(), 120)
        assert follower.budget_lines((trainer,), follower.progress()) == []
        head.save(directory.head)
        assert follower.budget_lines((trainer,), follower.progress()) == []  # without a plan
        micro_batch_plan(Budget(device_bytes=400 * MIB), (8,)).save(directory.plan)
        directory.append(_step(1))
        progress = follower.progress()
        (line,) = follower.budget_lines((use(1, 50), trainer), progress)
        others = follower.budget_lines((use(1, 50),), progress)
        assert [line.used_bytes for line in others] == ([] if kind == "cpu" else [30])
    assert (line.kind, line.used_bytes, line.limit_bytes) == ("budget", used_bytes, 400 * MIB)
    assert (progress.num_steps, progress.unit_name) == (9, "samples")
    micro_batch_plan(Budget(host_bytes=500 * MIB), (8,)).save(directory.plan)  # resumed with another budget
    with directory.locked():
        (line,) = follower.budget_lines((trainer,), progress)
    assert (line.used_bytes, line.limit_bytes) == (120 * MIB, 500 * MIB)
    micro_batch_plan(Budget(device_bytes=400 * MIB, host_bytes=500 * MIB), (8,)).save(directory.plan)
    with directory.locked():
        lines = follower.budget_lines((trainer,), progress)
        assert len(follower.budget_lines((use(1, 50),), progress)) == (0 if kind == "cpu" else 1)
    assert [(line.used_bytes, line.limit_bytes) for line in lines] == [
        (used_bytes, 400 * MIB),
        (120 * MIB, 500 * MIB),
    ]


def test_what_the_plan_predicts_is_told_and_expected_of_the_budget(directory):
    plan = fitting_plan()
    plan.save(directory.plan)
    follower = Follower(directory)
    assert follower._predicted_bytes(plan) == plan.fallbacks[0].peak.likely_bytes
    directory.append(_step(1, fallback=1))
    assert follower.progress().predicted_parts == plan.prediction.parts
    assert follower._predicted_bytes(plan) == plan.fallbacks[1].peak.likely_bytes
    directory.append(_start().model_copy(update={"fallback": 2}))
    follower.progress()
    assert follower._predicted_bytes(plan) == plan.fallbacks[2].peak.likely_bytes
    directory.append(_step(2, fallback=len(plan.fallbacks)))
    follower.progress()
    assert follower._predicted_bytes(plan) is None
