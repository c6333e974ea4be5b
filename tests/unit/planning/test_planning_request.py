"""The options of `plimsoll plan` and their valid combinations. The tests of the command cover its answers."""

from pathlib import Path

import pytest

from plimsoll.errors import InputError
from plimsoll.planning.request import PlanRequest, plan_as_asked
from plimsoll.records.comparison import Calibration
from plimsoll.records.plan import Pin

JOB = Path("job.yaml")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PlanRequest(input_path=JOB, train=True, inference=True), "cannot be combined in a plan of job.yaml"),
        (
            PlanRequest(input_path=JOB, inference=True, pins=("heap",), compare=True),
            "--pin, --compare belongs to a plan",
        ),
        (
            PlanRequest(input_path=JOB, task="score", max_length=8),
            "--task, --max-length belongs to a plan with --infer",
        ),
    ],
)
def test_options_are_of_one_kind_of_plan(request_: PlanRequest, message: str) -> None:
    with pytest.raises(InputError, match=message):
        request_.check()


def test_options_of_a_training_go_together_and_pins_are_read() -> None:
    asked = PlanRequest(input_path=JOB, pins=("micro_batch=4",), forbids=("heap",), compare=True)
    asked.check()
    assert asked.pinned == (Pin(technique="micro_batch", value=4),)


@pytest.mark.parametrize(
    ("pins", "message"),
    [(("micro batch",), "--pin: cannot read"), (("heap", "micro_batch=4", "micro_batch=8"), "cannot both be pinned")],
)
def test_pins_that_cannot_be_are_refused(pins: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _ = PlanRequest(input_path=JOB, pins=pins).pinned


def test_the_calibration_is_read_from_a_file_or_is_this_machines(tmp_path: Path) -> None:
    Calibration().save(tmp_path / "calibration.json")
    assert PlanRequest(input_path=JOB, calibration=tmp_path / "calibration.json").known() == Calibration()


def test_a_job_whose_weights_are_yet_to_be_trained_is_not_applied(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: lstm\ndata: a.txt\n")
    asked = PlanRequest(input_path=tmp_path / "job.yaml", inference=True)
    with pytest.raises(InputError, match="trains new weights"):
        plan_as_asked(asked, lambda _: None, lambda _: None, lambda _: None)
