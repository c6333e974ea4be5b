"""Failpoints: memory runs out where and when they say, and nowhere else."""

from __future__ import annotations

import pytest

from plimsoll.device.cpu import CpuBackend
from plimsoll.errors import InputError
from plimsoll.records.run import OomEvent
from plimsoll.run import failpoints
from plimsoll.run.directory import RunDirectory
from plimsoll.run.failpoints import arm_from_environment, armed, failpoint


@pytest.fixture(autouse=True)
def _nothing_stays_armed(monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", {})
    monkeypatch.setattr(failpoints, "_passed", {})


def failed_passages(name: str, num_passages: int) -> list[int]:
    """Pass a point so many times; return which passages ran out of memory, as the allocator itself says it."""
    families = {}
    for passage in range(1, num_passages + 1):
        try:
            failpoint(name)
        except RuntimeError as error:
            families[passage] = CpuBackend().oom_family(error)
    assert set(families.values()) <= {"cpu-allocator"}
    return list(families)


def test_the_passages_that_are_armed_fail_and_no_others():
    assert failed_passages("backward", 3) == []
    with armed("backward", 2, 4):
        assert failed_passages("backward", 5) == [2, 4]
        assert failed_passages("forward", 5) == []
    assert failed_passages("backward", 5) == []


def test_passages_are_counted_from_the_arming():
    for _ in range(2):
        with armed("backward", 1):
            assert failed_passages("backward", 2) == [1]


def test_points_are_armed_from_the_environment(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_FAILPOINTS", "backward@3,optimizer@1,backward@1")
    arm_from_environment()
    assert failed_passages("backward", 4) == [1, 3]
    assert failed_passages("optimizer", 4) == [1]
    assert failed_passages("loss", 4) == []


@pytest.mark.parametrize("value", ["", ",", None])
def test_an_empty_environment_arms_nothing(value, monkeypatch):
    monkeypatch.delenv("PLIMSOLL_FAILPOINTS", raising=False)
    if value is not None:
        monkeypatch.setenv("PLIMSOLL_FAILPOINTS", value)
    arm_from_environment()
    assert failed_passages("backward", 2) == []


@pytest.mark.parametrize("entry", ["backward", "backward@", "backward@x", "backward@-1", "backward@1@2"])
def test_another_form_is_refused(entry, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_FAILPOINTS", f"loss@1,{entry}")
    with pytest.raises(InputError, match=f"'{entry}' is not of the form name@passage: write for example backward@3"):
        arm_from_environment()


def test_a_training_process_is_armed_by_its_environment(finished):
    """The run of this session was started with ``backward@2``."""
    events = [line for line in RunDirectory(finished.path).lines() if isinstance(line, OomEvent)]
    assert [(event.phase, event.step, event.requested_bytes) for event in events] == [("backward", 2, 1 << 60)]
