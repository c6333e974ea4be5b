"""Places where memory runs out on demand."""

import pytest

from plimsoll.device.base import backend_for
from plimsoll.errors import InputError
from plimsoll.records.run import OomEvent
from plimsoll.step.failpoints import arm_from_environment, armed, exhaust_memory, failpoint
from plimsoll.training.run_directory import RunDirectory


def passages_that_fail(name, num_passages):
    failed = []
    for passage in range(1, num_passages + 1):
        try:
            failpoint(name)
        except RuntimeError:
            failed.append(passage)
    return failed


def test_what_is_raised_is_recognised_as_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        exhaust_memory()
    assert backend_for("cpu").oom_family(raised.value) == "cpu-allocator"


def test_the_armed_passages_fail_and_no_other():
    with armed("forward", 2, 4):
        assert passages_that_fail("forward", 5) == [2, 4]
        assert passages_that_fail("backward", 5) == []
    assert passages_that_fail("forward", 5) == []


def test_arming_again_counts_from_the_beginning():
    for _ in range(2):
        with armed("forward", 1), pytest.raises(RuntimeError):
            failpoint("forward")


def test_an_error_in_the_block_disarms_too():
    with pytest.raises(KeyError), armed("forward", 1):
        raise KeyError
    assert passages_that_fail("forward", 1) == []


def test_the_environment_counts_from_the_first_passage(monkeypatch):
    monkeypatch.setattr("plimsoll.step.failpoints._armed", {})
    monkeypatch.setattr("plimsoll.step.failpoints._passed", {})
    monkeypatch.setenv("PLIMSOLL_FAILPOINTS", "copy@1")
    arm_from_environment()
    assert passages_that_fail("copy", 3) == [1]


def test_the_environment_arms_several_points(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_FAILPOINTS", "copy@1,copy@3,clip@2")
    with armed("copy"), armed("clip"):  # disarms the points that the environment adds
        arm_from_environment()
        assert passages_that_fail("copy", 4) == [1, 3]
        assert passages_that_fail("clip", 4) == [2]


def test_nothing_is_armed_without_the_variable(monkeypatch):
    monkeypatch.delenv("PLIMSOLL_FAILPOINTS", raising=False)
    arm_from_environment()
    assert passages_that_fail("copy", 2) == []


@pytest.mark.parametrize("entry", ["copy", "copy@", "copy@x", "copy@-1", "copy@0", "copi@1"])
def test_an_entry_of_another_form_is_refused(monkeypatch, entry):
    monkeypatch.setenv("PLIMSOLL_FAILPOINTS", entry)
    with pytest.raises(InputError, match=rf"'{entry}' is not of the form name@passage: write for example backward@3"):
        arm_from_environment()


@pytest.mark.long
def test_a_training_process_is_armed_by_its_environment(finished):
    """The run was started with ``backward@2``, and each of its two steps passes this point once."""
    events = [line for line in RunDirectory(finished.path).lines() if isinstance(line, OomEvent)]
    assert [(event.phase, event.step, event.requested_bytes) for event in events] == [("backward", 2, 1 << 60)]
