"""Calibration: measurements of a run that improve the next plan."""

import pytest

from plimsoll.planning.calibration import calibration_file, known_calibration, learn, learned_from
from plimsoll.planning.search.time_model import learned_peak, learned_ratio
from plimsoll.records.comparison import Calibration
from plimsoll.records.device import Budget
from plimsoll.records.plan import Choice, Configuration, Duration, Plan, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.run import StepLine

MIB = 1 << 20
CHOICES = (micro_batch_choice(4), Choice(technique="checkpointing", options={"blocks": "all"}))
NAMES = ["micro_batch", "checkpointing"]
SLOWER = {"likely_seconds": 4.0, "high_seconds": 4.0}


def plan(time_factor=1.0):
    configuration = Configuration(
        choices=CHOICES,
        peak=Estimate(likely_bytes=100 * MIB, low_bytes=90 * MIB, high_bytes=110 * MIB),
        step_time=Duration(likely_seconds=2.0, low_seconds=1.0, high_seconds=3.0),
    )
    behind = configuration.model_copy(
        update={"choices": CHOICES[:1], "step_time": configuration.step_time.model_copy(update=SLOWER)}
    )
    return Plan(budget=Budget(), fallbacks=(configuration, behind), made_for={"target": "cpu"}, time_factor=time_factor)


def step(number, seconds=3.0, peak_mib=105, fallback=0):
    return StepLine(
        time_seconds=number, step=number, epoch=0, first_sample=0, num_samples=8, num_units=8, loss=1.0,
        learning_rate=0.1, step_seconds=seconds, micro_batch=4, fallback=fallback,
        peak_bytes=None if peak_mib is None else peak_mib * MIB,
    )  # fmt: skip


STEPS = [step(1, 99), step(2, 50), step(3, 2.8, 101), step(4, 3.4), step(5, 3.0, 99), step(6, 9.0, 200, fallback=1)]


def test_steps_of_the_plan_count_from_the_third_on():
    learned = learned_from(Calibration(), plan(), STEPS)
    assert learned_ratio(learned, "cpu", NAMES).mean == pytest.approx(1.5)  # the median, 3 s of 2 s
    assert learned_peak(learned, "cpu", NAMES).high == pytest.approx(1.05)
    assert learned_peak(learned, "cpu", ["chunked_loss"]) is None
    assert learned_ratio(learned, "cuda sm_86", NAMES) is None


def test_what_was_known_of_the_time_is_not_counted_twice():
    learned = learned_from(Calibration(), plan(time_factor=1.5), STEPS)
    assert learned_ratio(learned, "cpu", ["checkpointing"]).mean == pytest.approx(3.0 / (2.0 / 1.5))


@pytest.mark.parametrize("steps", [[], STEPS[:2], [step(3, 7.0, 400)], [step(3, fallback=1)]])
def test_what_says_nothing_teaches_nothing(steps):
    assert learned_from(Calibration(), plan(), steps) == Calibration()


@pytest.mark.parametrize(
    ("seconds", "is_learned"), [(2.0 / 3, False), (0.6, False), (0.7, True), (5.9, True), (6.0, False), (7.0, False)]
)
def test_a_step_of_three_times_what_was_predicted_or_a_third_is_not_learned(seconds, is_learned):
    learned = learned_from(Calibration(), plan(), [step(3, seconds)])
    assert (learned_ratio(learned, "cpu", NAMES) is not None) == is_learned
    assert learned_peak(learned, "cpu", NAMES).high == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("peak_mib", "is_learned"), [(33, False), (34, True), (299, True), (300, False), (None, False)]
)
def test_a_peak_of_three_times_what_was_predicted_or_a_third_is_not_learned(peak_mib, is_learned):
    learned = learned_from(Calibration(), plan(), [step(3, 3.0, peak_mib), step(4, 3.0, None)])
    assert (learned_peak(learned, "cpu", NAMES) is not None) == is_learned
    assert learned_ratio(learned, "cpu", NAMES).mean == pytest.approx(1.5)


def test_a_plan_that_was_made_for_no_target_teaches_nothing():
    assert learned_from(Calibration(), plan().model_copy(update={"made_for": {}}), STEPS) == Calibration()


@pytest.mark.parametrize("unknown", ["peak", "step_time"])
def test_a_plan_that_predicts_only_one_of_the_two_teaches_nothing(unknown):
    made = plan()
    configuration = made.fallbacks[0].model_copy(update={unknown: None})
    assert learned_from(Calibration(), made.model_copy(update={"fallbacks": (configuration,)}), STEPS) == Calibration()


def test_a_run_that_went_on_teaches_what_its_last_process_did():
    """The peaks under an earlier plan and the first two steps of a process do not count."""
    went_on = [*STEPS[:5], step(6, 99, 300), step(7, 50, 300), step(8, 4.0, 110)]
    learned = learned_from(Calibration(), plan(), went_on, begun_at=5)
    assert learned_ratio(learned, "cpu", ["checkpointing"]).mean == pytest.approx(2.0)
    assert learned_peak(learned, "cpu", ["checkpointing"]).high == pytest.approx(1.1)
    assert learned_from(Calibration(), plan(), STEPS, begun_at=6) == Calibration()


def test_runs_add_up_in_a_file_that_a_torn_one_does_not_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "folder" / "cache"))
    assert known_calibration() == Calibration()
    learn(plan(), STEPS[:2])
    assert not calibration_file().exists()
    learn(plan(), STEPS)
    learn(plan(), STEPS)
    assert learned_peak(known_calibration(), "cpu", ["checkpointing"]).num_runs == 2
    assert learned_ratio(known_calibration(), "cpu", NAMES).mean == pytest.approx(1.5)
    calibration_file().write_text('{"record": "cal')
    assert known_calibration() == Calibration()
    learn(plan(), STEPS)
    assert learned_peak(known_calibration(), "cpu", ["checkpointing"]).num_runs == 1


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "file"))
    learn(plan(), STEPS)
