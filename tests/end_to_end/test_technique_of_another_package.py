"""A technique of another package is planned, run, exported and reported without changes in Plimsoll."""

from __future__ import annotations

from pathlib import Path

import pytest

from end_to_end.commands import SOURCES, plimsoll, trained
from end_to_end.test_bad_input import tiny_job
from plimsoll.records.plan import Plan

PACKAGE = Path(__file__).parents[1] / "another_package"
WITH_IT = {"PYTHONPATH": f"{PACKAGE}:{SOURCES}"}
BUDGET = "600MiB"


@pytest.mark.long
def test_it_is_planned_run_exported_and_reported(tmp_path):
    job, run = tiny_job(tmp_path, allow="rests"), tmp_path / "run"
    trained(job, "--out", run, "--budget", BUDGET, "--pin", "rests", **WITH_IT)
    plan = Plan.load(run / "plan.json")
    assert "rests" in map(str, plan.choices)
    assert (plan.about["rests"], plan.numerics["rests"]) == ("nothing is done", "lossy")
    exported = plimsoll("plan", job, "--budget", BUDGET, "--pin", "rests", "--export", "deepspeed", **WITH_IT)
    assert "rests: do nothing" in exported.stderr
    reported = plimsoll("report", run / "plan.json", **WITH_IT)
    assert "nothing is done" in reported.stdout
    refused = plimsoll("train", job, "--out", tmp_path / "without", "--plan", run / "plan.json")
    assert refused.returncode == 2
    assert "there is no technique `rests`" in refused.stderr
    assert not (tmp_path / "without").exists()


def test_without_the_package_its_name_is_none(tmp_path):
    done = plimsoll("plan", tiny_job(tmp_path, allow="rests"), "--budget", BUDGET, "--pin", "rests")
    assert done.returncode == 2
    assert "there is no technique `rests`" in done.stderr
    assert "allow: `rests` is unknown" in done.stderr
