"""What a run teaches the next plan."""

import pytest

from plimsoll.plan.cost import learned_peak, learned_ratio
from plimsoll.records.comparison import Calibration
from plimsoll.records.device import Budget
from plimsoll.records.plan import Choice, Duration, Plan, Rung, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.run import StepLine
from plimsoll.run.learning import calibration_file, known_calibration, learn, learned_from

MIB = 1 << 20
CHOICES = (micro_batch_choice(4), Choice(technique="checkpointing", options={"blocks": "all"}))


def plan(time_factor=1.0):
    rung = Rung(
        choices=CHOICES,
        peak=Estimate(likely_bytes=100 * MIB, low_bytes=90 * MIB, high_bytes=110 * MIB),
        step_time=Duration(likely_seconds=2.0, low_seconds=1.0, high_seconds=3.0),
    )
    return Plan(budget=Budget(), rungs=(rung, rung), made_for={"target": "cpu"}, time_factor=time_factor)


def step(number, seconds=3.0, peak_mib=105, rung=0):
    return StepLine(
        time_seconds=number, step=number, epoch=0, first_sample=0, num_samples=8, num_units=8, loss=1.0,
        learning_rate=0.1, step_seconds=seconds, micro_batch=4, rung=rung, peak_bytes=peak_mib * MIB,
    )  # fmt: skip


STEPS = [step(1, 99), step(2, 50), step(3, 3.0), step(4, 2.8), step(5, 3.4), step(6, 9.0, 300, rung=1)]


def test_steps_of_the_plan_count_from_the_third_on():
    learned = learned_from(Calibration(), plan(), STEPS)
    names = ["micro_batch", "checkpointing"]
    assert learned_ratio(learned, "cpu", names).mean == pytest.approx(1.5)  # the median, 3 s of 2 s
    assert learned_peak(learned, "cpu", names).high == pytest.approx(1.05)
    assert learned_peak(learned, "cpu", ["chunked_loss"]) is None
    assert learned_ratio(learned, "cuda sm_86", names) is None


def test_what_was_known_of_the_time_is_not_counted_twice():
    learned = learned_from(Calibration(), plan(time_factor=1.5), STEPS)
    assert learned_ratio(learned, "cpu", ["checkpointing"]).mean == pytest.approx(3.0 / (2.0 / 1.5))


@pytest.mark.parametrize("steps", [[], STEPS[:2], [step(3, 7.0, 400)], [step(3, rung=1)]])
def test_what_says_nothing_teaches_nothing(steps):
    assert learned_from(Calibration(), plan(), steps) == Calibration()


@pytest.mark.parametrize("unknown", ["peak", "step_time"])
def test_a_plan_that_predicts_only_one_of_the_two_teaches_nothing(unknown):
    made = plan()
    rung = made.rungs[0].model_copy(update={unknown: None})
    assert learned_from(Calibration(), made.model_copy(update={"rungs": (rung,)}), STEPS) == Calibration()


def test_a_run_that_went_on_teaches_what_its_last_process_did():
    """Not the peaks under an earlier plan, nor the two steps with which a process begins."""
    went_on = [*STEPS[:5], step(6, 99, 300), step(7, 50, 300), step(8, 4.0, 110)]
    learned = learned_from(Calibration(), plan(), went_on, begun_at=5)
    assert learned_ratio(learned, "cpu", ["checkpointing"]).mean == pytest.approx(2.0)
    assert learned_peak(learned, "cpu", ["checkpointing"]).high == pytest.approx(1.1)
    assert learned_from(Calibration(), plan(), STEPS, begun_at=6) == Calibration()


def test_runs_add_up_in_a_file_that_a_torn_one_does_not_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "cache"))
    assert known_calibration() == Calibration()
    learn(plan(), STEPS)
    learn(plan(), STEPS)
    assert learned_peak(known_calibration(), "cpu", ["checkpointing"]).num_runs == 2
    calibration_file().write_text('{"record": "cal')
    assert known_calibration() == Calibration()
    learn(plan(), STEPS)
    assert learned_peak(known_calibration(), "cpu", ["checkpointing"]).num_runs == 1


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "file"))
    learn(plan(), STEPS)
