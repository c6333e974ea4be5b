"""Constraints on a plan; `test_planning_plan.py` tests how impossible ones are refused."""

import pytest

from plimsoll.errors import InputError
from plimsoll.planning.constraints import pinned_choices, require_possible, setting_of, with_pins_of
from plimsoll.planning.inputs import JobInput
from plimsoll.records.job import Job
from plimsoll.records.plan import parse_pin


def job(**changes):
    fields = {"model": "lstm", "data": "nowhere.txt", "sequence_length": 8, "batch_size": 4}
    return Job.from_fields(fields | changes)


def test_the_pins_of_a_job_are_constraints_that_the_command_line_overrides():
    wanted = job(pin=["micro_batch=4", "heap=never"])
    given = (parse_pin("micro_batch=2"),)
    assert list(map(str, with_pins_of(wanted, given, ()))) == ["micro_batch=2", "heap=never"]
    assert list(map(str, with_pins_of(wanted, (), ("heap",)))) == ["micro_batch=4"]
    assert with_pins_of(job(), given, ()) == given


def test_a_job_whose_pin_cannot_be_is_refused_before_its_data_are_prepared():
    with pytest.raises(InputError, match="there is no technique `nonsense`"):
        require_possible(job(pin=["nonsense"]), (), ())


def test_what_pins_decide_wholly_is_known_without_a_plan():
    assert pinned_choices(job(), "cpu") == ()
    found = pinned_choices(job(pin=["micro_batch=4", "chunked_loss=16", "optimizer_offload"]), "cpu")
    assert [str(choice) for choice in found] == ["chunked_loss=16", "optimizer_offload=disk"]
    found = pinned_choices(job(pin=["optimizer_offload"]), "cuda")
    assert [str(choice) for choice in found] == ["optimizer_offload=host"]


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:1", "cuda"), ("a100", "cuda")])
def test_techniques_are_told_what_the_job_is(device, kind):
    told = setting_of(JobInput(job(ranks=2, allow=["adafactor"], precision="auto")), device)
    assert (told.device, told.batch_size, told.num_ranks, told.sequence_length) == (kind, 2, 2, 8)
    assert (told.precision, told.allow, told.lengths_vary) == ("auto", {"adafactor"}, False)
