"""The package itself: its public names, found when they are first used."""

import subprocess
import sys

import pytest

import plimsoll
from plimsoll.device.base import limited
from plimsoll.device.probe import probe_machine
from plimsoll.step.train_step import TrainStep
from processes import environment

NAMES = [
    *(
        "Diagnosis",
        "Job",
        "Loaded",
        "OomEvent",
        "Plan",
        "Prediction",
        "RunRecord",
        "StepResult",
        "TrainStep",
        "UnrolledCell",
    ),
    *(
        "explain",
        "explained",
        "limited",
        "load_model",
        "plan_job",
        "plan_step",
        "predict",
        "predict_function",
        "predict_job",
        "probe",
        "render",
    ),
    "rows_by_length",
    "try_plan",
]


def test_these_are_the_public_names():
    assert sorted(plimsoll.__all__) == sorted(dir(plimsoll)) == NAMES
    assert all(getattr(plimsoll, name) is not None for name in NAMES)


def test_a_name_is_what_its_module_defines():
    assert plimsoll.TrainStep is TrainStep
    assert plimsoll.limited is limited
    assert plimsoll.probe is probe_machine


def test_names_can_be_imported_all_at_once():
    names: dict[str, object] = {}
    exec("from plimsoll import *", names)
    assert {*NAMES} <= names.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'plimsoll' has no attribute 'TrainSteps'"):
        plimsoll.TrainSteps


def test_torchao_says_nothing_when_it_is_imported_after():
    program = "import plimsoll, torch, torchao.quantization"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "needs_torch"), [("Job", False), ("RunRecord", False), ("explain", False), ("TrainStep", True)]
)
def test_torch_is_loaded_when_a_name_needs_it(name, needs_torch):
    program = f"import sys, plimsoll; a = 'torch' in sys.modules; plimsoll.{name}; print(a, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", str(needs_torch)]
