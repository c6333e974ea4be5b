"""The public names: all there, found when they are used, and free of torch until then."""

from __future__ import annotations

import subprocess
import sys

import pytest

import plimsoll
from end_to_end.commands import environment
from plimsoll.device.limit import limited
from plimsoll.device.probe import probe_machine
from plimsoll.records.job import Job
from plimsoll.records.run import OomEvent, RunRecord
from plimsoll.report.render import render
from plimsoll.run.step import StepResult, TrainStep

PUBLIC = {
    "Job": Job,
    "OomEvent": OomEvent,
    "RunRecord": RunRecord,
    "StepResult": StepResult,
    "TrainStep": TrainStep,
    "limited": limited,
    "probe": probe_machine,
    "render": render,
}


def test_the_public_names_are_these():
    assert plimsoll.__all__ == dir(plimsoll) == list(PUBLIC)
    assert {name: getattr(plimsoll, name) for name in PUBLIC} == PUBLIC


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'plimsoll' has no attribute 'train'"):
        plimsoll.train
    assert not hasattr(plimsoll, "train")


def test_torch_is_imported_with_the_first_name_that_needs_it():
    program = """
import sys, plimsoll
plimsoll.Job, plimsoll.RunRecord, plimsoll.render
assert "torch" not in sys.modules
plimsoll.TrainStep
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, timeout=60)
